"""The cache of a formula over models (arithmetic.py): several caches that act as one.

Step by step: notebook 07, section 2.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

TOKENS = ("tokens",)  # the key of the part that remembers token ids


class SlotText:
    """The token and the position of each slot: a cache that remembers the text, for classifiers."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.slots, self.nbytes = capacity, [], 0  # slots: (position, token)

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def live_nbytes(self) -> int:
        return 0

    def truncate(self, length: int) -> None:
        del self.slots[length:]

    def keep(self, start: int, slots: Sequence[int]) -> None:
        self.slots = self.slots[:start] + [self.slots[int(slot)] for slot in slots]

    def fork(self) -> "SlotText":
        other = SlotText(self.capacity)
        other.slots = list(self.slots)
        return other

    def to(self, device: torch.device | str) -> "SlotText":
        return self

    def text(self, seen: Tensor) -> list[int]:
        """The tokens in the slots where `seen`, (slots,) bool, is True: in the order of their positions."""
        return [token for _, token in sorted(self.slots[slot] for slot in seen.nonzero()[:, 0].tolist())]


class FormulaCache:
    """One cache for each distinct (model, prompt) of a formula, acted on together; its face is that of a KVCache.

    `parts[key]` holds `offsets[key]` slots of the term's own prompt, then those of the user's text. Lengths and slots
    out here count the user's text only:

        M's cache      Write  for  children  .  | Once  upon  a        offset 4
        N's cache      Write  for  lawyers   .  | Once  upon  a        offset 4; a term without a prompt has 0
        out here                                  slot 0   1   2       length 3
    """

    def __init__(self, parts: dict[tuple, Any], offsets: dict[tuple, int]) -> None:
        self.parts, self.offsets = parts, offsets

    def _each(self) -> Iterator[tuple[Any, int]]:
        return ((part, self.offsets[key]) for key, part in self.parts.items())

    @property
    def length(self) -> int:
        return min(part.length - offset for part, offset in self._each())

    @property
    def capacity(self) -> int:
        return min(part.capacity - offset for part, offset in self._each())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def live_nbytes(self) -> int:
        return sum(part.live_nbytes for part in self.parts.values())

    def truncate(self, length: int) -> None:
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        for part, offset in self._each():
            part.truncate(offset + length)

    def keep(self, start: int, slots: Sequence[int] | Tensor) -> None:
        index = [int(slot) for slot in slots]
        inside = isinstance(start, int) and 0 <= start <= self.length
        if not inside or any(not 0 <= slot < self.length for slot in index) or start + len(index) > self.capacity:
            raise ValueError(f"keep({start}, {index}) does not fit a cache of {self.length} slots, of {self.capacity}")
        for part, offset in self._each():
            part.keep(offset + start, [offset + slot for slot in index])

    def fork(self) -> "FormulaCache":
        return FormulaCache({key: part.fork() for key, part in self.parts.items()}, self.offsets)

    def to(self, device: torch.device | str) -> "FormulaCache":
        for part in self.parts.values():
            part.to(device)
        return self
