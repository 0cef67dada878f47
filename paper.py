"""The paper's own ways to turn a trie into a draft, to compare with best-first.

Three modes to spend a budget of nodes (Zhao et al., KDD 2024, arXiv 2312.12728, section 4), all by raw frequencies
below a suffix of the text that is in the trie, the longest first:

    hierarchical   the most frequent nodes below the matched suffix; branches share their common beginning
    parallel       several branches that share nothing
    single         one branch: the most frequent continuation of the most frequent continuation ...

A continuation seen in this query's prompt counts PROMPT_WEIGHT times: an answer repeats its own question more often
than it repeats other answers. Notebook 02, section 6, compares these modes with best-first.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from counts import EMPTY, Node
from tree import DraftTree
from trie import TokenTrie, TrieSession

MAX_MATCH = 3  # longest suffix that is looked up
PROMPT_WEIGHT = 3


class PaperSession(TrieSession):
    """One query in mode "hierarchical", "parallel" or "single".

    Every run of tokens in prompt + output is counted exactly once. Those that begin in the prompt go to the private
    trie, even where they run on into the output; those that begin in the output go to the shared one.
    """

    def __init__(self, trie: TokenTrie, prompt_ids: Iterable[int]) -> None:
        super().__init__(trie, prompt_ids)
        self.mode = trie.mode

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        for token in [self.trie.check(token) for token in tokens]:
            self._writer.write(token)
            self._own_writer.write(token, begin=False)
            self._recent.append(token)

    def draft(self, budget: int, picker: object = None) -> DraftTree:
        """At most `budget` tokens that may come next, as a tree; empty if nothing is known."""
        grow = {"hierarchical": self._hierarchical, "parallel": self._parallel, "single": self._single}
        tokens: list[int] = []
        parents: list[int] = []
        grow[self.mode](budget, tokens, parents)
        return DraftTree(tokens, parents)

    def _suffixes(self) -> Iterator[tuple[Node, Node]]:
        """The nodes of the text's suffixes in the outputs and in the prompt, longest suffix first."""
        recent = list(self._recent)[-MAX_MATCH:]
        for start in range(len(recent)):
            output, prompt = self.trie.outputs.find(recent[start:]), self.own.find(recent[start:])
            if output or prompt:
                yield output, prompt

    def _continuations(self, output: Node, prompt: Node, most: int) -> list[tuple]:
        """(-weight, token, output child, prompt child) of the `most` frequent continuations, most frequent first.

        Ties go to the smaller token id, so that drafting is deterministic.
        """
        weighted = {token: [-child.count, token, child, EMPTY] for token, child in output.items()}
        for token, child in prompt.items():
            entry = weighted.setdefault(token, [0, token, EMPTY, EMPTY])
            entry[0] -= PROMPT_WEIGHT * child.count
            entry[3] = child
        # (-weight, token) differ between any two entries, so nodes are never compared
        return heapq.nsmallest(most, [tuple(entry) for entry in weighted.values()])

    def _hierarchical(self, budget: int, tokens: list[int], parents: list[int]) -> None:
        """Below the longest suffix the most frequent nodes, by a heap; if they do not fill the budget, the next suffix.

        A child is never more frequent than its parent, so taking the most frequent node whose parent was taken gives
        the most frequent ones of all. With counts a 5 (below it b 4, c 1) and d 2, and a budget of 3:

            heap a5 d2 -> take a;    heap b4 d2 c1 -> take b;    heap d2 c1 -> take d
        """
        known: dict[tuple[int, int], int] = {}  # (parent, token) -> node, as a shorter suffix proposes some again
        for output, prompt in self._suffixes():
            if len(tokens) >= budget:
                break
            order = 0  # earlier entries first among equals; also keeps the heap from comparing nodes
            heap: list[tuple] = []
            node, below = -1, self._continuations(output, prompt, budget)  # the root's children are open first
            while len(tokens) < budget:
                for weight, token, *children in below:
                    heapq.heappush(heap, (weight, order, token, node, children))
                    order += 1
                if not heap:
                    break
                _, _, token, parent, children = heapq.heappop(heap)
                node, below = known.setdefault((parent, token), len(tokens)), self._continuations(*children, budget)
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)

    def _parallel(self, budget: int, tokens: list[int], parents: list[int]) -> None:
        """A chain for each first token, from the most frequent on, the longest suffix first."""
        started: set[int] = set()
        for output, prompt in self._suffixes():
            for entry in self._continuations(output, prompt, budget):
                if len(tokens) >= budget:
                    return
                if entry[1] not in started:
                    started.add(entry[1])
                    self._chain(entry, budget, tokens, parents)

    def _single(self, budget: int, tokens: list[int], parents: list[int]) -> None:
        """The most frequent chain below the longest suffix that was continued."""
        for output, prompt in self._suffixes():
            return self._chain(self._continuations(output, prompt, 1)[0], budget, tokens, parents)

    def _chain(self, entry: tuple, budget: int, tokens: list[int], parents: list[int]) -> None:
        """Follow the most frequent continuation until the trie or the budget ends."""
        parent = -1
        while entry is not None and len(tokens) < budget:
            _, token, output, prompt = entry
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
            entry = next(iter(self._continuations(output, prompt, 1)), None)
