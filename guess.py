"""What will the beams say next? A cheap model for `beam.py`, and how many of its guesses pay.

The trie (trie.py) knows how earlier outputs went on. During a search there is a better witness: the model itself, at
the places that it was asked about. Beams differ by a word and then say the same,

    ... She has 12 apples .       was read: the model said "She" 0.7, "So" 0.2 after it
    ... She has 15 apples .       same last four tokens: the guess is that it says the same here

so what the model said is kept by the last 1, 2, 3 and 4 tokens of the text, the latest for each. On the bundled model
with 4 beams and 4 nodes drafted per beam that takes forwards per step from 0.51 (trie alone) to 0.45 (the latter:
python bench.py beam --num-beams 4 --strategy "lookahead 4").

Step by step: notebook 06, section 6.
"""

import math
from typing import Any

from torch import Tensor

from budget import CostCurve, curve_of

Continuations = list[tuple[float, int]]  # (log probability, token); the model's: most probable first


def best(logits: Tensor, most: int) -> list[Continuations]:
    """The `most` best continuations of each row of logits, (n, vocab_size). The others need no logarithm."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    values, tokens = logits.topk(min(most, logits.shape[-1]))
    log_probs = values - logits.logsumexp(-1, keepdim=True)
    return [list(zip(*row)) for row in zip(log_probs.tolist(), tokens.tolist())]


class Guess:
    """Log probabilities of what follows a text, by what was seen.

    session  of a drafter that can `guess` (a TokenTrie's), or None. Raises ValueError for another one
    """

    LEVELS = 4  # last tokens of a text that count

    def __init__(self, session: Any) -> None:
        if session is not None and not hasattr(session, "guess"):
            raise ValueError("beams are guessed with a TokenTrie, or without a drafter: this one cannot guess")
        self.session = session
        self.said: dict[tuple[int, ...], Continuations] = {}

    def learn(self, recent: tuple[int, ...], continuations: Continuations) -> None:
        """The model said this after a text that ends with `recent`."""
        for length in range(1, len(recent) + 1):
            self.said[recent[-length:]] = continuations

    def __call__(self, recent: tuple[int, ...]) -> Continuations:
        """Each level that knows something takes half of what the shorter ones, and the trie below them all, gave; the
        first one that knows anything has all. Unordered."""
        shares = {} if self.session is None else self.session.guess(recent)
        for length in range(1, len(recent) + 1):
            said = self.said.get(recent[-length:])
            if said is None:
                break  # then a longer one is not known either
            half = 0.5 if shares else 1.0
            shares = {token: share * half for token, share in shares.items()}
            for log_prob, token in said:
                shares[token] = shares.get(token, 0.0) + math.exp(log_prob) * half
        return [(math.log(share), token) for token, share in shares.items() if share > 1e-6]


class Pace:
    """Nodes drafted per beam: the size with the most steps per second, steps(size) / T(rows).

    STEPS are the steps per forward measured on the bundled model. How far a text is from that is one number, `luck`:
    steps(size) = 1 + luck (STEPS - 1). Without drafts nothing is learned, so luck slowly returns to 1 then and drafting
    is tried again.
    """

    STEPS = {0: 1.0, 2: 1.8, 4: 2.2, 8: 2.8, 16: 3.2, 32: 3.7}  # noqa: RUF012

    def __init__(self, model: Any, num_beams: int) -> None:
        self.curve: CostCurve = curve_of(model)
        self.num_beams = num_beams
        self.size, self.luck, self.length = 4, 1.0, 0

    def choose(self, length: int) -> int:
        """For the forward that is to come now, when the beams have this length."""
        if length:
            self._learn(length - self.length)
        self.length = length
        if self.curve.rows:
            self.size = max(self.STEPS, key=self._rate)
        return self.size

    def _rate(self, size: int) -> float:
        return (1 + self.luck * (self.STEPS[size] - 1)) / self.curve(self.num_beams * (1 + size))

    def _learn(self, steps: int) -> None:
        """So many steps came out of the last forward."""
        if self.size:
            self.luck += 0.1 * ((steps - 1) / (self.STEPS[self.size] - 1) - self.luck)
        else:
            self.luck += 0.02 * (1 - self.luck)
