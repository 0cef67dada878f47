"""The draft tree: guesses of the next few tokens, which share their beginnings.

A drafter makes it (trie.py, drafters.py). The model is run once over all its nodes, and then we walk: from the root,
the last token of the text, to the child that carries the token which the model itself chooses next, and so on until
there is no such child. The nodes passed are the *accepted path* (lookahead.py tells the whole story).

Step by step: notebook 03, sections 2 to 5.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class DraftTree:
    """A tree of n guessed tokens below a *root*, the last token of the text so far (which is not itself a node).

    tokens    n ids
    parents   n indices, parents[i] < i; -1 means a child of the root
    probs     n estimated probabilities of being on the accepted path, or None

    depths    n numbers, 1 for a child of the root
    children  a list of n + 1 dictionaries: children[i] maps a token to the child of node i that carries it. The last,
              with index -1, is the root's, so that a walk from the root down needs no special case

    Siblings carry distinct tokens, so a walk always knows where to go.

        tokens  = [on, down, the]       (root) -- on -- the
        parents = [-1, -1, 0]                \\--- down

    Raises ValueError for lists of unequal length, a parent that does not come before its child, or equal siblings.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], probs: Sequence[float] | None = None) -> None:
        self.tokens, self.parents = list(tokens), list(parents)
        self.probs = None if probs is None else list(probs)
        if len(self.tokens) != len(self.parents) or (self.probs is not None and len(self.probs) != len(self.tokens)):
            raise ValueError("a draft tree needs one parent (and one probability, if any) for each token")
        self.depths: list[int] = []
        self.children: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents)):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}, which does not come before it")
            if self.children[parent].setdefault(token, node) != node:
                raise ValueError(f"token {token} stands twice below node {parent}")
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], budget: int) -> "DraftTree":
        """The tree of these token paths, which share their beginnings: its first `budget` nodes.

        [on, the], [on, a], [in]  ->  (root) -- on -- the     nodes in the order on, the, a, in
                                         |       `--- a
                                         `----- in
        """
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = -1
            for token in path:
                node = nodes.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    if node == budget:
                        return cls(tokens, parents)
                    tokens.append(token)
                    parents.append(parent)
                parent = node
        return cls(tokens, parents)

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Node indices from a child of the root down to `node`; [] for the root, -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that a text starting with `tokens` passes, from the root down."""
        nodes, node = [], -1
        for token in tokens:
            if (node := self.children[node].get(token)) is None:
                break
            nodes.append(node)
        return nodes

    def begins(self, other: "DraftTree") -> bool:
        """Whether this tree is the first nodes of the other one: the same numbers mean the same nodes."""
        n = len(self)
        return self.parents == other.parents[:n] and self.tokens == other.tokens[:n]

    def mask(self) -> Tensor:
        """(n + 1, n + 1) bool on the CPU: row i + 1 is node i; it sees (True) the root, its ancestors and itself.

        root  x              e.g. for the tree above
        on    x x
        down  x   x
        the   x x   x
        """
        rows = [bytearray(len(self.tokens) + 1)]  # plain bytes: a torch operation per row would cost ten times this
        rows[0][0] = 1
        for node, parent in enumerate(self.parents):
            row = bytearray(rows[parent + 1])  # what the parent sees
            row[node + 1] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(rows), -1)

    def trim(self, max_depth: int, max_nodes: int | None = None) -> "DraftTree":
        """Without the nodes deeper than `max_depth` or with an index from `max_nodes` on; itself, if nothing goes.

        Parents lie higher and have smaller indices, so what is kept is a tree.
        """
        limit = len(self) if max_nodes is None else max_nodes
        kept = [node for node, depth in enumerate(self.depths) if depth <= max_depth and node < limit]
        if len(kept) == len(self):
            return self
        new = {-1: -1} | {node: i for i, node in enumerate(kept)}
        probs = None if self.probs is None else [self.probs[node] for node in kept]
        return DraftTree([self.tokens[n] for n in kept], [new[self.parents[n]] for n in kept], probs)

    def render(self, decode: Callable[[list[int]], str], accepted: Iterable[int] = ()) -> str:
        """The tree in ASCII, one line per node, with probabilities if known and `*` at the `accepted` nodes."""
        marked, lines = set(accepted), ["(root)"]
        stack = [(child, "", i == 0) for i, child in enumerate(reversed(self.children[-1].values()))]
        while stack:  # no recursion: a tree may be deeper than Python's stack
            node, indent, last = stack.pop()
            prob = "" if self.probs is None else f"  {self.probs[node]:.2f}"
            star = " *" if node in marked else ""
            lines.append(f"{indent}{'`-- ' if last else '|-- '}{decode([self.tokens[node]])!r}{prob}{star}")
            indent += "    " if last else "|   "
            stack += [(child, indent, i == 0) for i, child in enumerate(reversed(self.children[node].values()))]
        return "\n".join(lines)
