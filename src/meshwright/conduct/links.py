"""Which link between two nodes is slow, from what members measure of their streams: pure but for
the memory of the last reports.

A stream's figures leave out what its reader is late with (`train/fabric/figures.py`), so a slow
chip does not show in them; and of all members of two nodes the best count, since a link holds all
of them up and a chip but one. A link is compared with the other links of the run, or, where there
are fewer than two others, with the best that it has been itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

REPORTS = 4  # of one stream that must agree; single bad moments do not count
_LEAST_TIMES = 3.0  # slower than others of its like; networks of one rack differ by less
_LEAST_TIMES_OWN = 5.0  # than it was itself: a busy machine changes as much
_LEAST_EXCESS_S = 1e-3  # a message; what is less is not worth a word

Ends = tuple[int, int]  # nodes, from and to


@dataclass(frozen=True)
class SlowLink:
    """A link between two nodes that takes `times` as long as its like, for `what`."""

    nodes: Ends
    times: float
    what: str

    def __str__(self) -> str:
        a, b = self.nodes
        return f"the link of nodes {a} and {b} is {self.times:.1f} times slower for {self.what}"


@dataclass(frozen=True)
class LostPath:
    """The members of a node reach those of another by another address: `host` is silent."""

    nodes: Ends
    host: str
    instead: str

    def __str__(self) -> str:
        a, b = self.nodes
        return f"node {a} reaches node {b} by {self.instead}: {self.host} does not answer"


@dataclass
class _Stream:
    """The last reports of one stream: seconds for a small message, and for a byte of large ones."""

    small_s: deque[float] = field(default_factory=lambda: deque(maxlen=REPORTS))
    byte_s: deque[float] = field(default_factory=lambda: deque(maxlen=REPORTS))

    def usual(self, what: str) -> float | None:
        """The median, once there is enough to tell."""
        seen = self.small_s if what == _SMALL else self.byte_s
        return median(seen) if len(seen) == REPORTS else None


_SMALL, _LARGE = "small messages", "large messages"


@dataclass
class LinkLog:
    """What was told of all streams between nodes."""

    _streams: dict[Ends, dict[Ends, _Stream]] = field(default_factory=dict)
    _best: dict[tuple[Ends, str], float] = field(default_factory=dict)
    _lost: set[frozenset[int]] = field(default_factory=set)  # nodes whose lost path was told of
    _silent: dict[Ends, list[str]] = field(
        default_factory=dict
    )  # by members, until another answers
    _cut: dict[Ends, set[Ends]] = field(default_factory=dict)  # by nodes, the members

    def see(
        self, member: int, peers: Sequence[Mapping[str, Any]], node_of: Mapping[int, int]
    ) -> None:
        """Take in a LINK event of `member`; what it says of peers of unknown nodes is dropped."""
        for told in peers:
            ends = member, told["peer"]
            if not all(end in node_of for end in ends):
                continue
            nodes = node_of[member], node_of[told["peer"]]
            cut = self._cut.setdefault(nodes, set())
            (cut.add if told["cut"] else cut.discard)(ends)
            stream = self._streams.setdefault(nodes, {}).setdefault(ends, _Stream())
            if told["small_s"]:
                stream.small_s.append(told["small_s"])
            if told["bytes_per_s"]:
                stream.byte_s.append(1.0 / told["bytes_per_s"])
            for what in (_SMALL, _LARGE):
                if (time_s := self._time_s(nodes, what)) is not None:
                    self._best[nodes, what] = min(time_s, self._best.get((nodes, what), time_s))

    @property
    def known(self) -> bool:
        """Whether any member has streams over a network."""
        return bool(self._streams)

    def lost_paths(
        self, member: int, peers: Sequence[Mapping[str, Any]], node_of: Mapping[int, int]
    ) -> list[LostPath]:
        """Paths that `member` has lost, once another answers; once for each two nodes."""
        found = []
        for told in peers:
            silent = self._silent.setdefault((member, told["peer"]), [])
            silent += told["lost"]
            if not silent or not told["answers"] or told["peer"] not in node_of:
                continue
            nodes = node_of[member], node_of[told["peer"]]
            lost = next((host for host in silent if host != told["host"]), None)
            silent.clear()
            if lost is not None and frozenset(nodes) not in self._lost:
                self._lost.add(frozenset(nodes))
                found.append(LostPath(nodes, lost, told["host"]))
        return found

    def cut(self, living: Sequence[int]) -> frozenset[Ends]:
        """Nodes of which members that live do not reach each other by any path, each two once."""
        there = set(living)
        return frozenset(
            (min(nodes), max(nodes))
            for nodes, streams in self._cut.items()
            if any(there.issuperset(ends) for ends in streams)
        )

    def slow(self) -> tuple[SlowLink, ...]:
        """The links that are slow now, each two nodes once, at their slowest."""
        found: dict[Ends, SlowLink] = {}
        for what in (_SMALL, _LARGE):
            known = {nodes: self._time_s(nodes, what) for nodes in self._streams}
            times = {nodes: time_s for nodes, time_s in known.items() if time_s is not None}
            for nodes, time_s in times.items():
                others = [time for key, time in times.items() if set(key) != set(nodes)]
                ratio = self._ratio(nodes, what, time_s, others)
                ends = min(nodes), max(nodes)
                if ratio is not None and (ends not in found or found[ends].times < ratio):
                    found[ends] = SlowLink(ends, ratio, what)
        return tuple(found[ends] for ends in sorted(found))

    def _time_s(self, nodes: Ends, what: str) -> float | None:
        """How long the best stream between two nodes takes."""
        usual = (stream.usual(what) for stream in self._streams[nodes].values())
        return min((time_s for time_s in usual if time_s is not None), default=None)

    def _ratio(
        self, nodes: Ends, what: str, time_s: float, others: Sequence[float]
    ) -> float | None:
        like_s, least = self._best[nodes, what], _LEAST_TIMES_OWN
        if len(others) >= 2 * _OTHER_LINKS:
            like_s, least = median(others), _LEAST_TIMES
        excess_s = (time_s - like_s) * (1 if what == _SMALL else _LARGE_BYTES)
        return time_s / like_s if time_s > least * like_s and excess_s > _LEAST_EXCESS_S else None


_OTHER_LINKS = 2  # each has two directions
_LARGE_BYTES = 1 << 20
