"""How many nodes pay? The budget, chosen step by step from measured times and estimated probabilities.

A draft of n nodes makes a forward pass of n + 1 rows. It yields 1 + E(n) tokens on average, E(n) being the sum of the
probabilities of its n most probable nodes, and takes T(n + 1) seconds. At the rate of r tokens per second those seconds
are worth r T tokens, so the best n is the one with the largest

    gain(n) = 1 + E(n) - r T(n + 1)                          (Dinkelbach 1967, for the largest ratio of tokens to time)

where r is the rate that is being made. An example: T is 20 ms for 1 row, 24 for 9 and 40 for 17, r = 80 tokens/s, and
the draft's probabilities add up to 1.2 for 8 nodes and to 1.6 for 16:

    n      1 + E    r T     gain
    0      1.0      1.6     -0.6
    8      2.2      1.92     0.28      <- taken
    16     2.6      3.2     -0.6       the kernels' next step is too dear

The draft is made before n is chosen, so its own cost no longer counts then; but if gain(n) - gain(0) is not worth the
time that drafting took, the next steps go without. Only a few n are tried (SIZES): kernels work on blocks of rows, so T
has steps and hardly any width between is better; and the first pass of a width is slow (4 ms on the bundled model, as
long as a pass, because oneDNN compiles a kernel for the shape), so a text had better use few of them. T is measured: by
a few passes over junk when a model is first used (`calibrate`), and from then on by every real step. Nothing of this
can change the text, only its speed.

Step by step: notebook 05, section 4.
"""

import itertools
import math
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any

import torch

from tree import DraftTree

SIZES = (4, 8, 12, 16, 24, 32, 48, 64)  # drafts of these numbers of nodes; a drafter may make fewer
MOST = SIZES[-1]  # beyond, a drafter has nothing likely left to say


class CostCurve:
    """T(rows): seconds of a forward pass, from what was seen; between widths seen by interpolation.

    T is `shape[rows]` times `scale`. The machine has slow minutes and the prefix grows, which all widths feel alike; so
    every pass corrects the scale, and more cautiously its own width's shape: then it is known what the others cost now.
    A pass that took more than three times as long as expected counts as three times; the very first of a width (see
    above) not at all.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []  # widths measured, ascending
        self.shape: dict[int, float] = {}
        self.scale = 1.0
        self.seen: set[int] = set()  # widths that had their first pass

    def learn(self, rows: int, seconds: float) -> None:
        if rows not in self.seen:
            self.seen.add(rows)
        elif rows not in self.shape:
            insort(self.rows, rows)
            self.shape[rows] = seconds / self.scale
        else:
            error = min(seconds / (self.scale * self.shape[rows]), 3.0) - 1
            self.scale *= 1 + 0.1 * error
            self.shape[rows] *= 1 + 0.03 * error

    def __call__(self, rows: int) -> float:
        """Seconds for this many rows. Without any measurement 0; outside the measured range the nearest, in proportion
        to a guess (32 rows cost twice what one costs)."""
        if not self.rows:
            return 0.0
        i = bisect_left(self.rows, rows)
        if i < len(self.rows) and self.rows[i] == rows:
            return self.scale * self.shape[rows]
        if i == 0 or i == len(self.rows):
            near = self.rows[0 if i == 0 else -1]
            return self.scale * self.shape[near] * (32 + rows) / (32 + near)
        low, high = self.rows[i - 1], self.rows[i]
        share = (rows - low) / (high - low)
        return self.scale * (self.shape[low] * (1 - share) + self.shape[high] * share)


_curves: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def curve_of(model: Any) -> CostCurve:
    """The model's curve: kept as long as the model lives, for its present dtype and device."""
    try:
        curves = _curves.setdefault(model, {})
    except TypeError:  # something that cannot be a key
        return CostCurve()
    return curves.setdefault((model.dtype, model.device, getattr(model, "packed", None) is not None), CostCurve())


def calibrate(model: Any, cache: Any, curve: CostCurve, to_come: float = math.inf) -> None:
    """Measure a few widths that are not known yet on the live cache, which is left as it was: for 0.4 seconds at most,
    and for a twentieth of the time that `to_come` plain steps would take. The next text measures the rest.

    The junk rows see the past and themselves (any mask would do): `cache.keep` then drops them.
    """
    base, began = cache.length, time.perf_counter()
    for rows in (1, 9, 17, 5, 13, 33, 25, 65, 49):
        spent = time.perf_counter() - began
        if (
            rows in curve.shape
            or rows > cache.capacity - base
            or (curve.rows and spent > min(0.4, to_come * curve(1) / 20))
        ):
            continue
        times = []
        for _ in range(3):
            positions = [min(base, model.n_ctx - 1)] * rows
            mask = torch.ones(rows, base + rows, dtype=torch.bool)
            mask[:, base:] = torch.eye(rows, dtype=torch.bool)
            started = time.perf_counter()
            with torch.no_grad():
                logits = model([0] * rows, positions, mask if rows > 1 else None, cache)
            logits[-1, 0].item()  # a GPU is waited for
            times.append(time.perf_counter() - started)
            cache.keep(base, [])
        curve.seen.add(rows)
        curve.learn(rows, min(times))


class Fixed:
    """Always the same number of nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def prepare(self, model: Any, cache: Any, to_come: int) -> None:
        pass

    def ask(self) -> int:
        return self.nodes

    def cut(self, draft: DraftTree) -> DraftTree:
        return draft

    def learn(self, draft: DraftTree, accepted: Sequence[int], tokens: int, seconds: Sequence[float]) -> None:
        pass


class Auto:
    """The rule above.

    prepare  measures the machine after the prefill, as far as nobody did before and if the text may become long
    ask      how many nodes the drafter should make now: a size more than paid last time; none while it rests
    cut      the best beginning of a draft (nodes in order of probability, as best-first drafts are)
    learn    what a step took and brought: seconds for draft, forward and the rest

    Estimates are corrected by what was accepted so far. Drafts without probabilities get some by their nodes' numbers:
    how often the first node was accepted, the second, ...

    When a draft does not pay, drafting rests for one step, then three, seven ... up to 32, so that a text that cannot
    be guessed costs nearly nothing; the first draft that pays ends the rest.
    """

    LONG = 48  # new tokens to come, at least, for which it pays to measure the machine first
    LONGEST_REST = 32

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.tokens, self.seconds = 0.0, 0.0  # of the recent past, fading by a twentieth each step
        self.expected, self.accepted = 3.0, 3.0  # sums of estimates and of accepted nodes, fading by a fiftieth
        self.drafting = 0.0  # seconds that it takes to draft
        self.drafted = False  # in this step
        self.last = 16  # nodes that paid last
        self.rest = self.pause = 0  # steps left to rest; the latest rest, 0 after a draft that paid
        self.taken = [1.0] * MOST  # by a node's number: how often it was accepted
        self.tried = [4.0 + n for n in range(MOST)]  # and verified; it starts with a guess

    def prepare(self, model: Any, cache: Any, to_come: int) -> None:
        if to_come >= self.LONG:
            calibrate(model, cache, self.curve, to_come)

    def ask(self) -> int:
        if self.rest:
            self.rest -= 1
            return 0
        return SIZES[min(bisect_right(SIZES, self.last), len(SIZES) - 1)]

    def probabilities(self, draft: DraftTree) -> Sequence[float]:
        return draft.probs or [taken / tried for taken, tried in zip(self.taken, self.tried)]

    def cut(self, draft: DraftTree) -> DraftTree:
        if not draft:
            return draft
        rate = self.tokens / self.seconds if self.seconds else 1 / max(self.curve(1), 1e-9)
        honest = self.accepted / self.expected
        plain = best_gain = -rate * self.curve(1)  # the 1 in all gains is left out
        best, expected = 0, [0.0, *itertools.accumulate(self.probabilities(draft)[: len(draft)])]
        for n in (*SIZES[: bisect_left(SIZES, len(draft))], len(draft)):
            gain = expected[n] * honest - rate * self.curve(n + 1)
            if gain > best_gain:
                best, best_gain = n, gain
        if best_gain - plain <= rate * self.drafting:
            self.rest = self.pause = min(2 * self.pause + 1, self.LONGEST_REST)
        else:
            self.pause = 0
        self.last, self.drafted = best, True
        return draft.trim(len(draft), best)

    def learn(self, draft: DraftTree, accepted: Sequence[int], tokens: int, seconds: Sequence[float]) -> None:
        self.curve.learn(len(draft) + 1, seconds[1])
        self.tokens = 0.95 * self.tokens + tokens
        self.seconds = 0.95 * self.seconds + sum(seconds)
        if self.drafted:
            self.drafting += 0.1 * (seconds[0] - self.drafting)
            self.drafted = False
        if draft:
            self.expected = 0.98 * self.expected + sum(self.probabilities(draft)[: len(draft)])
            self.accepted = 0.98 * self.accepted + len(accepted)
            for node in range(len(draft)):
                self.tried[node] += 1
            for node in accepted:
                self.taken[node] += 1
