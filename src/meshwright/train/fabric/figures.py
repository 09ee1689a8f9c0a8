"""What a sender measures of the path to one peer, apart from what the peer is late with."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

_SMALL_BYTES = 1 << 12  # what takes as long as the way is
LARGE_BYTES = 1 << 15  # what takes as long as the way is narrow
_MOST_RATES = 256


@dataclass
class Figures:
    """Since they were last told.

    Of frames that are acknowledged together one counts, a large one if there is any. The path was
    at work on it from when it was sent, or what was acknowledged before had arrived, until it had
    come to the kernel of the peer: however late it is read there, or its acknowledgement here, does
    not count.
    """

    _frames: int = 0
    _bytes: int = 0
    _small_s: float | None = None
    _rates: list[float] = field(default_factory=list)
    _lost: list[str] = field(default_factory=list)
    _free_ns: int = 0
    _unwilling_s: float = 0.0

    def count(self, frames: int, n_bytes: int) -> None:
        """So many have arrived."""
        self._frames += frames
        self._bytes += n_bytes

    def note_small(self, n_bytes: int, begun_ns: int, came_ns: int) -> None:
        """The last of them, in Unix times, where none is large."""
        busy_s = self._busy_s(begun_ns, came_ns)
        if n_bytes <= _SMALL_BYTES and busy_s > 0:
            self._small_s = busy_s if self._small_s is None else min(busy_s, self._small_s)

    def note_large(self, n_bytes: int, begun_ns: int, came_ns: int, unwilling_s: float) -> None:
        """The last large one of them. `unwilling_s` is how long the peer has had no room so far."""
        waited_s, self._unwilling_s = unwilling_s - self._unwilling_s, unwilling_s
        busy_s = self._busy_s(begun_ns, came_ns) - max(0.0, waited_s)
        if busy_s > 0 and len(self._rates) < _MOST_RATES:
            self._rates.append(n_bytes / busy_s)

    def _busy_s(self, begun_ns: int, came_ns: int) -> float:
        since_ns, self._free_ns = max(begun_ns, self._free_ns), came_ns
        return (came_ns - since_ns) / 1e9

    def lose(self, host: str) -> None:
        """The peer is not reached by its address `host` any more."""
        if host not in self._lost:
            self._lost.append(host)
        self._unwilling_s = 0.0  # of the next stream

    def take(self) -> dict[str, Any]:
        """All of it, in bytes and seconds; what is seen from now on is told the next time."""
        told = {
            "frames": self._frames,
            "bytes": self._bytes,
            "small_s": self._small_s,
            "bytes_per_s": median(self._rates) if self._rates else None,
            "lost": self._lost,
        }
        self._frames = self._bytes = 0
        self._small_s, self._rates, self._lost = None, [], []
        return told
