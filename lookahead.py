"""The heart: draft, verify, accept. Several tokens per forward pass, and not one of them different.

A forward pass of a small batch of tokens costs little more than one of a single token, because most of its time goes
into reading the weights. Plain decoding wastes that: one token in, one token out. Lookahead decoding (Zhao et al., KDD
2024, arXiv 2312.12728) sends a tree of guesses along and keeps what turns out to be right:

    text so far   "... 3 * 4 ="         the last token, "=", is the root; it is not in the cache yet
    draft         "=" -- "12" -- ">>"   guessed by a drafter (trie.py)
                     `-- "7"
    verify        one forward over [=, 12, >>, 7] under the tree's mask: the model's own choice after each of them
    accept        after "=" the model picks "12": there is such a node, go there;
                  after "12" it picks ">>": go there; after ">>" it picks "6": no such node, stop
    emitted       "12", ">>", "6": three tokens for one forward, where plain decoding gets "12" alone

The logits of a node say what comes *after* it, so a row verifies the node's children. Four numberings meet in the loop
below: node i of the draft has row i + 1 in the mask and in the logits (row 0 is the root, which counts as node -1),
lies in cache slot base + 1 + i, and stands at position base + its depth, where base, the number of tokens in the
cache before the pass, is also the root's slot and position. With base = 9 above:

    token      =    12    >>    7
    node      -1     0     1    2
    row        0     1     2    3
    slot       9    10    11   12
    position   9    10    11   10      "7" stands where "12" does: it is another guess for the same place

The picks are made from the logits that plain decoding would see, by a picker that is a pure function
(sampling.py). So the text is the one plain decoding writes, greedy or sampled, whatever was drafted; a bad draft
costs time only. The one fine point is floating point: a forward over several rows adds numbers in another order, and
where two tokens are equal to within rounding the choice may flip. `near_tie` below tells such a case from an error.

Run it:  python lookahead.py --prompt "..."

Step by step: notebook 03, section 6.
"""

import math
import operator
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from budget import MOST, Auto, Fixed, curve_of
from sampling import Greedy, Picker
from tree import DraftTree

MAX_BUDGET = 4096  # the cache gets a slot for each node, so a mistyped number must not ask for all memory


class Session(Protocol):
    """One query's drafting.

    draft    a tree of at most `budget` nodes, to follow all that was observed; `picker` is there for drafters that
             foresee its noise. The tree may be cut before it is verified (`DraftTree.trim`)
    observe  `tokens` were emitted, with `draft` as it was verified (empty after the prefill). `picks`: n + 1 ids, what
             the picker chose behind the root and behind each node, for sessions with a class attribute `wants_picks =
             True` (drafters that learn from rejected branches, as Jacobi iteration does), else None
    close    the query is over, whatever ended it
    """

    def draft(self, budget: int, picker: Picker | None = None) -> DraftTree: ...
    def observe(
        self, tokens: Sequence[int], draft: DraftTree | None = None, picks: list[int] | None = None
    ) -> None: ...
    def close(self) -> None: ...


class Drafter(Protocol):
    """Where drafts come from; outlives queries."""

    def open(self, prompt_ids: Sequence[int]) -> Session: ...


class Seconds(NamedTuple):
    """Where a step's time went."""

    draft: float
    forward: float
    accept: float


@dataclass
class Step:
    """What happened in one forward pass.

    position       number of the first emitted token, counted from the start of the prompt
    draft          the tree that was verified; empty in the prefill and in plain steps
    accepted       the nodes on the accepted path, from the root down
    tokens         the emitted tokens: those of the accepted nodes and one more, the model's own choice behind them (a
                   drafted token that ends the text counts as this one). Empty if there was no room for any: then one
                   Step without a forward tells the finish_reason
    seconds        draft / forward / accept; the last includes telling the drafter
    finish_reason  None, or in the last step "stop" (a stop token), "length" (max_new_tokens), "context" (n_ctx is full)
    prefill        True for the first step, whose forward (if it has one) reads the prompt
    logits         (1 + nodes, vocab_size): the root's row and one per node (a prefill has the last row only). Large:
                   `generate` does not keep them
    """

    position: int
    draft: DraftTree
    accepted: list[int]
    tokens: list[int]
    seconds: Seconds
    finish_reason: str | None = None
    prefill: bool = False
    logits: Tensor | None = None


@dataclass
class Generation:
    """A finished text: the new tokens (a stop token included), the decode steps, and, kept apart, the prefill, which
    emits the first token. `seconds` is the wall time of everything."""

    tokens: list[int]
    steps: list[Step]
    finish_reason: str
    seconds: float
    prefill: Step

    @classmethod
    def of(cls, steps: Sequence[Step], seconds: float) -> "Generation":
        """All the steps that `decode` yielded, put together."""
        tokens = [token for step in steps for token in step.tokens]
        return cls(tokens, list(steps[1:]), steps[-1].finish_reason or "", seconds, steps[0])

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per decode step (the paper's EDL, effective decoding length), without the prefill and its
        token; nan without steps."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else math.nan


NOTHING = DraftTree([], [])


def decode(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    drafter: Drafter | None = None,
    picker: Picker | None = None,
    budget: int | str = "auto",
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    cache: Any = None,
) -> Iterator[Step]:
    """Write a continuation of `prompt_ids`, one forward pass at a time; yields a Step after each, the prefill first.

    model           GPT, or anything with its forward, new_cache, n_ctx, vocab_size, device and dtype; if it has a
                    `max_rows`, root and draft are no more than that (exact.py)
    drafter         where guesses come from (a TokenTrie, say); None is plain decoding
    picker          how a token is chosen from logits; Greedy() if None
    budget          nodes drafted per step at most, or "auto": as many as pay, by measured times (budget.py)
    max_new_tokens  never exceeded; prompt and new tokens together never exceed n_ctx either
    stop_ids        tokens that end the text; the one that did is part of it
    cache           None, or a cache that already holds the first `cache.length` tokens of the prompt (fewer than all of
                    them); afterwards it holds all of the text but the last token

    Raises ValueError for an empty or too long prompt, token ids outside the vocabulary, a cache that is too small, and
    impossible numbers: at the call, not at the first step (a generator runs nothing before its first `next`, which is
    why the loop is a function of its own, `_steps`); and later, if a drafter proposes tokens outside the vocabulary.
    """
    picker = Greedy() if picker is None else picker
    context, stops = checked(model, prompt_ids, drafter, budget, max_new_tokens, stop_ids)
    longest = min(model.n_ctx, len(context) + max_new_tokens)
    if cache is None:
        cache = model.new_cache(longest + _room(drafter, budget))
    elif cache.capacity < longest - 1:
        raise ValueError(f"the cache has {cache.capacity} slots, this text may need {longest - 1}")
    elif cache.length >= len(context):
        raise ValueError(
            f"the cache holds {cache.length} tokens, the prompt only {len(context)}: nothing is left to read"
        )
    return _steps(model, context, drafter, picker, budget, max_new_tokens, stops, cache)


def _room(drafter: Drafter | None, budget: int | str) -> int:
    """Slots that a draft may need."""
    return 0 if drafter is None else MOST if budget == "auto" else budget


def checked(
    model: Any,
    prompt_ids: Sequence[int],
    drafter: Drafter | None,
    budget: int | str,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> tuple[list[int], frozenset[int]]:
    """Prompt and stop tokens as plain integers, once everything makes sense; ValueError otherwise."""
    try:
        context = [operator.index(token) for token in prompt_ids]  # any kind of integer, tensors too
        stops = frozenset(operator.index(token) for token in stop_ids)
    except TypeError:
        raise ValueError("prompt_ids and stop_ids must be whole numbers: token ids, not text") from None
    if budget != "auto" and (not isinstance(budget, int) or not 0 <= budget <= MAX_BUDGET):
        raise ValueError(f'budget must be "auto" or a whole number of nodes, 0 to {MAX_BUDGET}, not {budget!r}')
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be a whole number, 0 or more, not {max_new_tokens!r}")
    if not context:
        raise ValueError("the prompt is empty: give at least one token")
    if len(context) > model.n_ctx:
        raise ValueError(f"the prompt has {len(context)} tokens, the context holds {model.n_ctx}")
    if outside := next((token for token in context if not 0 <= token < model.vocab_size), None):
        raise ValueError(f"prompt token {outside} is outside the model's vocabulary of {model.vocab_size}")
    knows = getattr(drafter, "vocab_size", None)
    if knows not in (None, model.vocab_size):
        raise ValueError(f"the drafter was made for a vocabulary of {knows}, the model has {model.vocab_size}")
    return context, stops


def _steps(
    model: Any,
    context: list[int],
    drafter: Drafter | None,
    picker: Picker,
    budget: int | str,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    cache: Any,
) -> Iterator[Step]:
    # The text may grow up to here, and this is why it ends there.
    full = min(len(context) + max_new_tokens, model.n_ctx)
    at_full = "length" if full == len(context) + max_new_tokens else "context"
    if len(context) == full:
        yield Step(full, NOTHING, [], [], Seconds(0, 0, 0), at_full, prefill=True)
        return
    session = drafter.open(context) if drafter is not None else None
    chooser = Auto(curve_of(model)) if budget == "auto" else Fixed(budget)
    most = getattr(model, "max_rows", MAX_BUDGET + 1) - 1  # nodes
    try:
        prefill = True
        while True:
            start = len(context)
            began = time.perf_counter()

            # Draft. A step emits up to one token more than the draft is deep, and full - start may still come; the
            # nodes need slots in the cache, and so does the root. A drafter that sends more than it was asked for is
            # cut.
            draft = NOTHING
            if session is not None and not prefill:
                nodes = min(chooser.ask(), most, cache.capacity - cache.length - 1)
                if nodes > 0 and full - start > 1:
                    draft = session.draft(nodes, picker).trim(full - start - 1, nodes)
                    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < model.vocab_size:
                        raise ValueError(f"the drafter proposes tokens outside the vocabulary of {model.vocab_size}")
                    draft = chooser.cut(draft)
            drafted = time.perf_counter()

            # Verify: all of the text that is not in the cache yet (the prompt, later just the last token, the root),
            # and below the root the draft. Everything sees the past; among themselves the mask decides.
            base = cache.length
            tokens = context[base:] + draft.tokens
            positions = mask = None  # the defaults fit a line of tokens
            if draft.tokens:
                positions = [base, *(base + depth for depth in draft.depths)]
                mask = torch.ones(len(tokens), base + len(tokens), dtype=torch.bool)
                mask[:, base:] = draft.mask()
            rows = [len(tokens) - 1] if prefill else None
            with torch.no_grad():
                logits = model(tokens, positions, mask, cache, rows)  # (1 + nodes, vocab_size)
            if logits.device.type == "cuda":
                torch.cuda.synchronize(logits.device)  # or the GPU's time would show up under "accept"
            forwarded = time.perf_counter()

            picks = None
            if getattr(session, "wants_picks", False) and not prefill:
                picks = []
                for node in range(-1, len(draft)):
                    path = draft.path(node)
                    before = context + [draft.tokens[i] for i in path]
                    picks.append(picker.pick(logits[node + 1], len(before), before))

            # Accept: from the root, follow the model's own picks for as long as they were drafted. (A prefill has one
            # row, its last token's, and no nodes: row 0 again.)
            node, accepted, finish_reason = -1, [], None
            while True:
                token = picks[node + 1] if picks else picker.pick(logits[node + 1], len(context), context)
                context.append(token)
                if token in stop_ids:
                    finish_reason = "stop"
                elif len(context) == full:
                    finish_reason = at_full
                child = draft.children[node].get(token)
                if finish_reason or child is None:
                    break
                accepted.append(child)
                node = child
            if not prefill:  # root and accepted path stay, rejected branches go
                cache.keep(base, [base, *(base + 1 + node for node in accepted)])
            if session is not None:
                session.observe(context[start:], draft, picks)
            seconds = Seconds(drafted - began, forwarded - drafted, time.perf_counter() - forwarded)
            if session is not None and not prefill:
                chooser.learn(draft, accepted, len(context) - start, seconds)
            yield Step(start, draft, accepted, context[start:], seconds, finish_reason, prefill, logits)
            if finish_reason:
                return
            if prefill and session is not None:
                chooser.prepare(model, cache, full - len(context))
            prefill = False
    finally:
        if session is not None:
            session.close()


def generate(model: Any, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
    """Run `decode` (same arguments) to its end."""
    began = time.perf_counter()
    steps = [replace(step, logits=None) for step in decode(model, prompt_ids, **arguments)]
    return Generation.of(steps, time.perf_counter() - began)


def generate_many(
    model: Any,
    prompt_ids: Sequence[int],
    num_return_sequences: int,
    *,
    picker: Any,
    drafter: Drafter | None = None,
    budget: int | str = "auto",
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
) -> list[Generation]:
    """Independent samples of one prompt, which is read once: each decode starts from a copy of its cache.

    For more than one, `picker` must have `sample(number)`, as Sampler does; the first text is the one that `generate`
    writes with it. Other arguments as for `decode`. With a trie as drafter each text drafts from those before it, too.

    Raises ValueError for a number below 1, more than one greedy text (they are all the same), and as `decode` does.
    """
    if not isinstance(num_return_sequences, int) or num_return_sequences < 1:
        raise ValueError(f"num_return_sequences must be a whole number, 1 or more, not {num_return_sequences!r}")
    if num_return_sequences > 1 and not hasattr(picker, "sample"):
        raise ValueError("greedy decoding has one answer only: sample (temperature above 0) for several")
    prompt, stops = checked(model, prompt_ids, drafter, budget, max_new_tokens, stop_ids)
    cache = model.new_cache(min(model.n_ctx, len(prompt) + max_new_tokens) + _room(drafter, budget))
    if len(prompt) > 1:
        with torch.no_grad():
            model(prompt[:-1], cache=cache, rows=[len(prompt) - 2])
    settings: dict[str, Any] = {"drafter": drafter, "budget": budget, "max_new_tokens": max_new_tokens}
    pickers = [picker.sample(number) if number else picker for number in range(num_return_sequences)]
    return [generate(model, prompt, picker=each, cache=cache.fork(), stop_ids=stops, **settings) for each in pickers]


# --- how two runs are compared ---------------------------------------------------------------------------------------

# By how much the difference of two logits may change with the order of addition, in units of eps * the largest |logit|,
# where eps is the dtype's relative spacing (1.2e-7 in float32, 7.8e-3 in bfloat16). Between one-token passes and one
# long pass of the bundled model single logits were seen to move by 4.4 units in float32, where sums collect the
# errors of many terms, and by 0.6 in bfloat16 and float16, where the last rounding outweighs them. A difference has two
# logits, which makes 8.8 and 1.2; the rest is margin.
ROUNDING = {torch.float64: 16, torch.float32: 16, torch.float16: 4, torch.bfloat16: 4}


class NearTie(NamedTuple):
    """Two runs part at new token number `position` (from 0), and the choice hangs on a shift of one logit by `gap`;
    `scale` is the largest |logit| there. The gap is inf if a shift of 64 is not enough or one text just ends sooner."""

    position: int
    gap: float
    scale: float

    def within_rounding(self, dtype: torch.dtype) -> bool:
        """Whether rounding in `dtype` explains it."""
        return self.gap <= ROUNDING[dtype] * torch.finfo(dtype).eps * self.scale


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, a missing one included; None if they are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def near_tie(
    reference: Any, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], picker: Picker | None = None
) -> NearTie | None:
    """How close a call it was where two generations `a` and `b` of the same prompt part; None if they do not part.

    `reference` is the model with float64 parameters. It scores the common beginning afresh, in one causal pass
    without a cache; then, for each of the two candidate tokens, we look for the smallest shift of one logit with which
    the picker takes it: the token's own is raised, or the other one's lowered (which matters where the two compete for
    the last place that top-k leaves). The larger of the two shifts is the gap. It says how much rounding error it takes
    to make the difference, with any picker. Ask the result whether it is `within_rounding`.
    """
    i = first_difference(a, b)
    if i is None:
        return None
    if i >= min(len(a), len(b)):  # one text is a beginning of the other: rounding cannot do that
        return NearTie(i, math.inf, 0.0)
    picker = Greedy() if picker is None else picker
    context = [*prompt_ids, *a[:i]]
    with torch.no_grad():
        logits = reference(context, rows=[len(context) - 1])[0]

    def shift(wanted: int, moved: int, sign: int) -> float:
        """How far the logit of `moved` must go up or down before `wanted` is picked."""

        def taken(by: float) -> bool:
            shifted = logits.clone()
            shifted[moved] += sign * by
            return picker.pick(shifted, len(context), context) == wanted

        if taken(0.0):
            return 0.0
        low, high = 0.0, 64.0
        if not taken(high):
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if taken(middle) else (middle, high)
        return high

    gaps = [min(shift(x, x, 1), shift(x, y, -1)) for x, y in ((a[i], b[i]), (b[i], a[i]))]
    return NearTie(i, max(gaps), float(logits.abs().max()))


if __name__ == "__main__":
    from cli import main  # cli.py imports this file, so it is loaded only when asked for

    raise SystemExit(main())
