"""The streams of one member that go over a network, in both directions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from meshwright.train.fabric.frames import Greeting
from meshwright.train.fabric.lasting import Lasting, Loop
from meshwright.train.fabric.severed import Severed
from meshwright.train.fabric.sockets import tcp_places
from meshwright.train.fabric.streams import Incoming
from meshwright.train.fabric.tally import Tallies, Tally

_TEND_S = 0.05  # between two looks at streams on which something is under way


class Network:
    """`hosts` are the member's own addresses; `on_change` hears when a path is lost or found,
    `severed` is what a drill has broken."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        loop: Loop,
        on_change: Callable[[], object],
        severed: Severed,
    ) -> None:
        self.severed = severed
        self._hosts, self._loop, self._on_change = hosts, loop, on_change
        self._streams: dict[int, Lasting] = {}
        self._tallies = Tallies()
        self._incoming: dict[int, Incoming] = {}
        self._tended_s = 0.0

    def open(
        self, member: int, addresses: tuple[str, ...], greet: Callable[[Greeting], bytes], me: int
    ) -> Lasting | None:
        """A stream to `member`, for which `greet` makes the hellos of `me`; None if it has no
        address on a network."""
        places, session = tcp_places(addresses), time.monotonic_ns()  # higher than any before
        if not places:
            return None

        def hello(attempt: int) -> bytes:
            return greet(Greeting(me, session, attempt))

        stream = Lasting(places, self._hosts, hello, self._loop, self._on_change)
        self._streams[member] = stream
        return stream

    def forget(self, member: int) -> None:
        """Its stream, if it has one, is closed."""
        self._streams.pop(member, None)

    def resume(self, greeting: Greeting, stream: Incoming) -> tuple[Tally | None, Incoming | None]:
        """What `streams.Receiver` says, and the stream that the sender has left for this one."""
        tally = self._tallies.resume(greeting)
        if tally is None:
            return None, None
        before = self._incoming.get(greeting.member)
        self._incoming[greeting.member] = stream
        return tally, before if greeting.attempt > 1 else None

    def figures(self) -> dict[int, dict[str, Any]]:
        """What was measured of each stream since the last call, by member."""
        found = {member: stream.figures() for member, stream in self._streams.items()}
        for member, told in self.severed.figures().items():
            found[member] = {**found.get(member, {}), **told}
        return found

    def pending(self, members: Collection[int]) -> bool:
        """Whether frames to any of `members` are under way."""
        return any(self._streams[member].pending for member in self._streams.keys() & set(members))

    def acknowledge(self) -> None:
        """Tell all others at once what has come from them."""
        for member in list(self._tallies.owing):
            self._incoming[member].acknowledge()

    def patience_s(self, timeout_s: float | None) -> float | None:
        """How long to wait at most where one would wait for `timeout_s`."""
        restless = any(stream.restless for stream in self._streams.values())
        limits = (
            timeout_s,
            self.severed.patience_s,
            _TEND_S if restless else None,
            self._tallies.patience_s(),
        )
        return min((limit_s for limit_s in limits if limit_s is not None), default=None)

    def tend(self) -> None:
        """Look after streams that do not get on, if nobody has for a while, and tell others what
        has come from them."""
        for member in self._tallies.overdue():
            self._incoming[member].acknowledge()
        now_s = time.monotonic()
        self.severed.tend(now_s)
        if self._streams and now_s - self._tended_s >= _TEND_S:
            self._tended_s = now_s
            for stream in list(self._streams.values()):
                if stream.restless:
                    stream.tend(now_s)
