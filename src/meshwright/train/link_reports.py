"""What a member tells of its streams over a network, now and then."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, Protocol

from meshwright.base.events import Kind
from meshwright.train.fabric.network import Network

_EVERY_S = 0.25
_PEERS_A_LINE = 10  # each takes up to 300 of the 4096 bytes of a line


class _Events(Protocol):
    def emit(self, kind: Kind, **fields: Any) -> None: ...


class LinkReports:
    """Tells nothing of streams that did nothing, or that stay on this machine."""

    def __init__(self, network: Network, events: _Events) -> None:
        self._network, self._events = network, events
        self._told_s = time.monotonic()
        self._cut: set[int] = set()  # peers that could not be reached when last told of

    def begin_step(self) -> None:
        """A step begins: a good moment, unless the last is not long ago."""
        if time.monotonic() - self._told_s >= _EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Tell what was measured since the last time."""
        self._told_s = time.monotonic()
        found = self._network.figures()
        changed = self._cut ^ {peer for peer, told in found.items() if told["cut"]}
        self._cut ^= changed
        peers = iter(
            {"peer": peer, **told}
            for peer, told in found.items()
            if told["frames"] or told["lost"] or peer in changed
        )
        while some := list(islice(peers, _PEERS_A_LINE)):
            self._events.emit(Kind.LINK, peers=some)
