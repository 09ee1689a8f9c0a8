"""How many frames of a session have arrived: the receiving end of `lasting.py`."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

from meshwright.train.fabric.frames import ARRIVED_BYTES, Greeting, pack_arrived

_NO_SIGNAL = socket.MSG_NOSIGNAL


@dataclass
class Tally:
    """The frames of one session that are complete, over all of its streams; `came_ns` is the Unix
    time at which the last bytes had come, 0 if the kernel does not say."""

    session: int
    attempt: int
    frames: int = 0
    came_ns: int = 0
    _told: int = -1  # on the present stream
    _unsent: bytes = b""

    def tell(self, stream: socket.socket) -> None:
        """Tell the sender how many have come, if there are more than it was told of."""
        if self._told == self.frames and not self._unsent:
            return
        if self._told != self.frames and len(self._unsent) < ARRIVED_BYTES:
            self._told = self.frames
            held_ns = time.time_ns() - self.came_ns if self.came_ns else 0
            self._unsent += pack_arrived(self.frames, max(0, held_ns))
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

    _of: dict[int, Tally] = field(default_factory=dict)

    def resume(self, greeting: Greeting) -> Tally | None:
        """That of a session which goes on over a new stream; None for a stream that its sender had
        left before the one that is known: numbers only rise."""
        member, session, attempt = greeting
        tally = self._of.get(member)
        if tally is not None and (session, attempt) <= (tally.session, tally.attempt):
            return None
        if tally is None or tally.session != session:
            tally = self._of[member] = Tally(session, attempt)
        else:
            tally.go_on(attempt)
        return tally
