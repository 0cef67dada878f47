"""What caches cost: every move counted, and told in a line each. `beam.py` keeps one of these for a search.

Step by step: notebook 06, section 3.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Numbers of a whole search; bytes are those of key-value caches.

    forwards, rows           passes through the model, and the tokens in them
    forks, takeovers, frees  of whole caches
    copied                   bytes copied within one memory: by forks, and where `keep` closes gaps
    sent                     bytes handed from one memory to the other, both ways: whole caches, empty slots too. (With
                             a model on the CPU both are the same memory: the moves are made and counted, but no byte
                             travels)
    held, near               bytes allocated now, and those of them on the model's device; 0 when all is over
    peak, peak_near          the most that they ever were
    peak_used                bytes of slots in use, at most
    moves                    what happened since somebody last emptied the list, in words
    """

    forwards: int = 0
    rows: int = 0
    forks: int = 0
    takeovers: int = 0
    frees: int = 0
    copied: int = 0
    sent: int = 0
    held: int = 0
    peak: int = 0
    near: int = 0
    peak_near: int = 0
    peak_used: int = 0
    moves: list[str] = field(default_factory=list)

    def _hold(self, held: int, near: int) -> None:
        self.held, self.near = self.held + held, self.near + near
        self.peak, self.peak_near = max(self.peak, self.held), max(self.peak_near, self.near)

    def forward(self, rows: int, used: int = 0) -> None:
        """A pass over so many rows, after which so many bytes are in use."""
        self.forwards, self.rows, self.peak_used = self.forwards + 1, self.rows + rows, max(self.peak_used, used)
        self.moves.append(f"forward of {rows} row{'s' * (rows > 1)}")

    def opened(self, cache: Any) -> None:
        self._hold(cache.nbytes, cache.nbytes)
        self.moves.append(f"a cache of {cache.capacity} slots, {cache.nbytes:,} bytes")

    def took_over(self, child: int, parent: int) -> None:
        self.takeovers += 1
        self.moves.append(f"beam {child} takes over the cache of {parent}")

    def forked(self, child: int, parent: int, cache: Any, near: bool) -> None:
        self.forks, self.copied = self.forks + 1, self.copied + cache.live_nbytes
        self._hold(cache.nbytes, cache.nbytes * near)
        self.moves.append(f"beam {child} forks the cache of {parent}: {cache.live_nbytes:,} bytes copied")

    def freed(self, name: str, cache: Any, near: bool) -> None:
        self.frees += 1
        self._hold(-cache.nbytes, -cache.nbytes * near)
        self.moves.append(f"{name} freed: {cache.nbytes:,} bytes")

    def moved(self, number: int, cache: Any, near: bool) -> None:
        """Sent to the model's device (`near`) or away from it."""
        self.sent += cache.nbytes
        self._hold(0, cache.nbytes if near else -cache.nbytes)
        self.moves.append(f"cache {number} {'to the device' if near else 'to the CPU'}: {cache.nbytes:,} bytes")

    def kept(self, gone: int, shifted: int, cache: Any) -> None:
        self.copied += shifted * (cache.nbytes // cache.capacity)  # bytes of a slot
        self.moves.append(f"{gone} slots given back, {cache.length} kept, {shifted} of them shifted")
