"""Which nodes reach each other: agents try, once members say that a link is cut.

Members tell of streams that they use, and not at the same time, so what they say does not show on
which side of the cut the fault is.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

TRY_S = 0.5  # as long as members take to give up a path
ANSWER_S = 1.0  # for the agents' answers

Place = tuple[str, int]


@dataclass(frozen=True)
class Probe:
    """Have the agents of `nodes` try to reach each other; `asked_s` tells answers apart."""

    asked_s: float
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """The agent of `node` has tried: no address of the nodes `missing` answers."""

    node: int
    asked_s: float
    missing: frozenset[int]


def unreached(reached: Mapping[int, frozenset[int]]) -> frozenset[tuple[int, int]]:
    """By what each node does not reach, the nodes of which one does not reach the other."""
    return frozenset(
        (min(node, other), max(node, other)) for node, others in reached.items() for other in others
    )


def network_places(addresses: Sequence[str]) -> list[Place]:
    """Host and port of each address on a network."""
    found = (address.split(":", 1) for address in addresses)
    places = (rest.rpartition(":") for kind, rest in found if kind == "tcp")
    return [(host, int(port)) for host, _, port in places]


class Tries:
    """Attempts to reach other nodes, begun at once; `places` are the addresses of each. An address
    that refuses is reached: the machine has answered. Nodes in `severed` are out of reach."""

    def __init__(
        self,
        asked_s: float,
        places: Mapping[int, Sequence[Place]],
        now_s: float,
        severed: Collection[int] = (),
    ) -> None:
        self.asked_s = asked_s
        self._until_s = now_s + TRY_S
        self._missing = {node for node, of in places.items() if of or node in severed}
        self._trying: dict[socket.socket, int] = {}
        for node in places.keys() - set(severed):
            for place in places[node]:
                self._begin(node, place)

    def _begin(self, node: int, place: Place) -> None:
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        stream = socket.socket(family, socket.SOCK_STREAM)
        stream.setblocking(False)
        self._trying[stream] = node
        self._judge(stream, stream.connect_ex(place))

    def missing(self, now_s: float) -> frozenset[int] | None:
        """The nodes that were not reached; None as long as some may be."""
        poller = select.poll()
        by_fd = {stream.fileno(): stream for stream in self._trying}
        for fd in by_fd:
            poller.register(fd, select.POLLOUT)
        for fd, _ in poller.poll(0):
            stream = by_fd[fd]
            self._judge(stream, stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        if self._missing & set(self._trying.values()) and now_s < self._until_s:
            return None
        self.close()
        return frozenset(self._missing)

    def _judge(self, stream: socket.socket, error: int) -> None:
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return
        if error in (0, errno.ECONNREFUSED):
            self._missing.discard(self._trying[stream])
        del self._trying[stream]
        stream.close()

    def close(self) -> None:
        """Leave off."""
        for stream in self._trying:
            stream.close()
        self._trying.clear()
