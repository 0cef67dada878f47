"""Exact mode: a model whose logits do not depend, in any bit, on how tokens are grouped into forward passes.

Lookahead picks its tokens from the logits that plain decoding would see, up to rounding: floating-point addition is not
associative, (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1 in float32, and a forward over eight rows adds in another order
than one over a single row. The difference is tiny, but where two tokens are equal to within it, the texts part: of 200
texts of 128 tokens by the bundled "tiny", none did in float32, but 44 in bfloat16, which has between two
and three digits (python bench.py parting --dtype bfloat16).

    model = Exact(GPT.load("tiny", dtype=torch.bfloat16))       # a model like any other; the parameters are shared

With it they never part, because every row does the very sums that it does when it comes alone. What could make a
difference, and what is done about it (the steps of a layer, rows = 16):

    matrix products            kernels are chosen by the shape. So the shape is always the same: a pass has 16 rows, and
                               those that nobody needs are idle. A prompt of 40 tokens is read in 3 passes
    attention                  sums over the keys, in the order of the slots, whose gaps are other rows' tokens. So each
                               row gets a call of its own, over its own path gathered in the order of positions:

                                   slots         0    1    2   3    4     5
                                                the  cat  sat  on  down  the         "the" follows "on"
                                   path of slot 5:  0 1 2 3 5        five keys; alone, "the" would have these five too

    GELU                       torch computes the last few numbers of each thread's share by another formula: row by row
    norms, sums of two         made row by row, or number by number, as they are: nothing to do

One thing is left: the token that comes alone is row 0, in a draft it is row 5, say. Kernels work on blocks of rows, and
a block that is not full may be added up in another order. On the machine where this was written a row's place in
a pass of 16 rows makes no difference; in one of 5 it does (float32, weights not packed, two threads). Nobody promises
either, so an Exact tries it out when it is made: the same token in all places must give the same bits.

Logits are the same as long as machine, number of threads, dtype, packing and the number of rows of a pass are.

The price: a single token pays for the products of 16 rows, and each row's keys are copied once more.

Step by step: notebook 04, section 6.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model import GPT, KVCache, Tokens

TRIES = 4  # tokens tried in all places: each goes through thousands of sums, and one that differs is enough


class ExactCache(KVCache):
    """A KV cache that knows the position of each slot in use."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.positions: list[int] = []

    def truncate(self, length: int) -> None:
        super().truncate(length)
        del self.positions[length:]

    def keep(self, start: int, slots: Tokens) -> None:
        super().keep(start, slots)
        self.positions[start:] = [self.positions[int(slot)] for slot in slots]

    def fork(self) -> "ExactCache":
        other = super().fork()
        other.positions = list(self.positions)
        return other


class Exact:
    """`model` in exact mode: the same forward, new_cache and attributes, the same parameters.

    rows      rows of every pass, the idle ones included
    max_rows  the same number; `decode` drafts one node less, so that a step is one pass

    Move, convert or pack the model first. Raises ValueError if there is not even one row, or if on this machine a row's
    place makes a difference.
    """

    def __init__(self, model: GPT, rows: int = 16) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"exact mode needs a whole number of rows, 1 or more, not {rows!r}")
        self.model, self.max_rows = model, rows
        self.config, self.n_ctx, self.vocab_size = model.config, model.n_ctx, model.vocab_size
        with torch.no_grad():
            for token in range(0, self.vocab_size, -(-self.vocab_size // TRIES)):
                logits = self([token] * rows, [0] * rows, torch.eye(rows, dtype=torch.bool))
                if not torch.equal(logits, logits[:1].expand_as(logits)):
                    raise ValueError(
                        f"on this machine a row's sums depend on its place among {rows} rows ({self.dtype}, "
                        f"{'' if model.packed is not None else 'not '}packed): try 8, 16 or 32 rows"
                    )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    @property
    def packed(self) -> Tensor | None:
        return self.model.packed

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def new_cache(self, capacity: int | None = None) -> ExactCache:
        """An empty cache of `capacity` slots (n_ctx if None)."""
        return ExactCache(self.config, self.n_ctx if capacity is None else capacity, self.device, self.dtype)

    def __call__(
        self,
        tokens: Tokens,
        positions: Tokens | None = None,
        mask: Tensor | None = None,
        cache: ExactCache | None = None,
        rows: Tokens | None = None,
    ) -> Tensor:
        """Arguments and result as those of `GPT.forward`, with these limits: tokens are one flat list; a row sees
        itself and otherwise only rows before it, at smaller positions (as in any text, any tree, and forest.py's
        batch); the cache is one of exact mode. A list longer than `max_rows` is cut into several passes.

        Raises ValueError if arguments do not fit; the cache is then as it was.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.long)
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(
                f"exact mode needs tokens in one flat list of one or more, not shape {tuple(tokens.shape)}"
            )
        q, most = len(tokens), self.max_rows
        if cache is None:
            cache = self.new_cache(q)
        if not isinstance(cache, ExactCache) or len(cache.positions) != cache.length:
            raise ValueError("the cache was not filled in exact mode: use one from the exact model's new_cache()")
        past = cache.length
        positions = range(past, past + q) if positions is None else torch.as_tensor(positions).tolist()
        wanted = range(q) if rows is None else torch.as_tensor(rows, dtype=torch.long).tolist()
        if len(positions) != q:
            raise ValueError(f"{q} tokens, but {len(positions)} positions")
        if not all(0 <= row < q for row in wanted):
            raise ValueError(f"rows must lie in 0 .. {q - 1}, not {list(wanted)}")
        paths = self._paths([*cache.positions, *positions], past, mask)
        found: dict[int, Tensor] = {}
        try:
            for start in range(0, q, most):
                here = [row for row in wanted if start <= row < start + most]
                logits = self.model(
                    padded(tokens[start : start + most], most),
                    padded(positions[start : start + most], most),
                    paths[start : start + most],
                    cache,
                    rows=None if here else [],  # the head is for all rows or for none
                )
                cache.positions += positions[start : start + most]
                found |= {row: logits[row - start] for row in here}
        except BaseException:
            cache.truncate(past)
            raise
        return torch.stack([found[row] for row in wanted]) if wanted else logits[:0]

    def _paths(self, positions: Sequence[int], past: int, mask: Tensor | None) -> list[Tensor]:
        """For each new row, the slots that it sees in the order of their positions, its own at the end."""
        slots, q = len(positions), len(positions) - past
        if mask is None:
            mask = torch.ones(q, slots, dtype=torch.bool).tril(past)
        elif mask.shape != (q, slots):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {(q, slots)}")
        mask, position = mask.cpu(), torch.tensor(positions)
        before = position < position[past:, None]  # (q, slots)
        before[:, past:].tril_(-1)
        own = torch.eye(q, slots, dtype=torch.bool).roll(past, 1)  # new row i is slot past + i
        if not torch.equal(mask & ~before, own):
            raise ValueError("in exact mode a row sees itself and otherwise only rows before it, at smaller positions")
        order = position.argsort(stable=True)
        return [order[seen] for seen in mask[:, order]]


def padded(numbers: Tokens, length: int) -> Tensor:
    """(length,) ids: the numbers and zeros."""
    numbers = torch.as_tensor(numbers, dtype=torch.long)
    return torch.cat([numbers, numbers.new_zeros(length - len(numbers))])
