"""Beam search: keep the few best texts at every step, and four ways to look after their caches.

Greedy decoding takes the most probable token each time, and may end in a text that is not probable at all. Beam search
keeps `num_beams` unfinished texts, the *beams*. A step lengthens each of them by every token and keeps the best again;
a text is worth the sum of its tokens' log probabilities. With two beams, behind some prompt:

    step 1   sat -0.9   lay -1.2   ran -2.0                       beams: sat -0.9, lay -1.2
    step 2   sat: on -0.7, in -1.9      lay: on -0.2, down -2.1   beams: lay on -1.4, sat on -1.6
    step 3   lay on: the -0.6, a -0.9   sat on: the -0.9          beams: lay on the -2.0, lay on a -2.3

In step 2 the beams change places; in step 3 "lay on" has two children and "sat on" none. A key-value cache belongs to
one text and can only be lengthened, so what becomes of caches when texts fork and die? This file is about that. First
come the rules (`Search`), which know no model. Then four answers, each mending what is wrong with the one before. They
differ in where the log probabilities come from, and give the same hypotheses:

    recompute   no cache, every text is read from its beginning    the definition; the work grows with the square
    swap        a cache per beam: taken over, forked, freed        a forward per beam, and the past is stored many times
    tree        one cache: beams are leaves, they share the rest   one forward per step
    lookahead   the same tree, grown ahead of the beams            several steps per forward

Sources: the rules are those of `generate` in Hugging Face's transformers; beams that share a trie, arXiv 2502.00085.

Step by step: notebook 06.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guess import Continuations, Guess, Pace, best
from ledger import Ledger
from lookahead import checked

MAX_BEAMS = 1024  # a mistyped number must not ask for all memory


class Hypothesis(NamedTuple):  # a finished text
    tokens: list[int]  # the new ones, a stop token included
    score: float  # the sum of their log probabilities / their number ** length_penalty


class Beam(NamedTuple):  # an unfinished text
    tokens: tuple[int, ...]  # the new ones
    total: float  # the sum of their log probabilities
    parent: int  # the number of the beam that it continues, among those of the step before


class BeamStep(NamedTuple):  # what a step left
    beams: list[Beam]  # best first; a beam's number is its place
    hypotheses: list[Hypothesis]  # best first
    ledger: Ledger  # one for the whole search, but its `moves` are those of this step


# --- the rules --------------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """Beams, hypotheses, and what a step makes of them.

    Of all continuations of all beams the best max(2, 1 + stop tokens) * num_beams are looked at, so that enough are
    left if some stop. Those that stop are finished if they rank among the first num_beams, else forgotten; the first
    num_beams others are the new beams. At the length `longest` everything stops. The num_beams hypotheses with the best
    scores stay. Once there are so many, the search ends, if early_stopping is

        True      at once
        False     when the best beam, at its present length, scores no better than the worst of them
        "never"   when it could not at any length (with a positive length_penalty: at the length `longest`)

    Where fewer texts exist there are fewer beams (transformers fills up with copies of hardly any probability).
    """

    num_beams: int
    longest: int
    length_penalty: float
    early_stopping: bool | str
    stops: Collection[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam((), 0.0, 0)])
    hypotheses: list[Hypothesis] = field(default_factory=list)
    length: int = 0
    done: bool = False

    @property
    def looked_at(self) -> int:
        return max(2, 1 + len(self.stops)) * self.num_beams

    def step(self, after: Sequence[Continuations]) -> None:
        """One token more, given what may follow each beam: its `looked_at` best continuations."""
        self.length += 1
        last = self.length == self.longest
        candidates = sorted(
            (-(beam.total + log_prob), number, token)  # of equals the better beam's, then the smaller token
            for number, (beam, continuations) in enumerate(zip(self.beams, after))
            for log_prob, token in continuations
            if log_prob > -math.inf
        )
        beams: list[Beam] = []
        for rank, (minus_total, number, token) in enumerate(candidates[: self.looked_at]):
            if last or token in self.stops:
                if rank < self.num_beams:
                    score = -minus_total / self.length**self.length_penalty
                    self.hypotheses.append(Hypothesis([*self.beams[number].tokens, token], score))
            elif len(beams) < self.num_beams:
                beams.append(Beam((*self.beams[number].tokens, token), -minus_total, number))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # of equals the earlier one stays first
        del self.hypotheses[self.num_beams :]
        self.beams, self.done = beams, last or not beams
        if not self.done and len(self.hypotheses) == self.num_beams:
            far = self.early_stopping == "never" and self.length_penalty > 0
            hope = beams[0].total / (self.longest if far else self.length) ** self.length_penalty
            self.done = self.early_stopping is True or hope <= self.hypotheses[-1].score


# --- four ways to find the log probabilities --------------------------------------------------------------------------


class Recompute:
    """The definition."""

    def __init__(self, model: Any, prompt: list[int], search: Search, ledger: Ledger) -> None:
        self.model, self.prompt, self.search, self.ledger = model, prompt, search, ledger

    def after(self, beams: Sequence[Beam]) -> list[Continuations]:
        """What may follow each beam; called once in each step."""
        return [self.read([*self.prompt, *beam.tokens], None) for beam in beams]

    def read(self, tokens: list[int], cache: Any) -> Continuations:
        logits = self.model(tokens, cache=cache, rows=[len(tokens) - 1])
        self.ledger.forward(len(tokens))
        return best(logits, self.search.looked_at)[0]

    def close(self, hypotheses: Sequence[Hypothesis]) -> None: ...


class Swap(Recompute):
    """A cache per beam, so that a beam reads its last token only. When the beams change, their caches follow:

        beam   parent   its cache
        0      2        takes over that of 2
        1      0        takes over that of 0
        2      0        forks that of 0: a second child needs a copy, made before the first one writes
                        that of 1 has no heir: freed, before anything is forked

    With `offload` caches wait in the CPU's memory, and only the one that is being read is on the model's device, so
    that device's memory does not depend on num_beams. The price: every cache travels there and back for every token.
    """

    def __init__(self, model: Any, prompt: list[int], search: Search, ledger: Ledger, offload: bool) -> None:
        super().__init__(model, prompt, search, ledger)
        self.offload = offload
        self.caches = [model.new_cache(len(prompt) + search.longest - 1)]
        ledger.opened(self.caches[0])
        self._send(0, "cpu")

    def after(self, beams: Sequence[Beam]) -> list[Continuations]:
        if beams[0].tokens:
            self._reorder([beam.parent for beam in beams])
        found = []
        for number, (beam, cache) in enumerate(zip(beams, self.caches)):
            self._send(number, self.model.device)
            found.append(self.read([*self.prompt, *beam.tokens][cache.length :], cache))
            self._send(number, "cpu")
        self.ledger.peak_used = max(self.ledger.peak_used, sum(cache.live_nbytes for cache in self.caches))
        return found

    def _reorder(self, parents: list[int]) -> None:
        for number in set(range(len(self.caches))) - set(parents):
            self.ledger.freed(f"cache {number}", self.caches[number], not self.offload)
            self.caches[number] = None
        heirs: dict[int, Any] = {}
        old, self.caches = self.caches, []
        for number, parent in enumerate(parents):
            if parent in heirs:
                self.caches.append(old[parent].fork())
                self.ledger.forked(number, parent, self.caches[-1], not self.offload)
            else:
                self.caches.append(heirs.setdefault(parent, old[parent]))
                self.ledger.took_over(number, parent)

    def _send(self, number: int, where: torch.device | str) -> None:
        if self.offload:
            self.ledger.moved(number, self.caches[number].to(where), where != "cpu")

    def close(self, hypotheses: Sequence[Hypothesis]) -> None:
        while self.caches:
            self.ledger.freed(f"cache {len(self.caches) - 1}", self.caches.pop(), not self.offload)


class Node:
    """A token in the tree of texts. The root is the prompt's last token, a beam is a path down from there."""

    def __init__(self, token: int, parent: "Node | None", recent: tuple[int, ...]) -> None:
        self.token, self.parent, self.recent = token, parent, recent[-Guess.LEVELS :]  # its text's last tokens
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.slot = -1  # where its keys and values are
        self.after: Continuations | None = None  # what may follow, once the model was asked
        self.children: dict[int, Node] = {}

    def child(self, token: int) -> "Node":
        """The one that carries this token, made if need be."""
        if token not in self.children:
            self.children[token] = Node(token, self, (*self.recent, token))
        return self.children[token]


class Tree(Recompute):
    """All beams in one cache that holds every token once, however many beams go through it. One forward reads the last
    tokens of all beams; a beam sees the prompt, its ancestors and itself:

        (root) -- sat -- on        slots     prompt   sat  lay | on   on
           `----- lay -- on        sat on      x       x       | x
                                   lay on      x            x  |      x

    Once "sat on" has no child, "sat" and "on" are nobody's ancestors: `keep` closes the gaps before the next forward.
    Nobody knows how many slots the beams will need. The cache starts with room for one text and a few tokens of each
    beam; when that is not enough, it is dropped, and the next forward reads everything into a larger one.
    """

    def __init__(self, model: Any, prompt: list[int], search: Search, ledger: Ledger) -> None:
        super().__init__(model, prompt, search, ledger)
        self.root = Node(prompt[-1], None, tuple(prompt))
        self.leaves = [self.root]  # the beams
        self.nodes: list[Node] = []  # all others that are in the cache: node i in slot len(prompt) + i, parents first
        self.cache: Any = None
        self.capacity = len(prompt) + search.longest + 8 * search.num_beams

    def after(self, beams: Sequence[Beam]) -> list[Continuations]:
        if beams[0].tokens:
            self.leaves = [self.leaves[beam.parent].child(beam.tokens[-1]) for beam in beams]
        if asked := [leaf for leaf in self.leaves if leaf.after is None]:
            self._reclaim()
            asked += self._draft(beams)
            for node, continuations in zip(asked, self._forward(asked)):
                node.after = continuations
        return [leaf.after for leaf in self.leaves]

    def _draft(self, beams: Sequence[Beam]) -> list[Node]:
        return []  # Lookahead asks about more than the beams

    def _reclaim(self) -> None:
        """Drop what is neither a beam's ancestor nor below a beam."""
        useful, below, kept = {self.root}, set(self.leaves), []
        for node in self.leaves:
            while node not in useful:
                useful.add(node)
                node = node.parent
        for node in self.nodes:
            if node.parent in below:
                below.add(node)
            if node in useful or node in below:
                kept.append(node)
            else:
                node.parent.children.pop(node.token)
        if len(kept) < len(self.nodes):
            size, gone = len(self.prompt), len(self.nodes) - len(kept)
            self.cache.keep(size, [node.slot for node in kept])
            self.ledger.kept(gone, sum(node.slot != slot for slot, node in enumerate(kept, size)), self.cache)
            self.nodes = kept

    def _forward(self, asked: list[Node]) -> list[Continuations]:
        """Read `asked` (parents first), and what else is not in the cache yet."""
        self.nodes += [node for node in asked if node is not self.root]
        size, width = len(self.prompt), len(self.prompt) + len(self.nodes)
        for slot, node in enumerate(self.nodes, size):
            node.slot = slot
        if self.cache is not None and width > self.cache.capacity:
            self._drop_cache()  # before the next is made: never two at a time
        if self.cache is None:
            spare = 0 if self.root.after is None else width // 8  # the next one is not outgrown at once
            self.capacity = max(self.capacity, width + spare)
            self.cache = self.model.new_cache(self.capacity)
            self.ledger.opened(self.cache)
        base = self.cache.length  # 0, or all but the new nodes
        new = self.nodes[max(base - size, 0) :]
        tokens = self.prompt[base:] + [node.token for node in new]
        positions = [*range(base, size), *(size - 1 + node.depth for node in new)]
        rows = list(range(len(tokens) - len(asked), len(tokens)))  # the root, if asked, is where the prompt ends
        logits = self.model(tokens, positions, self._mask(base, new, width), self.cache, rows)
        self.ledger.forward(len(tokens), self.cache.live_nbytes)
        return best(logits, self.search.looked_at)

    def _mask(self, base: int, new: list[Node], width: int) -> Tensor | None:
        """(rows, width) bool: the prompt's rows if it is still to be read (causal), then those of the new nodes."""
        if not new:
            return None
        rows = [bytearray(b"\1" * len(self.prompt) + bytes(width - len(self.prompt))) for _ in new]
        for row, node in zip(rows, new):
            while node is not self.root:
                row[node.slot] = 1
                node = node.parent
        mask = torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(new), width)
        return mask if base else torch.cat([torch.ones(len(self.prompt), width, dtype=torch.bool).tril(), mask])

    def close(self, hypotheses: Sequence[Hypothesis]) -> None:
        self._drop_cache()

    def _drop_cache(self) -> None:
        if self.cache is not None:
            self.ledger.freed("the cache", self.cache, True)
            self.cache = None


class Lookahead(Tree):
    """A step has to know what follows each of its beams, no more. So where all beams of the next step are in the tree
    already, that step needs no forward: let us grow the tree ahead of the beams, where they are going to be.

    The draft is a beam search, too, by a cheap model (guess.py) and a little wider than the true one. Level by level it
    takes the best by total of the beam + log probabilities on the way down (the model's where it was asked, else the
    guess), until it has as many nodes as it may. So a beam that is far behind gets few, and where an earlier draft was
    right about some beams it goes on from there. Guesses decide nothing; the price is a wider forward.
    """

    def __init__(
        self, model: Any, prompt: list[int], search: Search, ledger: Ledger, drafter: Any, budget: int | str
    ) -> None:
        super().__init__(model, prompt, search, ledger)
        self.session = None if drafter is None else drafter.open(prompt)
        self.guess = Guess(self.session)
        self.budget, self.pace = budget, Pace(model, search.num_beams)
        self.capacity += 2 * search.num_beams * (8 if budget == "auto" else budget)

    def _draft(self, beams: Sequence[Beam]) -> list[Node]:
        size = self.pace.choose(self.search.length) if self.budget == "auto" else self.budget
        most, width = size * self.search.num_beams, self.search.num_beams + size // 4
        drafted: list[Node] = []
        level = [(beam.total, leaf) for beam, leaf in zip(beams, self.leaves)]
        for _ in range(self.search.length + 1, self.search.longest):  # what follows the longest, nobody asks
            candidates = sorted(
                (-(total + log_prob), number, token)
                for number, (total, node) in enumerate(level)
                for log_prob, token in node.after or self.guess(node.recent)
                if token not in self.search.stops
            )
            above, level = level, []
            for minus_total, number, token in candidates[:width]:
                parent = above[number][1]
                if token not in parent.children:
                    if len(drafted) == most:
                        return drafted
                    drafted.append(parent.child(token))
                level.append((-minus_total, parent.child(token)))
        return drafted

    def _forward(self, asked: list[Node]) -> list[Continuations]:
        began, rows = time.perf_counter(), self.ledger.rows
        found = super()._forward(asked)
        self.pace.curve.learn(self.ledger.rows - rows, time.perf_counter() - began)
        for node, continuations in zip(asked, found):
            self.guess.learn(node.recent, continuations)
        return found

    def close(self, hypotheses: Sequence[Hypothesis]) -> None:
        super().close(hypotheses)
        if self.session is not None:
            self.session.observe(hypotheses[0].tokens if hypotheses else ())  # the trie remembers the best
            self.session.close()


STRATEGIES = {"recompute": Recompute, "swap": Swap, "tree": Tree, "lookahead": Lookahead}

# --- how to ask -------------------------------------------------------------------------------------------------------


def beam_search(
    model: Any, prompt_ids: Sequence[int], *, num_beams: int, num_return_sequences: int = 1, **arguments: Any
) -> list[Hypothesis]:
    """The best continuations of `prompt_ids` that beam search finds, best first.

    num_beams, max_new_tokens, length_penalty, early_stopping (False, True or "never"), stop_ids,
    num_return_sequences   as in Hugging Face's `generate`; see `Search`. Prompt and new tokens never exceed n_ctx
    strategy               "recompute", "swap", "tree" (default) or "lookahead": how caches are kept, never the result
    offload                with "swap": caches wait in the CPU's memory
    drafter, budget        with "lookahead": a TokenTrie to guess with, or None; nodes drafted per beam, or "auto"

    Returns num_return_sequences hypotheses (fewer, if no more exist). Raises ValueError for impossible arguments.
    """
    steps = beam_steps(model, prompt_ids, num_beams=num_beams, **arguments)  # checks num_beams first
    if not isinstance(num_return_sequences, int) or not 1 <= num_return_sequences <= num_beams:
        raise ValueError(f"num_return_sequences must be 1 to num_beams ({num_beams}), not {num_return_sequences!r}")
    *_, last = steps
    return last.hypotheses[:num_return_sequences]


def beam_steps(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop_ids: Collection[int] = (),
    strategy: str = "tree",
    offload: bool = False,
    drafter: Any = None,
    budget: int | str = "auto",
) -> Iterator[BeamStep]:
    """`beam_search` step by step, same arguments; the last step's hypotheses are the result."""
    prompt, stops = checked(model, prompt_ids, drafter, budget, max_new_tokens, stop_ids)
    for wrong, message in (
        (not isinstance(num_beams, int) or not 1 <= num_beams <= MAX_BEAMS,
         f"num_beams must be 1 to {MAX_BEAMS}, not {num_beams!r}"),
        (early_stopping != "never" and not isinstance(early_stopping, bool),
         f'early_stopping must be True, False or "never", not {early_stopping!r}'),
        (not isinstance(length_penalty, int | float) or not abs(length_penalty) <= 64,
         f"length_penalty must be a number, -64 to 64, not {length_penalty!r}"),
        (strategy not in [*STRATEGIES], f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}"),
        (offload and strategy != "swap", f'offload moves the caches of strategy "swap", {strategy!r} has none to move'),
    ):  # fmt: skip
        if wrong:
            raise ValueError(message)
    search = Search(num_beams, min(max_new_tokens, model.n_ctx - len(prompt)), length_penalty, early_stopping, stops)
    if search.longest == 0:  # no token may be written
        return iter([BeamStep([], [Hypothesis([], 0.0)], Ledger())])
    more = {"swap": (offload,), "lookahead": (drafter, budget)}.get(strategy, ())
    return _steps(search, STRATEGIES[strategy](model, prompt, search, Ledger(), *more))


def _steps(search: Search, source: Recompute) -> Iterator[BeamStep]:
    try:
        while not search.done:
            with torch.no_grad():
                search.step(source.after(search.beams))
            yield BeamStep(search.beams, list(search.hypotheses), source.ledger)
            source.ledger.moves.clear()
    finally:
        source.close(search.hypotheses if search.done else ())
