"""Where draft tokens come from: a trie of everything that was said before.

Text repeats itself. Names come back, an answer quotes its question, and a service answers similar questions all day. A
*trie* (prefix tree) remembers which tokens followed which: every sequence is entered from each of its positions, to a
maximal depth, and every node counts how often its path was seen. After the output "a b a b c", with max_depth 3:

    root -- a 2 -- b 2 -- a 1        read: "a" was seen twice, "a b" twice, "a b a" once ...
      |               \\-- c 1
      |---- b 2 -- a 1 -- b 1
      |       \\--- c 1
      \\---- c 1

To guess what comes after "... a b", look up the longest suffix that is in the trie, "a b", and read off its
continuations: "a" and "c", once each. Shorter suffixes know more continuations, though less surely: they fill up what
the longest leaves of the budget. A text whose last token was never seen has none.

Several guesses are worth more than one, because a forward pass over a dozen tokens costs hardly more than over one. So
the guess is a *draft tree*, and the three published ways to spend a budget of nodes are here as modes
(Zhao et al., KDD 2024, arXiv 2312.12728, section 4):

    hierarchical   the most frequent nodes below the matched suffix; branches share their common beginning
    parallel       several branches that share nothing
    single         one branch: the most frequent continuation of the most frequent continuation ...

The counts of a running query's prompt are kept apart, in a small trie of its own, and vanish with the query. So no
query sees another's prompt, while all see the outputs (what an output quotes from its prompt is part of the output).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

MODES = ("hierarchical", "parallel", "single")


class DraftTree:
    """A tree of n guessed tokens below a *root*, the last token of the text so far (which is not itself a node).

    tokens    n ids
    parents   n indices, parents[i] < i; -1 means a child of the root
    probs     n estimated probabilities of being on the accepted path, or None

    children[i] maps a token to the child of node i that carries it; children[-1] is the root's, so that a walk from the
    root down needs no special case. Siblings carry distinct tokens: a walk is never in doubt where to go.

        tokens  = [on, down, the]       (root) -- on -- the
        parents = [-1, -1, 0]                \\--- down

    Raises ValueError for lists of unequal length, a parent that does not come before its child, or equal siblings.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], probs: Sequence[float] | None = None) -> None:
        self.tokens, self.parents = list(tokens), list(parents)
        self.probs = None if probs is None else list(probs)
        if len(self.tokens) != len(self.parents) or (self.probs is not None and len(self.probs) != len(self.tokens)):
            raise ValueError("a draft tree needs one parent (and one probability, if any) for each token")
        self.depths: list[int] = []  # 1 for a child of the root
        self.children: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents)):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}, which does not come before it")
            if self.children[parent].setdefault(token, node) != node:
                raise ValueError(f"token {token} stands twice below node {parent}")
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Node indices from a child of the root down to `node`; [] for the root, -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def mask(self) -> Tensor:
        """(n + 1, n + 1) bool: row i + 1 is node i; it sees the root (column 0), its ancestors and itself.

        root  x              e.g. for the tree above
        on    x x
        down  x   x
        the   x x   x
        """
        rows = [bytearray(len(self.tokens) + 1)]
        rows[0][0] = 1
        for node, parent in enumerate(self.parents):
            row = bytearray(rows[parent + 1])  # what the parent sees
            row[node + 1] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(rows), -1)

    def trim(self, max_depth: int, max_nodes: int | None = None) -> "DraftTree":
        """The tree without nodes deeper than `max_depth` or behind the first `max_nodes`; itself, if nothing goes."""
        limit = len(self) if max_nodes is None else max_nodes
        kept = [node for node, depth in enumerate(self.depths) if depth <= max_depth and node < limit]
        if len(kept) == len(self):
            return self
        new = {-1: -1} | {node: i for i, node in enumerate(kept)}
        probs = None if self.probs is None else [self.probs[node] for node in kept]
        return DraftTree([self.tokens[n] for n in kept], [new[self.parents[n]] for n in kept], probs)

    def render(self, decode: Callable[[list[int]], str], accepted: Iterable[int] = ()) -> str:
        """The tree in ASCII, a line a node, with probabilities if known and `*` at the `accepted` nodes."""
        marked = set(accepted)
        lines = ["(root)"]

        def walk(node: int, indent: str) -> None:
            below = list(self.children[node].items())
            for i, (token, child) in enumerate(below):
                last = i == len(below) - 1
                prob = "" if self.probs is None else f"  {self.probs[child]:.2f}"
                star = " *" if child in marked else ""
                lines.append(f"{indent}{'`-- ' if last else '|-- '}{decode([token])!r}{prob}{star}")
                walk(child, indent + ("    " if last else "|   "))

        walk(-1, "")
        return "\n".join(lines)


class Node:
    """One path that was seen: how often, and what came next. A parent's count is never below a child's."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


def find(root: Node, path: Iterable[int]) -> Node | None:
    """The node at the end of `path`, or None if it was never seen."""
    node: Node | None = root
    for token in path:
        node = node.children.get(token)
        if node is None:
            return None
    return node


class Writer:
    """Enters a sequence into a trie token by token, from each of its positions at once.

    A new token lengthens every open path by one and opens another, so nothing is ever looked up from the root again:

        after "a b"   open: (b), (a b)
        then "c"      counts (c), (b c), (a b c), which are the open ones now; the longest leaves at max_depth
    """

    def __init__(self, root: Node, max_depth: int) -> None:
        self.root, self.max_depth = root, max_depth
        self.open: list[Node] = []  # shortest path first, each one token longer than the one before
        self.longest = 0  # tokens in the last of them

    def write(self, token: int, begin: bool = True) -> int:
        """Count `token` on each open path and, if `begin`, on one that starts here. Returns how many nodes are new."""
        created = 0
        grown = []
        for node in [self.root, *self.open] if begin else self.open:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
                created += 1
            child.count += 1
            grown.append(child)
        self.open, self.longest = grown, self.longest + 1
        if self.longest == self.max_depth:
            self.longest -= 1
            if grown:
                grown.pop()
        return created


class TokenTrie:
    """The drafter: memory of all outputs, shared by all queries. It grows with every new output and forgets none.

    vocab_size   of the model it drafts for, or None: not checked
    max_depth    longest path, in tokens
    max_match    longest suffix that is looked up; max_depth - max_match tokens are left to draft below it
    mode         "hierarchical", "parallel" or "single"

    Raises ValueError for an unknown mode or depths that leave nothing to draft.
    """

    def __init__(
        self, vocab_size: int | None = None, max_depth: int = 8, max_match: int = 3, mode: str = "hierarchical"
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if not 1 <= max_match < max_depth:
            raise ValueError(f"max_match must be at least 1 and below max_depth {max_depth}, not {max_match}")
        self.vocab_size, self.max_depth, self.max_match, self.mode = vocab_size, max_depth, max_match, mode
        self.root = Node()
        self.n_nodes = 0  # without the root

    def insert(self, tokens: Iterable[int]) -> None:
        """Remember an output seen earlier (token ids, end-of-text included if it ended so)."""
        writer = Writer(self.root, self.max_depth)
        for token in [self.check(token) for token in tokens]:  # all are checked before the first is counted
            self.n_nodes += writer.write(token)

    def check(self, token: int) -> int:
        token = int(token)
        if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
            raise ValueError(f"token id {token} is outside the trie's vocabulary of {self.vocab_size}")
        return token

    def count(self, tokens: Iterable[int]) -> int:
        """How often this path was seen in outputs; 0 if never."""
        node = find(self.root, tokens)
        return 0 if node is None else node.count

    def open(self, prompt_ids: Iterable[int]) -> "TrieSession":
        """A query begins."""
        return TrieSession(self, prompt_ids)


class TrieSession:
    """One query: reads the shared trie and a private one for its prompt, and tells the shared one what was emitted.

    Every run of tokens in prompt + output is counted exactly once, by where it begins: in the prompt, then it is the
    query's own and goes into the private trie (also if it runs on into the output); in the output, then all may use it.
    """

    PROMPT_WEIGHT = 3  # what this question says is likelier to come up in its answer than what others' answers said

    def __init__(self, trie: TokenTrie, prompt_ids: Iterable[int]) -> None:
        self.trie = trie
        self.prompt_root = Node()
        self._prompt_writer = Writer(self.prompt_root, trie.max_depth)
        self._output_writer = Writer(trie.root, trie.max_depth)
        tokens = [trie.check(token) for token in prompt_ids]
        for token in tokens:
            self._prompt_writer.write(token)
        self._recent = tokens[-trie.max_match :]  # the suffix that drafts continue

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        """These tokens were emitted. Their n-grams are in the trie from now on, for this query and all others."""
        tokens = [self.trie.check(token) for token in tokens]
        for token in tokens:
            self.trie.n_nodes += self._output_writer.write(token)
            self._prompt_writer.write(token, begin=False)
        self._recent = [*self._recent, *tokens][-self.trie.max_match :]

    def close(self) -> None:
        """The query ends: its prompt is forgotten."""
        self.prompt_root = Node()
        self._prompt_writer = Writer(self.prompt_root, self.trie.max_depth)

    def draft(self, budget: int, picker: object = None) -> DraftTree:
        """At most `budget` tokens that may come next, as a tree; empty if nothing is known."""
        grow = {"hierarchical": self._hierarchical, "parallel": self._parallel, "single": self._single}
        tokens: list[int] = []
        parents: list[int] = []
        grow[self.trie.mode](budget, tokens, parents)
        return DraftTree(tokens, parents)

    def _suffixes(self) -> Iterator[tuple[Node | None, Node | None]]:
        """The nodes of the text's suffixes in the output trie and in the prompt's, longest suffix first."""
        for start in range(len(self._recent)):
            suffix = self._recent[start:]
            output, prompt = find(self.trie.root, suffix), find(self.prompt_root, suffix)
            if output or prompt:
                yield output, prompt

    def _continuations(self, output: Node | None, prompt: Node | None, most: int) -> list[tuple]:
        """(-weight, token, output child, prompt child) of the `most` frequent continuations, most frequent first.

        Ties go to the smaller token id, so that drafting is deterministic.
        """
        weighted: dict[int, list] = {}
        if output is not None:
            weighted = {token: [-child.count, token, child, None] for token, child in output.children.items()}
        if prompt is not None:
            for token, child in prompt.children.items():
                entry = weighted.setdefault(token, [0, token, None, None])
                entry[0] -= self.PROMPT_WEIGHT * child.count
                entry[3] = child
        return heapq.nsmallest(most, [tuple(entry) for entry in weighted.values()])

    def _hierarchical(self, budget: int, tokens: list[int], parents: list[int]) -> None:
        """Below the longest suffix the most frequent nodes, by a heap; if they do not fill the budget, the next suffix.

        A child is never more frequent than its parent, so taking the most frequent node whose parent was taken gives
        the most frequent ones of all. With counts a 5 (below it b 4, c 1) and d 2, and a budget of 3:

            heap a5 d2 -> take a;    heap b4 d2 c1 -> take b;    heap d2 c1 -> take d
        """
        known: dict[tuple[int, int], int] = {}  # (parent, token) -> node, as a shorter suffix proposes some again
        for output, prompt in self._suffixes():
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
        for output, prompt in self._suffixes():
            for entry in self._continuations(output, prompt, 1):
                if budget > 0:
                    self._chain(entry, budget, tokens, parents)
                return

    def _chain(self, entry: tuple, budget: int, tokens: list[int], parents: list[int]) -> None:
        """Follow the most frequent continuation until the trie or the budget ends."""
        parent = -1
        while entry is not None and len(tokens) < budget:
            _, token, output, prompt = entry
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
            entry = next(iter(self._continuations(output, prompt, 1)), None)
