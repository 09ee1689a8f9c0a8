"""A network that a drill breaks: for a while nothing goes from some members to others, nor back.

Both sides hold back what they send, so nothing else has to know of it; what was under way when the
break ends arrives late, as after a cable is plugged in again. It is told of as a path that is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.train.fabric.frames import Key
from meshwright.train.fabric.orders import Break
from meshwright.train.fabric.streams import Counted

_LOOK_S = 0.05  # between two looks at whether it is over


@dataclass(frozen=True)
class _Held:
    member: int
    key: Key
    data: memoryview
    op: Counted


class Severed:
    """What `me` does not send. `send` sends a frame after all, `on_change` hears when peers are
    found to be beyond the break, and when it is over."""

    def __init__(
        self,
        me: int,
        send: Callable[[int, Key, memoryview, Counted], object],
        on_change: Callable[[], object],
    ) -> None:
        self._me, self._send, self._on_change = me, send, on_change
        self._break: Break | None = None
        self._until_s = 0.0
        self._held: list[_Held] = []
        self._cut: set[int] = set()  # peers that something was to be sent to
        self._told: set[int] = set()
        self._healed: set[int] = set()  # and that have not been told of since

    def begin(self, found: Break | None) -> None:
        """The network breaks, if it has not by this order."""
        if found is not None and found is not self._break:
            self._break, self._until_s = found, time.monotonic() + found.seconds

    def hold(self, member: int, key: Key, data: memoryview, op: Counted) -> bool:
        """Keep a frame to one that is beyond the break until that is over; whether it is. Its
        operation waits as long."""
        if not self._until_s or self._break is None:
            return False
        inside = self._break.members
        if (member in inside) == (self._me in inside):
            return False
        op.missing += 1
        self._held.append(_Held(member, key, data, op))
        self._cut.add(member)
        return True

    def abandon(self, is_old: Callable[[Key], bool]) -> None:
        """Nobody wants what is old."""
        self._held = [frame for frame in self._held if not is_old(frame.key)]

    @property
    def patience_s(self) -> float | None:
        """How long to wait at most before the next look."""
        return _LOOK_S if self._until_s else None

    def tend(self, now_s: float) -> None:
        """Tell of peers that are beyond the break; end it when it is time."""
        if self._until_s and now_s >= self._until_s:
            self._until_s, held = 0.0, self._held
            self._held, self._healed, self._cut, self._told = [], set(self._cut), set(), set()
            for frame in held:
                self._send(frame.member, frame.key, frame.data, frame.op)
                frame.op.one_done()
            if self._healed:
                self._on_change()
        elif self._cut - self._told:
            self._told |= self._cut
            self._on_change()

    def figures(self) -> dict[int, dict[str, Any]]:
        """As `Lasting.figures`, of each peer that is beyond the break or was until now."""
        none = {"host": "", "frames": 0, "bytes": 0, "small_s": None, "bytes_per_s": None}
        found = {
            peer: {**none, "lost": [], "answers": not cut, "cut": cut}
            for peers, cut in ((self._healed, False), (self._cut, True))
            for peer in peers
        }
        self._healed = set()
        return found
