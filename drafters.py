"""Other sources of drafts: the text itself, the model's own wrong guesses, a smaller model, and all of them together.

Where draft tokens come from is open: the verification emits the same text whatever is proposed (lookahead.py). So any
guess will do that is right often and made quickly, and each of these has its own idea of where to look:

    trie           trie.py         what all earlier texts said after the last few words
    PromptLookup   n-gram copy     what this text said when it last said these words; costs nothing, and does well where
                                   an answer quotes its question (Saxena 2023, "prompt lookup decoding")
    Jacobi         jacobi.py       the model guesses a stretch of future tokens all at once, from wrong beginnings, over
                                   and over; some of what it says becomes right (Fu et al. 2024, arXiv 2402.02057)
    ModelDrafter   a small model   says quickly what a large one says slowly (Leviathan et al. 2023, arXiv 2211.17192;
                                   as a tree: Miao et al. 2023, arXiv 2305.09781; Li et al. 2024, arXiv 2406.16858)
    Combined       several          the most probable nodes of all their trees

All speak the interface of lookahead.py (Drafter, Session), and `decode` knows none of them by name.

Step by step: notebook 02, sections 1 and 6.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from blend import Calibration
from jacobi import Jacobi  # noqa: F401  (so that all drafters but the trie can be imported from here)
from lookahead import Drafter, Session
from sampling import Greedy, Picker
from tree import DraftTree


def most_probable(
    tokens: Sequence[int], parents: Sequence[int], p: Sequence[float], budget: int
) -> tuple[DraftTree, list[int]]:
    """The tree of the `budget` most probable nodes, most probable first, and their old numbers.

    It is a tree because parents come before their children and are no less probable, and of equals the earlier is
    taken.
    """
    best = heapq.nlargest(budget, range(len(p)), key=p.__getitem__)
    new = {-1: -1} | {node: i for i, node in enumerate(best)}
    return DraftTree([tokens[n] for n in best], [new[parents[n]] for n in best], [p[n] for n in best]), best


# --- prompt lookup ----------------------------------------------------------------------------------------------------


class PromptLookup:
    """Copies what followed when the text's last three tokens (else two, else one) stood in it the last time.

        a dog sat . then a dog        "then a dog" is new, "a dog" was followed by "sat . then":
                                      draft  sat -- . -- then -- a -- dog -- sat ...

    The copy may run into what it has just copied, as above, so that a text that goes round in circles is followed all
    the way. The longer the match, the likelier the copy is right. So the two places are compared further back, too, and
    how often copies were right is counted by the length of the match (`rates`), over all queries. Each copied token
    that is right lengthens the match by one: the third one behind a match of 2 counts as behind a match of 4.

    longest  the lengths are told apart up to this one
    """

    def __init__(self, longest: int = 8) -> None:
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"longest must be a whole number, 1 or more, not {longest!r}")
        self.longest = longest
        # By the length of the match: [copied tokens that were right, copied tokens], begun with a guess.
        self.rates = [[length, length + 1.0] for length in range(longest + 1)]

    def open(self, prompt_ids: Iterable[int]) -> "PromptLookupSession":
        return PromptLookupSession(self, prompt_ids)


class PromptLookupSession:
    """One query. `last` maps one to three tokens to where their latest occurrence was followed by something."""

    LOOKED_UP = (3, 2, 1)

    def __init__(self, drafter: PromptLookup, prompt_ids: Iterable[int]) -> None:
        self.drafter, self.text = drafter, []
        self.last: dict[tuple[int, ...], int] = {}
        self.match = 0  # length of the match that the last draft was made from
        self.observe(prompt_ids)

    def draft(self, budget: int, picker: Picker | None = None) -> DraftTree:
        text = list(self.text)
        starts = (self.last.get(tuple(text[-length:])) for length in self.LOOKED_UP)
        start = next(filter(None, starts), 0)
        self.match = 0
        if not start or budget < 1:
            return DraftTree([], [])
        end = len(text)
        while self.match < min(self.drafter.longest, start) and text[start - 1 - self.match] == text[-1 - self.match]:
            self.match += 1
        p, probs = 1.0, []
        for i in range(budget):
            right, tried = self.drafter.rates[min(self.match + i, self.drafter.longest)]
            p *= right / tried
            probs.append(p)
            text.append(text[start + i])  # the list grows, so start + i is always there
        return DraftTree(text[end:], range(-1, budget - 1), probs)

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        tokens = list(tokens)
        if draft and self.match:  # was the first token right, then the next ...?
            right = len(draft.walk(tokens))
            for i in range(min(right + 1, len(tokens), len(draft))):
                rate = self.drafter.rates[min(self.match + i, self.drafter.longest)]
                rate[0] += i < right
                rate[1] += 1
        for token in tokens:
            end = len(self.text)
            for length in self.LOOKED_UP:
                if end >= length:
                    self.last[tuple(self.text[end - length :])] = end
            self.text.append(token)

    def close(self) -> None:
        self.text, self.last = [], {}


# --- a draft model ----------------------------------------------------------------------------------------------------


class ModelDrafter:
    """A smaller model of the same vocabulary drafts what it finds probable.

    As a tree: its probabilities multiply along a path, and the nodes with the largest products are the draft, as in
    trie.py. But to know a node's children costs a forward pass of the draft model, so up to `breadth` nodes are
    expanded in one pass, the most probable first, under a tree mask like the target model's:

        pass 1   (root)                 -> children   "12" 0.7   "13" 0.2   "24" 0.05 ...
        pass 2   "12", "13", "24" ...   -> grandchildren, "12 eggs" 0.6 ...

    up to `passes` passes, while a node that may stay in the draft has a probability of at least `least`. As a chain:
    one node a pass, its most probable child only, so at most `passes` nodes, whatever `breadth` is.

    When the picker has noise, the draft foresees it, as a trie's does (`TrieSession._foresee`). How far to trust that
    (`trust`) is learned from every token, as one weight between two guesses, by online EM:

        P(token) = (1 - trust) q(token) + trust w(token) / sum of all w,      w(token) = q(token) exp(noise(token))

    model    anything that decoders run on; it keeps a cache of its own for each query, rolled back in step
    chain    one path instead of a tree
    """

    def __init__(self, model: Any, chain: bool = False, breadth: int = 8, passes: int = 8, least: float = 0.01) -> None:
        if not isinstance(breadth, int) or not isinstance(passes, int) or min(breadth, passes) < 1:
            raise ValueError(f"breadth and passes must be 1 or more, not {breadth} and {passes}")
        self.model, self.chain, self.least = model, chain, least
        self.breadth, self.passes = (1, passes) if chain else (breadth, passes)
        self.calibration, self.foresight = Calibration(), Calibration()  # without and with known noise
        self.trust = 0.5

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def open(self, prompt_ids: Iterable[int]) -> "ModelSession":
        return ModelSession(self, prompt_ids)


class ModelSession:
    """One query. The cache holds the first `known` tokens of the text; while a draft is made, its expanded nodes, too.

    Nodes are numbered as they are made, a parent before its children; the root is -1. `p`, `parents` and `tokens` have
    an entry for each. Each expanded one has an entry in `paths`, too: the slots of its ancestors and its own; and, when
    there is noise, in `guesses`: (q, w / sum of all w), each (vocab_size,).
    """

    RATE = 0.02  # at which trust is learned

    def __init__(self, drafter: ModelDrafter, prompt_ids: Iterable[int]) -> None:
        self.drafter, self.text = drafter, list(prompt_ids)
        self.cache: Any = None
        self.known = 0
        self._last = DraftTree([], [])
        self._estimates: list[float] = []
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self.p: list[float] = []
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.paths: dict[int, list[int]] = {}
        self.children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self.guesses: dict[int, tuple[Tensor, Tensor]] = {}

    def draft(self, budget: int, picker: Picker | None = None) -> DraftTree:
        """At most `budget` nodes, most probable first; none once the draft model's context is full."""
        drafter, model, picker = self.drafter, self.drafter.model, picker or Greedy()
        self._forget_nodes()
        past = len(self.text)
        if budget < 1 or past > model.n_ctx:
            self._last = DraftTree([], [])
            return self._last
        if self.cache is None:
            self.cache = model.new_cache(model.n_ctx + drafter.breadth * drafter.passes)
        self.known = min(self.known, past - 1)
        self.cache.truncate(self.known)
        foresees = picker.noise(past, model.vocab_size) is not None
        self._curve = drafter.foresight if foresees else drafter.calibration
        self._curve.refresh()
        with torch.no_grad():
            logits = model(self.text[self.known :], cache=self.cache, rows=[past - self.known - 1])  # (1, vocab_size)
            self.known = past
            self.paths[-1] = []  # the root's slot belongs to the past
            self._expand(-1, logits[0], budget, picker)
            for _ in range((min(drafter.passes, budget) if drafter.chain else drafter.passes) - 1):
                best = heapq.nlargest(budget, range(len(self.p)), key=self.p.__getitem__)
                nodes = [node for node in best if node not in self.paths and self.p[node] >= drafter.least]
                nodes = [node for node in nodes if past + len(self.paths[self.parents[node]]) < model.n_ctx]
                nodes = nodes[: drafter.breadth]
                if not nodes:
                    break
                base = self.cache.length
                mask = torch.zeros(len(nodes), base + len(nodes), dtype=torch.bool)
                mask[:, :past] = True
                for row, node in enumerate(nodes):
                    self.paths[node] = [*self.paths[self.parents[node]], base + row]
                    mask[row, self.paths[node]] = True
                positions = [past - 1 + len(self.paths[node]) for node in nodes]
                logits = model([self.tokens[node] for node in nodes], positions, mask, self.cache)
                for row, node in enumerate(nodes):  # (vocab_size,) each
                    self._expand(node, logits[row], budget, picker)
        self._last, _ = most_probable(self.tokens, self.parents, self.p, budget)
        self._estimates = self._last.probs
        self._last.probs = [self._curve(p) for p in self._estimates]
        return self._last

    def _expand(self, node: int, logits: Tensor, budget: int, picker: Picker) -> None:
        """Give a node its most probable children."""
        context, parent = [], node
        while parent >= 0:
            context.append(self.tokens[parent])
            parent = self.parents[parent]
        context = self.text + context[::-1]
        q = picker.process(logits, context).float().softmax(-1)
        noise = picker.noise(len(context), q.shape[-1], q.device)
        guess = q
        if noise is not None:
            wins = q * noise.exp()
            wins /= wins.sum()
            self.guesses[node] = q, wins
            guess = torch.lerp(q, wins, self.drafter.trust)
        top = guess.topk(1 if self.drafter.chain else min(budget, q.shape[-1]))
        p = self.p[node] if node >= 0 else 1.0
        for share, token in zip(top.values.tolist(), top.indices.tolist()):
            if share > 0:
                self.children[node, token] = len(self.p)
                self.p.append(p * min(share, 1.0))  # rounding must not make a child more probable than its parent
                self.parents.append(node)
                self.tokens.append(token)

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        tokens, drafter = list(tokens), self.drafter
        if draft and draft.begins(self._last):
            self._curve.learn(self._estimates[: len(draft)], draft.walk(tokens))
        node, slots = -1, []
        for token in tokens:
            if node in self.guesses:
                blind, seeing = (float(guess[token]) for guess in self.guesses[node])
                share = drafter.trust * seeing / max((1 - drafter.trust) * blind + drafter.trust * seeing, 1e-30)
                drafter.trust += self.RATE * (min(max(share, 0.01), 0.99) - drafter.trust)
            node = self.children.get((node, token))  # None: not drafted
            if node not in self.paths:
                break
            slots.append(self.paths[node][-1])
        if slots:  # expanded nodes on the way that the text took: the cache has these tokens already
            self.cache.keep(self.known, slots)
            self.known += len(slots)
        self.text += tokens
        self._forget_nodes()

    def close(self) -> None:
        self.cache = None
        self._forget_nodes()


# --- several ----------------------------------------------------------------------------------------------------------


class Combined:
    """The most probable nodes of several drafters' trees.

    A node that several propose counts with the largest of their estimates; in a tree without estimates each node is
    taken to be right half of the time. That is not the whole truth yet: what only the weakest of them proposes, and the
    others do not, is less likely than it says. So for each set of proposers ("the trie alone", "the trie and the
    model" ...) the estimates are corrected by how many of such nodes were accepted.

    Raises ValueError for no drafter at all and for drafters with different vocabularies.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        sizes = {getattr(drafter, "vocab_size", None) for drafter in self.drafters} - {None}
        if not self.drafters or len(sizes) > 1:
            made_for = ", ".join(map(str, sorted(sizes))) or "none"
            raise ValueError(f"combine one or more drafters, all for one vocabulary; these are for: {made_for}")
        self.vocab_size = next(iter(sizes), None)
        # By set of proposers, as bits: how many of their verified nodes were accepted, and the sum of the estimates of
        # all of them. Both are halved when the sum passes 50; they begin as if 2 of 2.0 had been seen.
        self.seen: defaultdict[int, list[float]] = defaultdict(lambda: [2.0, 2.0])

    def open(self, prompt_ids: Sequence[int]) -> "CombinedSession":
        return CombinedSession(self, prompt_ids)


class CombinedSession:
    """One query: a session of each drafter."""

    def __init__(self, drafter: Combined, prompt_ids: Sequence[int]) -> None:
        self.seen = drafter.seen
        self.sessions: list[Session] = [each.open(prompt_ids) for each in drafter.drafters]
        self.wants_picks = any(getattr(session, "wants_picks", False) for session in self.sessions)
        self.trees: list[DraftTree] = []
        self._last = DraftTree([], [])
        self._sources: list[tuple[int, float]] = []  # of each node of `_last`: its proposers, their largest estimate

    def draft(self, budget: int, picker: Picker | None = None) -> DraftTree:
        self.trees = [session.draft(budget, picker) for session in self.sessions]
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[tuple[int, float]] = []
        nodes: dict[tuple[int, int], int] = {}
        for number, tree in enumerate(self.trees):
            mine = [-1]  # mine[i + 1]: its node i in the merged tree
            for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
                key = mine[parent + 1], token
                node = nodes.setdefault(key, len(tokens))
                mine.append(node)
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(key[0])
                    sources.append((0, 0.0))
                proposers, p = sources[node]
                sources[node] = proposers | 1 << number, max(p, tree.probs[i] if tree.probs else 0.5 ** tree.depths[i])
        p: list[float] = []
        for parent, (proposers, estimate) in zip(parents, sources):
            accepted, estimated = self.seen[proposers]
            p.append(min(estimate * accepted / estimated, p[parent] if parent >= 0 else 1.0))
        self._last, best = most_probable(tokens, parents, p, budget)
        self._sources = [sources[node] for node in best]
        return self._last

    def observe(self, tokens: Sequence[int], draft: DraftTree | None = None, picks: list[int] | None = None) -> None:
        """Each session hears of its own tree (some nodes of which may not have been verified: those count as rejected,
        unless the text shows that they were right); those that want picks hear of the merged tree, to whose nodes they
        belong."""
        if draft and draft.begins(self._last):
            accepted = set(draft.walk(tokens))
            for node, (proposers, p) in enumerate(self._sources[: len(draft)]):
                seen = self.seen[proposers]
                seen[0] += node in accepted
                seen[1] += p
                if seen[1] > 50:
                    seen[:] = seen[0] / 2, seen[1] / 2
        trees = self.trees if draft else [draft] * len(self.sessions)
        for session, tree in zip(self.sessions, trees):
            if getattr(session, "wants_picks", False):
                session.observe(tokens, draft, picks)
            else:
                session.observe(tokens, tree)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
