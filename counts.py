"""What followed what: a bounded memory of the n-grams seen, as a trie that counts.

Every sequence is entered from each of its positions, up to max_depth tokens, and every node counts how often its path
was seen. After "a b a b c", with max_depth 3:

    root -- a 2 -- b 2 -- a 1        read: "a" was seen twice, "a b" twice, "a b a" once ...
      |               \\-- c 1
      |---- b 2 -- a 1 -- b 1
      |       \\--- c 1
      \\---- c 1

Three rules hold at every moment:

    a parent is never rarer than a child         "a b" cannot be seen more often than "a" (the root has no count)
    nor is a path rarer than with a longer past  "b" is at least as frequent as "a b", so if a long suffix of a text is
                                                 in the trie, all shorter ones are (if every token begins a path)
    there are never more than max_nodes nodes    what is worth least is forgotten in time, by an order that keeps the
                                                 first two rules
"""

import itertools
import sys
from collections.abc import Iterable, Iterator

import numpy as np

WIDE = 16  # nodes with more children than this keep a list of the most frequent ones


class Node(dict):  # dict[int, Node]
    """One path that was seen. A node *is* the dictionary from the next token to the node of the longer path.

    count  how often the path was seen
    total  the sum of the children's counts: how often something was seen to follow
    seen   when it was last seen, in tokens written; the time of its first token counts, so no child is younger
    top    None, or with more than WIDE children the tokens of the WIDE most frequent, in order (ties: smaller id first)

    Beware: a node without children is falsy, as an empty dictionary is. Empty it takes 96 bytes, with a child 256.
    """

    __slots__ = ("count", "seen", "top", "total")

    def __init__(self) -> None:
        self.count = self.total = self.seen = 0
        self.top: list[int] | None = None

    def rank(self) -> None:
        """Make `top` anew."""
        by_count = sorted(self, key=lambda token: (-self[token].count, token))
        self.top = by_count[:WIDE] if len(self) > WIDE else None

    def promote(self, token: int, count: int) -> None:
        """Keep `top` in order after the child `token` was counted up to `count`."""
        top = self.top
        last = self[top[-1]].count
        if count < last or (count == last and token > top[-1]):
            return
        i = top.index(token) if token in top else WIDE - 1
        while i and (self[top[i - 1]].count, -top[i - 1]) < (count, -token):
            top[i] = top[i - 1]
            i -= 1
        top[i] = token


EMPTY = Node()  # stands for a path that was never seen: no count, no children. Never written to


class Counts:
    """The trie: its root, its bounds, and what is forgotten when it is full.

    max_depth  longest path, in tokens
    max_nodes  never exceeded
    """

    # What a node is worth:  seen + DOUBLING log2(count) - LENGTH depth,  all in tokens of age. To be seen twice as
    # often is worth as much as to be 300,000 tokens younger, to be one token longer costs 100,000. So the rare go
    # first, among them the long paths (their beginnings still know most of it), among those the oldest; and what nobody
    # says any more fades. No node is worth more than its parent or its own shorter past: forgetting keeps the rules
    # above. (Chosen on replays with a quarter of the memory that would be needed: bench.py replay --max-nodes.)
    DOUBLING, LENGTH = 300_000, 100_000
    KEPT = 0.65  # the share of the nodes that stays

    # Most long paths are seen once and never again. When the trie is more than half full, a path of more than FREE
    # tokens is admitted only if its beginning was seen before: the same memory then holds more that comes back.
    FREE = 2

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.root = Node()
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.n_nodes = 0  # without the root
        self.clock = 0  # tokens written, and one tick for each time that something was forgotten: whoever holds nodes
        self.forgotten = 0  # (a session, a writer) sees by either that they may be gone

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
        """Drop the third of the nodes that is worth least (a microsecond a node, so about three per node dropped)."""
        rows = []  # per depth: (parents, tokens, worth) of all nodes there
        level = [self.root]
        for depth in range(1, self.max_depth + 1):
            parents = [node for node in level for _ in node]
            tokens = [token for node in level for token in node]
            level = [child for node in level for child in node.values()]
            seen = np.array([node.seen for node in level], dtype=float)
            count = np.array([node.count for node in level], dtype=float)
            rows.append((parents, tokens, seen + self.DOUBLING * np.log2(count) - self.LENGTH * depth))
        worth = np.concatenate([row[2] for row in rows])
        third = int(len(worth) * (1 - self.KEPT))
        bar = np.partition(worth, third)[third]
        wide = {}  # by id: a dictionary, which a node is, cannot be hashed
        for parents, tokens, worth in rows:
            for i in np.flatnonzero(worth <= bar).tolist():
                node = parents[i]
                node.total -= node.pop(tokens[i]).count
                self.n_nodes -= 1
                if node.top is not None:
                    wide[id(node)] = node
        for node in wide.values():
            node.rank()
        self.forgotten += 1
        self.clock += 1  # so that whoever holds nodes notices

    @property
    def nbytes(self) -> int:
        """What the nodes occupy in memory, in bytes (without the integers in them)."""
        return sum(
            sys.getsizeof(node) + (sys.getsizeof(node.top) if node.top else 0)
            for level in self.levels()
            for node in level
        )

    def pack(self) -> dict[str, np.ndarray]:
        """The trie as flat arrays, depth by depth, each in the smallest integer type that holds it.

        children  (n_nodes + 1,)  how many children each node has, the root first
        tokens, counts, ages  (n_nodes,)  of all nodes but the root; an age is the time since the node was last seen

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
        }
        return {
            name: np.array(column, dtype=np.min_scalar_type(max(column, default=0))) for name, column in columns.items()
        }

    def unpack(self, arrays: dict[str, np.ndarray], clock: int) -> None:
        """Fill an empty trie from `pack`'s arrays and the `clock` at that time.

        Raises ValueError if the arrays are not a trie within these bounds, KeyError if one is missing.
        """
        columns = [arrays[name] for name in ("children", "tokens", "counts", "ages")]
        if any(column.ndim != 1 or column.dtype.kind != "u" for column in columns):
            raise ValueError("the arrays are not lists of whole numbers")
        children, *columns = (column.tolist() for column in columns)
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
        self.n_nodes, self.clock = n, clock


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
        if self.forgotten != counts.forgotten:  # open paths may be gone: start afresh
            self.open, self.forgotten = [], counts.forgotten
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
