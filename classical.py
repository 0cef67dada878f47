"""The classical rule of speculative sampling, for comparison: it keeps the distribution, but not the sample.

A draft model proposes x from its distribution q; the target model's is p. Leviathan et al. (2023, arXiv 2211.17192,
algorithm 1) and Chen et al. (2023, arXiv 2302.01318, algorithm 2) accept x with probability min(1, p(x) / q(x)), and
where it is rejected draw from what p has more of than q, max(p - q, 0), scaled to a sum of 1. Then

    P(token) = q min(1, p/q) + P(rejected) max(p - q, 0) / sum of max(p - q, 0)
             =  min(p, q)    +               max(p - q, 0)                          = p

since what is rejected, 1 - sum of min(p, q), is as much as p has more of. An example over three tokens:

    token           a      b      c
    p              0.5    0.3    0.2
    q              0.2    0.7    0.1
    min(p, q)      0.2    0.3    0.1      accepted with probability 0.6
    max(p - q, 0)  0.3    0      0.1      a rejected b is replaced by a (3 times of 4) or c

The rule accepts with probability sum of min(p, q) = 1 - TV(p, q), TV being the total variation distance, and no rule
can do better for one proposal. But whether x stands depends on a random number that belongs to the proposal: propose
something else, and the same seed writes another text. This is why two runs cannot be compared token by token.

Keyed noise (sampling.py) couples the two picks without any exchange: both add the same noise g and take the largest.
They agree with a probability that can be computed. With E = exp(-g), independent exponential variables, "t is largest"
means E_t / p_t <= E_s / p_s for all s, so both pick t if E_s / E_t >= max(p_s / p_t, q_s / q_t) for all s, and

    P(both pick t) = 1 / sum over s of max(p_s / p_t, q_s / q_t)

which adds up to 0.595 in the example, and to no less than (1 - TV) / (1 + TV) = 0.43 ever (Daliri, Musco, Suresh 2024,
arXiv 2408.07978). The difference is the price of a text that does not depend on the drafts; looking at the noise
when drafting several candidates (drafters.py) earns more than it costs.

Step by step: notebook 04, sections 4 and 5.
"""

import random
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lookahead import NOTHING, Generation, Seconds, Step
from sampling import Sampler
from tree import DraftTree


def accept(p: Tensor, q: Tensor, drafted: Sequence[int], uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """How many of n drafted tokens stand, and the distribution of the token that follows them.

    p         (n + 1, vocab_size): the target's distributions in place of each drafted token, and after the last one
    q         (n, vocab_size): what the drafted tokens were drawn from
    uniforms  n random numbers in [0, 1)

    Returns the number and (vocab_size,) probabilities: max(p - q, 0), scaled, at the first rejected token; p's last row
    if all were accepted.
    """
    for i, (token, u) in enumerate(zip(drafted, uniforms)):
        if u * q[i, token] >= p[i, token]:  # u >= p / q, without a division by nothing
            more = (p[i] - q[i]).clamp(min=0)
            return i, more / more.sum()
    return len(drafted), p[len(drafted)]


def speculative_sample(
    model: Any,
    draft_model: Any,
    prompt_ids: Sequence[int],
    *,
    picker: Sampler | None = None,
    budget: int = 4,
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    seed: int = 0,
) -> Generation:
    """Sample a continuation by the classical rule, from chains of `budget` tokens of the draft model.

    `picker` says how logits become probabilities (temperature, top_k ...; its seed and noise are not used), for both
    models. Both keep a KV cache, cut back to what was accepted.

    Raises ValueError for an empty or too long prompt, models with different vocabularies, and numbers below 1.
    """
    picker, text, rng = picker or Sampler(), [int(token) for token in prompt_ids], random.Random(seed)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    full = min(len(text) + max_new_tokens, model.n_ctx, draft_model.n_ctx)
    if model.vocab_size != draft_model.vocab_size:
        raise ValueError(f"the draft model has {draft_model.vocab_size} tokens, the target {model.vocab_size}")
    if not all(isinstance(number, int) for number in (budget, max_new_tokens)):
        raise ValueError(f"budget and max_new_tokens must be whole numbers, not {budget!r} and {max_new_tokens!r}")
    if not text or len(text) >= full or budget < 1 or max_new_tokens < 1:
        raise ValueError(
            f"a prompt of {len(text)} tokens, {max_new_tokens} new ones and budget {budget} cannot be done"
        )
    cache, draft_cache = model.new_cache(), draft_model.new_cache()

    def distributions(which: Any, known: Any, whole: Sequence[int], count: int) -> Tensor:
        """(count, vocab_size) on the CPU: of what follows each of the last `count` tokens of `whole`. The cache `known`
        holds its beginning, and all of it afterwards."""
        new = whole[known.length :]
        with torch.no_grad():
            logits = which(new, cache=known, rows=list(range(len(new) - count, len(new))))
        ends = range(len(whole) - count + 1, len(whole) + 1)
        rows = [picker.process(row, whole[:end]) for row, end in zip(logits, ends)]
        return torch.stack(rows).double().softmax(-1).cpu()

    def draw(p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=generator))

    steps: list[Step] = []
    began = time.perf_counter()
    while not (steps and steps[-1].finish_reason):
        start, started = len(text), time.perf_counter()
        drafted: list[int] = []
        q: list[Tensor] = []
        while steps and len(drafted) < min(budget, full - start - 1):  # the first step reads the prompt
            q.append(distributions(draft_model, draft_cache, text + drafted, 1)[0])
            drafted.append(draw(q[-1]))
        made = time.perf_counter()
        p = distributions(model, cache, text + drafted, 1 + len(drafted))
        forwarded = time.perf_counter()
        accepted, after = accept(p, torch.stack(q) if q else p, drafted, [rng.random() for _ in drafted])
        tokens = [*drafted[:accepted], draw(after)]
        stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
        tokens = tokens if stop is None else tokens[: stop + 1]
        text += tokens
        cache.truncate(start + accepted)  # what was rejected goes; the last token was not read yet
        draft_cache.truncate(min(draft_cache.length, start + accepted))
        reason = "stop" if stop is not None else None
        if reason is None and len(text) == full:
            reason = "length" if full == len(prompt_ids) + max_new_tokens else "context"
        seconds = Seconds(made - started, forwarded - made, time.perf_counter() - forwarded)
        draft = DraftTree(drafted, range(-1, len(drafted) - 1)) if drafted else NOTHING
        steps.append(Step(start, draft, list(range(len(tokens) - 1)), tokens, seconds, reason, prefill=not steps))
    return Generation.of(steps, time.perf_counter() - began)


# --- how often they agree ---------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Per position, (n,): how likely one drafted token is to stand."""

    classical: Tensor  # 1 - TV: the classical rule
    keyed: Tensor  # both pick the same under the same noise
    bound: Tensor  # (1 - TV) / (1 + TV): what `keyed` is at least


def rates(p: Tensor, q: Tensor) -> Rates:
    """Exactly, from the distributions (n, vocab_size), in float64.

    For `keyed`, the sum over s of max(p_s / p_t, q_s / q_t) is split where the ratio p_s / q_s passes p_t / q_t: sorted
    by ratio, it takes two running sums instead of vocab_size^2 terms.
    """
    p, q = p.double(), q.double()
    tv = (p - q).abs().sum(-1) / 2
    order = (p / q.clamp(min=1e-300)).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_above = p.cumsum(-1)  # of those whose ratio is no smaller, t included; equal ratios fit on either side
    q_below = q.sum(-1, keepdim=True) - q.cumsum(-1)
    both = 1 / (p_above / p + q_below.clamp(min=0) / q)  # 1 / infinity = 0 where p or q has nothing
    return Rates(1 - tv, both.nan_to_num(0.0).sum(-1), (1 - tv) / (1 + tv))


def acceptance(
    model: Any, draft_model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]], picker: Sampler, seed: int = 0
) -> dict[str, float]:
    """How often one drafted token stands, by each rule, over the places of (prompt, response) ids.

    At each place both models say what comes next, and a token is drafted: drawn from q and put to the classical test
    ("classical"), and picked under the picker's noise by both models ("keyed"). Beside these shares stand the means of
    what `rates` expects from the very distributions: "1 - TV", "keyed, exact" and "bound".

    Raises ValueError for models with different vocabularies, texts longer than a context, and no response at all.
    """
    if model.vocab_size != draft_model.vocab_size:
        raise ValueError(f"the draft model has {draft_model.vocab_size} tokens, the target {model.vocab_size}")
    texts = [(prompt, response) for prompt, response in texts if len(response)]
    longest = max((len(prompt) + len(response) for prompt, response in texts), default=0)
    if not texts or longest > min(model.n_ctx, draft_model.n_ctx) + 1:
        raise ValueError(f"texts of up to {longest} tokens: there must be some, and both contexts must hold them")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    stood: list[tuple[bool, bool]] = []
    expected: list[Tensor] = []
    for prompt, response in texts:
        whole = [*prompt, *response]
        places = range(len(prompt), len(whole))
        scores = []  # of the target, of the draft model: (len(response), vocab_size)
        for each in (model, draft_model):
            with torch.no_grad():
                logits = each(whole[:-1], rows=[place - 1 for place in places])
            scores.append(torch.stack([picker.process(row, whole[:at]) for row, at in zip(logits, places)]).cpu())
        p, q = (one.double().softmax(-1) for one in scores)
        expected.append(torch.stack(rates(p, q)))
        for i, token in enumerate(torch.multinomial(q, 1, generator=generator)[:, 0].tolist()):
            accepted, _ = accept(p[[i, i]], q[[i]], [token], [rng.random()])
            noise = picker.noise(places[i], p.shape[-1])
            mine, yours = (int((one[i] + noise).argmax()) for one in scores)
            stood.append((accepted == 1, mine == yours))
    classical, keyed = (sum(column) / len(stood) for column in zip(*stood))
    tv, exact, bound = torch.cat(expected, -1).mean(-1).tolist()
    return {"tokens": len(stood), "classical": classical, "1 - TV": tv,
            "keyed": keyed, "keyed, exact": exact, "bound": bound}  # fmt: skip
