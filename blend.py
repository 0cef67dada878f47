"""How far to trust what was counted: one weight per source of counts, and a curve that makes estimates honest.

Both learn while text is written, and both serve `trie.py`, whose head shows them at work: read that first.

Step by step: notebook 02, sections 3 and 4.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from counts import EMPTY, Node

BITS = tuple(n.bit_length() for n in range(256))  # 1 -> 1, 2..3 -> 2, 4..7 -> 3, ...
CELLS = 9 * 5  # bit lengths of `total` (0 to 8) and of the number of distinct children (0 to 4)


def cell(node: Node) -> int:
    """A node's class: how often something followed it, and how many different tokens did, both in powers of two."""
    total, distinct = node.total, len(node)
    return 5 * (BITS[total] if total < 256 else 8) + (BITS[distinct] if distinct < 16 else 4)


UNKNOWN = 1e-5  # what a token that no level knows counts as in learning
SLOWEST = 0.004  # the learning rate falls from 1/11 to this


class Blend:
    """How much each source of counts is trusted, learned from every token that is emitted.

    weights  (levels * CELLS,) list: the lambda of a node is weights[CELLS * level + cell(node)]
    trained  (levels * CELLS,) list: how many tokens each has learned from

    Levels are numbered from 0: the suffix of k = 1, 2, ... tokens has level 2k - 2 in the outputs and 2k - 1 in the
    query's own text. A `state` (see TrieSession) lists the nodes of all levels in this order, shortest suffix first.
    """

    def __init__(self, max_suffix: int) -> None:
        self.weights = []
        for total in (1, *(2**bit for bit in range(8))):  # each class starts as for its smallest member; the first
            for distinct in (1, *(2**bit for bit in range(4))):  # row and column, for nothing at all, are never used
                self.weights.append(total / (total + 2 * min(total, distinct)))
        self.weights *= 2 * max_suffix
        self.trained = [0] * len(self.weights)

    def train(self, state: list[Node], token: int) -> None:
        """The text in `state` went on with `token`: levels that expected it gain, the others lose.

        As in online EM, lambda moves towards the probability that it was this level that made the token, given that no
        longer suffix did and knowing the token:

            lambda <- lambda + rate (r - lambda),    r = (lambda n_k(token) / n_k) / P_k(token)
        """
        weights, trained = self.weights, self.trained
        p = UNKNOWN
        for level, node in enumerate(state):
            total = node.total
            if total:
                i = CELLS * level + cell(node)
                weight = weights[i]
                trained[i] = n = trained[i] + 1
                rate = 1 / (n + 10) if n < 240 else SLOWEST
                part = weight * node.get(token, EMPTY).count / total
                p = max(part + (1 - weight) * p, 1e-300)
                weights[i] = weight + rate * (part / p - weight)


class Calibration:
    """Makes estimates honest: a monotone curve from estimated probabilities to how often such nodes were accepted.

    A tree picks the nodes that look best, so their estimates are too high on average, by a seventh or so (the "winner's
    curse"). Around each of the KNOTS we sum up what was estimated and count what was accepted, and a broken line
    through the corrected knots maps one to the other. It never falls: so no node gets a higher probability than its
    parent, and the most probable nodes stay the most probable.
    """

    KNOTS = (0.0, *(2 ** (-i / 2) for i in range(20, -1, -1)))  # 0, 1/1024 ... 1/2, 0.71, 1
    MIDDLES = tuple(math.sqrt(a * b) for a, b in itertools.pairwise(KNOTS[1:]))
    FIRST, FIRST_WEIGHT = 0.87, 10.0  # the ratio we start with, as if seen on estimates that add up to 10
    MEMORY = 80.0  # when a knot's estimates add up to more, both its sums are halved: the latest texts count most

    def __init__(self) -> None:
        self.estimated = [0.0] * (len(self.MIDDLES) + 1)
        self.accepted = [0.0] * (len(self.MIDDLES) + 1)
        self.refresh()

    def refresh(self) -> None:
        """Draw the line anew, from all that was learned so far."""
        heights = [0.0]
        for knot, estimated, accepted in zip(self.KNOTS[1:], self.estimated, self.accepted):
            ratio = (accepted + self.FIRST * self.FIRST_WEIGHT) / (estimated + self.FIRST_WEIGHT)
            heights.append(min(max(heights[-1], knot * ratio), 1.0))
        self.heights = heights
        self.slopes = [
            (high - low) / (b - a) for low, high, a, b in zip(heights, heights[1:], self.KNOTS, self.KNOTS[1:])
        ]

    def __call__(self, p: float) -> float:
        i = min(bisect_right(self.KNOTS, p), len(self.slopes)) - 1
        return self.heights[i] + (p - self.KNOTS[i]) * self.slopes[i]

    def learn(self, estimates: Sequence[float], accepted: Iterable[int]) -> None:
        """Count a draft: `estimates` are its nodes' (uncorrected), `accepted` the indices of those accepted."""
        for node in accepted:
            self.accepted[bisect_right(self.MIDDLES, estimates[node])] += 1
        for p in estimates:
            i = bisect_right(self.MIDDLES, p)
            self.estimated[i] += p
            if self.estimated[i] > self.MEMORY:
                self.estimated[i] /= 2
                self.accepted[i] /= 2
