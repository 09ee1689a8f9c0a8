"""How many frames of a session have arrived: the receiving end of `lasting.py`."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

from meshwright.train.fabric.frames import ARRIVED_BYTES, Greeting, pack_arrived

_NO_SIGNAL = socket.MSG_NOSIGNAL
_AT_ONCE_BYTES = 1 << 16  # the sender keeps them until it is told
_LATER_S = 0.02  # what is less can wait: each word wakes the sender up


@dataclass
class Tally:
    """The frames of one session that are complete, over all of its streams. `owing` has the members
    that are to be told, and since when."""

    member: int
    session: int
    attempt: int
    owing: dict[int, float]
    came_ns: int = 0  # Unix time at which the last bytes had come, 0 if the kernel does not say
    _frames: int = 0
    _bytes: int = 0  # since the sender was told
    _told: int = -1  # on the present stream
    _unsent: bytes = b""

    def add(self, n_bytes: int) -> None:
        """One more is complete."""
        self._frames += 1
        self._bytes += n_bytes

    def may_tell(self, stream: socket.socket) -> None:
        """Tell the sender now if that matters to it, or have it told later."""
        if self._told < 0 or self._bytes >= _AT_ONCE_BYTES:
            self.tell(stream)
        elif self._told != self._frames and self.member not in self.owing:
            self.owing[self.member] = time.monotonic()

    def tell(self, stream: socket.socket) -> None:
        """Tell the sender how many have come."""
        self.owing.pop(self.member, None)
        if len(self._unsent) < ARRIVED_BYTES:
            self._told, self._bytes = self._frames, 0
            held_ns = time.time_ns() - self.came_ns if self.came_ns else 0
            self._unsent += pack_arrived(self._frames, max(0, held_ns))
        # Without room for it, the next one says the same and more; a stream that has ended is
        # seen to end by whoever reads it.
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[stream.send(self._unsent, _NO_SIGNAL) :]

    def go_on(self, attempt: int) -> None:
        """Over another stream, on which nothing was told yet."""
        self.attempt, self._told, self._unsent, self.came_ns = attempt, -1, b"", 0


@dataclass
class Tallies:
    """Of the newest session of each member."""

    owing: dict[int, float] = field(default_factory=dict)
    _of: dict[int, Tally] = field(default_factory=dict)

    def resume(self, greeting: Greeting) -> Tally | None:
        """That of a session which goes on over a new stream; None for a stream that its sender had
        left before the one that is known: numbers only rise."""
        member, session, attempt = greeting
        tally = self._of.get(member)
        if tally is not None and (session, attempt) <= (tally.session, tally.attempt):
            return None
        if tally is None or tally.session != session:
            tally = self._of[member] = Tally(member, session, attempt, self.owing)
        else:
            tally.go_on(attempt)
        return tally

    def overdue(self) -> list[int]:
        """Members that have waited for long enough to be told."""
        if not self.owing:
            return []
        until_s = time.monotonic() - _LATER_S
        return [member for member, since_s in self.owing.items() if since_s <= until_s]

    def patience_s(self) -> float | None:
        """How long nobody has to be told; None: nobody waits."""
        return _LATER_S if self.owing else None
