"""What followed what: a bounded memory of the n-grams seen, as a trie that counts.

Every sequence is entered from each of its positions, up to max_depth tokens, and every node counts how often its path
was seen. After "a b a b c", with max_depth 3:

    root -- a 2 -- b 2 -- a 1        read: "a" was seen twice, "a b" twice, "a b a" once ...
      |               \\-- c 1
      |---- b 2 -- a 1 -- b 1
      |       \\--- c 1
      \\---- c 1

Three rules hold:

    a parent is never rarer than a child         "a b" cannot be seen more often than "a" (the root has no count)
    nor is a path rarer than with a longer past  "b" is at least as frequent as "a b", so if a long suffix of a text is
                                                 in the trie, all shorter ones are (until something is forgotten)
    there are never more than max_nodes nodes    what is worth least is forgotten in time, children with their parents

Step by step: notebook 02, section 2.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator

import numpy as np

WIDE = 16  # nodes with more children than this keep a list of the most frequent ones


class Node(dict):  # dict[int, Node]
    """One path that was seen. A node *is* the dictionary from the next token to the node of the longer path.

    count  how often the path was seen
    total  the sum of the children's counts: how often something was seen to follow
    seen   when it was last seen, in tokens written; the time of its first token counts, so no child is younger
    top    None, or with more than WIDE children the WIDE most frequent, in order (ties: smaller id first): a list of
           their tokens and one of their counts, so that a reader need not visit the children, far apart in memory

    Beware: a node without children is falsy, as an empty dictionary is. Empty it takes 96 bytes, with a child 256.
    """

    __slots__ = ("count", "seen", "top", "total")

    def __init__(self) -> None:
        self.count = self.total = self.seen = 0
        self.top: tuple[list[int], list[int]] | None = None

    def rank(self) -> None:
        """Make `top` anew."""
        if len(self) > WIDE:
            tokens = sorted(self, key=lambda token: (-self[token].count, token))[:WIDE]
            self.top = tokens, [self[token].count for token in tokens]
        else:
            self.top = None

    def promote(self, token: int, count: int) -> None:
        """Keep `top` in order after the child `token` was counted up to `count`."""
        tokens, counts = self.top
        if count < counts[-1] or (count == counts[-1] and token > tokens[-1]):
            return
        i = tokens.index(token) if token in tokens else WIDE - 1
        while i and (counts[i - 1], -tokens[i - 1]) < (count, -token):
            tokens[i], counts[i] = tokens[i - 1], counts[i - 1]
            i -= 1
        tokens[i], counts[i] = token, count


EMPTY = Node()  # stands for a path that was never seen: no count, no children. Never written to


class Counts:
    """The trie: its root, its bounds, and what is forgotten when it is full.

    max_depth  longest path, in tokens
    max_nodes  never exceeded
    """

    # What a node is worth:  seen + DOUBLING log2(count) - LENGTH depth,  all in tokens of age. To be seen twice as
    # often is worth as much as to be 300,000 tokens younger, to be one token longer costs 100,000. So the rare go
    # first, among them the long paths (their beginnings still know most of it), among those the oldest; and what nobody
    # says any more fades. No node is worth more than its parent. (Chosen on replays with a quarter of the memory that
    # would be needed: bench.py replay --max-nodes.)
    DOUBLING, LENGTH = 300_000, 100_000
    DROPPED = 0.5  # of the nodes, by a round of the sweep (`forget`): the bar is the median worth of a sample

    # Most long paths are seen once and never again. When the trie is more than half full, a path of more than FREE
    # tokens is admitted only if its beginning was seen before: the same memory then holds more that comes back.
    FREE = 2

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.root = Node()
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.n_nodes = 0  # without the root
        self.clock = 0  # tokens written
        self.forgotten = 0  # nodes dropped so far: by this, whoever holds open paths sees that some may be gone
        self.round: list[int] = []  # first tokens that the sweep has still to visit ...
        self.bar = 0.0  # ... and what a node must be worth to stay

    def find(self, path: Iterable[int]) -> Node:
        """The node at the end of `path`; EMPTY if it was never seen."""
        node = self.root
        for token in path:
            node = node.get(token, EMPTY)
        return node

    def levels(self) -> Iterator[list[Node]]:
        """All nodes, depth by depth, the root first."""
        level = [self.root]
        while level:
            yield level
            level = [child for node in level for child in node.values()]

    def forget(self) -> None:
        """Make room for one more token, which may add max_depth nodes, by dropping what is worth least.

        Not all at once, which would take a second in a trie of a million nodes: a sweep goes round the trie, below one
        first token after the other, and goes on where it stopped when the trie is full again.
        """
        while self.n_nodes + self.max_depth > self.max_nodes:
            if not self.round:
                self.round = list(self.root)
                sample = self.round[:: max(1, len(self.round) // 256)]
                worths = sorted(itertools.chain.from_iterable(map(self._worths, sample)))
                self.bar = worths[int(self.DROPPED * len(worths))]
            self._sweep(self.round.pop())

    def _worth(self, node: Node, depth: int) -> float:
        return node.seen + self.DOUBLING * math.log2(node.count) - self.LENGTH * depth

    def _worths(self, first: int) -> list[float]:
        """What the paths that begin with this token are worth."""
        level, worths, depth = [self.root[first]], [], 0
        while level:
            depth += 1
            worths += [self._worth(node, depth) for node in level]
            level = [child for node in level for child in node.values()]
        return worths

    def _sweep(self, first: int) -> None:
        """Drop those among the paths that begin with this token which are worth no more than the bar."""
        level, depth = [self.root[first]], 1
        if self._worth(level[0], depth) <= self.bar:
            return self._drop(self.root, [first])
        while level:
            depth += 1
            line = self.bar + self.LENGTH * depth
            longer = []
            for node in level:
                # `_worth` written out, and most are young enough, so that the logarithm is seldom asked for.
                worthless = [
                    token
                    for token, child in node.items()
                    if child.seen <= line and child.seen + self.DOUBLING * math.log2(child.count) <= line
                ]
                if worthless:
                    self._drop(node, worthless)
                longer += filter(None, node.values())  # those with children
            level = longer

    def _drop(self, parent: Node, tokens: list[int]) -> None:
        """Take these children of a node and all below them (worth even less) out of the trie.

        What was dropped is left without count and children. So whoever still holds it can tell, and finds nothing.
        """
        dropped = [parent.pop(token) for token in tokens]
        parent.total -= sum(node.count for node in dropped)
        for node in dropped:  # the list grows on the way
            node.count = 0
            if node:
                dropped += node.values()
                node.clear()
                node.total, node.top = 0, None
        self.n_nodes -= len(dropped)
        self.forgotten += len(dropped)
        if parent.top is not None and (len(parent) <= WIDE or not set(tokens).isdisjoint(parent.top[0])):
            parent.rank()

    @property
    def nbytes(self) -> int:
        """What the nodes occupy in memory, in bytes (without the integers in them)."""
        return sum(
            sys.getsizeof(node) + sum(map(sys.getsizeof, (node.top, *node.top) if node.top else ()))
            for level in self.levels()
            for node in level
        )

    def pack(self) -> dict[str, np.ndarray]:
        """The trie as flat arrays, depth by depth, each in the smallest integer type that holds it.

        children  (n_nodes + 1,)  how many children each node has, the root first
        tokens, counts, ages  (n_nodes,)  of all nodes but the root; an age is the time since the node was last seen
        round  the first tokens that the sweep has still to visit

            root -- a 2 -- b 1        children 2 1 0 0    tokens a b b    counts 2 1 1
              `---- b 1
        """
        levels = list(self.levels())
        edges = [edge for level in levels for node in level for edge in node.items()]
        columns = {
            "children": [len(node) for level in levels for node in level],
            "tokens": [token for token, _ in edges],
            "counts": [node.count for _, node in edges],
            "ages": [self.clock - node.seen for _, node in edges],
            "round": self.round,
        }
        return {
            name: np.array(column, dtype=np.min_scalar_type(max(column, default=0))) for name, column in columns.items()
        }

    def unpack(self, arrays: dict[str, np.ndarray], clock: int, bar: float) -> None:
        """Fill an empty trie from `pack`'s arrays and the `clock` and the `bar` at that time.

        Raises ValueError if the arrays are not a trie within these bounds, KeyError if one is missing.
        """
        columns = [arrays[name] for name in ("round", "children", "tokens", "counts", "ages")]
        if any(column.ndim != 1 or column.dtype.kind != "u" for column in columns):
            raise ValueError("the arrays are not lists of whole numbers")
        unvisited, children, *columns = (column.tolist() for column in columns)
        n = len(columns[0])
        if len(children) != n + 1 or sum(children) != n or any(len(column) != n for column in columns):
            raise ValueError("the arrays do not fit together")
        if n > self.max_nodes:
            raise ValueError(f"{n} nodes are more than max_nodes {self.max_nodes}")
        rows, nodes = zip(*columns), [self.root]
        for node, size in zip(nodes, children):  # `nodes` grows on the way: parents come before their children
            for token, count, age in itertools.islice(rows, size):
                child = node[token] = Node()
                child.count, child.seen = count, clock - age
                if count < 1 or (node is not self.root and (count > node.count or child.seen > node.seen)):
                    raise ValueError("a node was seen more often or later than its parent")
                node.total += count
                nodes.append(child)
            if len(node) != size:
                raise ValueError("a token stands twice below one node")
            if size > WIDE:
                node.rank()
        if len(nodes) != n + 1 or sum(1 for _ in self.levels()) > self.max_depth + 1:
            raise ValueError("some nodes lie too deep or hang nowhere")
        if len(set(unvisited) & self.root.keys()) != len(unvisited):
            raise ValueError("the sweep was to visit what is not there")
        self.n_nodes, self.clock, self.round, self.bar = n, clock, unvisited, float(bar)


class Writer:
    """Enters a sequence into a trie token by token, from each of its positions at once.

    A new token lengthens every open path by one and opens another, so no path is ever walked from the root again. With
    max_depth 3:

        after "a b"   open are (b), (a b)
        then "c"      counts (c), (b c), (a b c); open are now (c), (b c), and (a b c) is full
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.open: list[tuple[Node, int, int]] = []  # (node, its depth, when its path began), shortest path first
        self.forgotten = counts.forgotten

    def write(self, token: int, begin: bool = True) -> None:
        """Count `token` on each open path and, if `begin`, on one that starts here."""
        counts = self.counts
        if counts.n_nodes + counts.max_depth > counts.max_nodes:
            counts.forget()
        if self.forgotten != counts.forgotten:
            self.open, self.forgotten = [path for path in self.open if path[0].count], counts.forgotten
        counts.clock = clock = counts.clock + 1
        free = counts.FREE if 2 * counts.n_nodes > counts.max_nodes else counts.max_depth
        grown = []
        for node, depth, start in ((counts.root, 0, clock), *self.open) if begin else self.open:
            child = node.get(token)
            if child is None:
                if depth >= free and node.count < 2:
                    continue  # not admitted: the path ends here
                child = node[token] = Node()
                counts.n_nodes += 1
            child.count = count = child.count + 1
            if child.seen < start:
                child.seen = start
            node.total += 1
            if node.top is not None:
                node.promote(token, count)
            elif len(node) > WIDE:
                node.rank()
            if depth + 1 < counts.max_depth:
                grown.append((child, depth + 1, start))
        self.open = grown
