"""From logits to a token: greedy, or sampling with keyed noise.

A *picker* decides one token. It is a pure function: the same logits, position, context and seed give the same token,
whoever asks and however often. That is the whole reason why lookahead is lossless here, so it is worth a look.

Sampling usually draws from a random generator that moves on with every draw. A decoder that verifies several drafted
tokens at once draws in another order, or another number of times, and writes another text. Here randomness has an
address instead. To sample from probabilities p, add to log p(t) an independent Gumbel noise g(t) and take the largest
(the "Gumbel-max trick"; Gumbel 1954, Maddison et al. 2014, arXiv 1411.0030):

    argmax_t  log p(t) + g(t)      is distributed as p,       g(t) = -log(-log u(t)),   u(t) uniform in (0, 1)

(logits will do for log p: they differ from it by one number, the same for all tokens)

and u(t) is computed from (seed, position, t) by an integer hash. A tiny example, three tokens, position 7, seed 0:

    token              a       b       c
    p                 0.1     0.7     0.2
    log p           -2.303  -0.357  -1.609
    g(0, 7, .)      +1.214  -1.100  +0.035      always these, for this seed and this position
    sum             -1.088  -1.457  -1.575      -> a, in plain decoding and at any node of a draft tree at position 7

(the least probable token wins here, as it does for one seed in ten).

Across seeds and positions the noise is independent, so texts are distributed as they should be; for one seed, the text
is decided before any draft is seen. Drafts only change how many forward passes it takes to find out.
(Drafter-invariance: Daliri, Musco, Suresh 2024, arXiv 2408.07978.)

Step by step: notebook 04, section 2.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Picker(Protocol):
    """What a decoder asks for: `pick`. `context` holds the ids of all tokens before the picked one, `position` is its
    number, counted from 0 at the start of the prompt.

    `process` and `noise` lay open what goes into a pick, for drafters that want to foresee it.
    """

    def pick(self, logits: Tensor, position: int, context: Sequence[int]) -> int:
        """The token that follows `context`, given (vocab_size,) logits."""

    def process(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The (vocab_size,) scores whose softmax is sampled; tokens that are ruled out have -inf."""

    def noise(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor | None:
        """The (vocab_size,) noise added at `position`, or None."""


Processor = Callable[[Tensor, Sequence[int]], Tensor]  # (vocab_size,) scores and the tokens before -> scores


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Greedy:
    """The most probable token; the first of equals.

    repetition_penalty  what stands in the context already is made less probable: its logit is divided by this if
                        positive, multiplied if negative (Keskar et al. 2019, arXiv 1909.05858). 1 is off, below 1
                        invites repetition. The prompt counts, as it does in transformers.
    processors          functions of your own, (logits, context) -> logits, applied in turn after the penalty. They must
                        be pure: the same arguments, the same result, of the same shape (or `pick` raises ValueError).

    Both depend on the context, and in a draft tree every node has its own: the decoder's walk hands over the text up to
    the very node it stands on, so what they forbid is forbidden at the same places as in plain decoding.

    Raises ValueError for a penalty that is not a positive number.
    """

    def __init__(self, repetition_penalty: float = 1.0, processors: Iterable[Processor] = ()) -> None:
        if not (is_number(repetition_penalty) and repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be a positive number, 1 for none, not {repetition_penalty}")
        self.repetition_penalty, self.processors = repetition_penalty, tuple(processors)

    def pick(self, logits: Tensor, position: int, context: Sequence[int]) -> int:
        return int(self.process(logits, context).argmax())

    def process(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(context)), device=logits.device)
            scores = logits[seen]
            scores = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            logits = logits.index_copy(0, seen, scores)
        if self.processors:
            logits = logits.clone()  # one that writes into its argument must not change what others read
        for processor in self.processors:
            processed = processor(logits, context)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                made = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                raise ValueError(f"a processor made {made} of logits of {tuple(logits.shape)}")
            logits = processed
        return logits

    def noise(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor | None:
        return None


class Sampler(Greedy):
    """Sampling, with the meaning and the order that these have in transformers: penalty and own processors as in
    `Greedy`, then temperature, top_k, top_p, min_p.

    temperature  divides the logits; below 1 sharper, above 1 flatter; at least 0.0001. For 0 use Greedy.
    top_k        keep the k most probable tokens (and those as probable as the k-th); 0 keeps all.
    top_p        keep the smallest set of most probable tokens whose probabilities add up to top_p; 1 keeps all.
    min_p        keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
    seed         any whole number; another seed is another, independent text.

    Raises ValueError for values outside these ranges.
    """

    KEPT = 128  # noise vectors kept: a draft tree asks for the same few positions again and again

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        processors: Iterable[Processor] = (),
    ) -> None:
        super().__init__(repetition_penalty, processors)
        if not (is_number(temperature) and temperature >= 1e-4):
            raise ValueError(f"temperature must be at least 0.0001, not {temperature} (for 0, decode greedily)")
        if not isinstance(top_k, int) or top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 (off) or larger, not {top_k}")
        if not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, not {seed}")
        if not (is_number(top_p) and 0 < top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {top_p}")
        if not (is_number(min_p) and 0 <= min_p <= 1):
            raise ValueError(f"min_p must be 0 (off) to 1, not {min_p}")
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = temperature, top_k, top_p, min_p, seed
        self._noise: dict[tuple, Tensor] = {}

    def sample(self, number: int) -> "Sampler":
        """The same sampler for independent text `number`: with a seed of its own, 0 being this one."""
        other = copy.copy(self)
        other.seed = mix64(self.seed + mix64(number)) if number else self.seed
        other._noise = {}
        return other

    def pick(self, logits: Tensor, position: int, context: Sequence[int]) -> int:
        scores = self.process(logits, context)
        return int((scores + self.noise(position, scores.shape[-1], scores.device)).argmax())

    def process(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        scores = super().process(logits, context) / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k).values[-1]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            # A token goes if it and all less probable ones together weigh at most 1 - top_p; the last one always stays.
            drop = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[-1] = False
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), -torch.inf)
        if self.min_p > 0:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p < self.min_p * p.max(), -torch.inf)
        return scores

    def noise(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
        key = (position, vocab_size, str(device))
        if key not in self._noise:
            if key[2] == "cpu":
                self._noise[key] = gumbel(self.seed, position, vocab_size)
            else:  # drafters look at the copy on the CPU
                self._noise[key] = self.noise(position, vocab_size).to(device)
            if len(self._noise) > self.KEPT:
                del self._noise[next(iter(self._noise))]  # the oldest
        return self._noise[key]


# SplitMix64 (Steele, Lea, Flood 2014): a counter walks in steps of GOLDEN, each value is scrambled into a random
# number. Two different counters give unrelated numbers, which is what "an address for randomness" needs.
GOLDEN, C1, C2, MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1


def mix64(x: int) -> int:
    """SplitMix64's scrambler on a Python integer, modulo 2**64."""
    x &= MASK
    x = (x ^ (x >> 30)) * C1 & MASK
    x = (x ^ (x >> 27)) * C2 & MASK
    return x ^ (x >> 31)


def hash_uniform(seed: int, position: int, count: int) -> Tensor:
    """(count,) float64 numbers in (0, 1), a function of seed, position and index only.

    The stream's start is mixed from seed and position in two rounds: were it seed + position, then seed 1 at position
    4 would repeat seed 0 at position 5.
    """
    start = mix64(mix64(seed + GOLDEN) + (position + 1) * GOLDEN)

    def wrapped(value: int) -> int:  # as torch's signed 64-bit integer, which wraps around in products like C's
        return value - (1 << 64) if value >> 63 else value

    def shift(x: Tensor, bits: int) -> Tensor:  # shift in zeros, though torch's shift repeats the sign
        return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)

    x = torch.arange(1, count + 1).mul_(wrapped(GOLDEN)).add_(wrapped(start))
    x ^= shift(x, 30)  # everything in place: new memory would cost as much as the arithmetic
    x *= wrapped(C1)
    x ^= shift(x, 27)
    x *= wrapped(C2)
    x ^= shift(x, 31)
    return shift(x, 12).double().add_(0.5).div_(1 << 52)  # the upper 52 bits, the middle of each step: never 0 or 1


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """(vocab_size,) float32 Gumbel noise, made on the CPU in float64: every device adds the very same numbers."""
    return hash_uniform(seed, position, vocab_size).log_().neg_().log_().neg_().float()
