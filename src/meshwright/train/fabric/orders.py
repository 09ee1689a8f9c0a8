"""Orders of the agent to a worker: who holds which rank, and when to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fcntl import F_GETFL, F_SETFL, F_SETOWN, fcntl
from functools import cached_property
from typing import Any

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Table:
    """Which member holds which rank, from `epoch` on.

    `addresses` lists for each member where it listens, the best first. The members of the ranks
    `lost` are new in their place and have no state. `resize` has the `layout` of a job that goes
    on with other ranks; None: the ranks are those of the table before. `through`: all go by way of
    a `folder` in memory, which they save to and wait (`saving`), or have begun from, at `step` in
    another `layout`. `shadows` has the member without a rank that shadows each rank, `homes` the
    node of each member.

    Whoever has a place can be written to: ranks, and after them, in order of their numbers, the
    members that shadow.
    """

    epoch: int
    members: Mapping[int, int]
    addresses: Mapping[int, tuple[str, ...]]
    lost: tuple[int, ...] = ()
    resize: Mapping[str, Any] | None = None
    through: Mapping[str, Any] | None = None
    shadows: Mapping[int, int] = field(default_factory=dict)
    homes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, order: Mapping[str, Any]) -> Table:
        """The table of an order; JSON has strings for keys."""
        return cls(
            epoch=order["epoch"],
            members={int(rank): member for rank, member in order["members"].items()},
            addresses={int(m): tuple(found) for m, found in order["addresses"].items()},
            lost=tuple(order.get("lost", ())),
            resize=order.get("resize"),
            through=order.get("through"),
            shadows={int(rank): member for rank, member in order.get("shadows", {}).items()},
            homes={int(member): node for member, node in order.get("homes", {}).items()},
        )

    def rank_of(self, member: int) -> int | None:
        """The rank that `member` holds; None: it is a spare."""
        return next((rank for rank, held_by in self.members.items() if held_by == member), None)

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The member at each place."""
        shadows = sorted(set(self.shadows.values()))
        return {**self.members, **dict(enumerate(shadows, start=len(self.members)))}

    def place_of(self, member: int) -> int | None:
        """The inverse of `places`."""
        return next((place for place, found in self.places.items() if found == member), None)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank; none where they are not known."""
        found = [self.homes.get(self.members[rank]) for rank in range(len(self.members))]
        return () if None in found else tuple(node for node in found if node is not None)


class Interrupted(Exception):  # noqa: N818 (no error: the way out of whatever was waited for)
    """A table of a higher epoch has come; what was under way is void."""

    def __init__(self, table: Table) -> None:
        super().__init__(f"epoch {table.epoch}")
        self.table = table


@dataclass(frozen=True)
class Break:
    """A network that a drill breaks for so many seconds, between `members` and all others."""

    members: frozenset[int]
    seconds: float


@dataclass
class Orders:
    """What the agent has said on the descriptor `fd`, which is made not to block."""

    fd: int
    newest: Table | None = None
    stop: bool = False
    broken: Break | None = None  # the last that was ordered
    _rest: bytes = field(default=b"")

    def __post_init__(self) -> None:
        os.set_blocking(self.fd, False)

    def announce(self) -> None:
        """Have the kernel send this process SIGIO whenever an order comes."""
        fcntl(self.fd, F_SETOWN, os.getpid())
        fcntl(self.fd, F_SETFL, fcntl(self.fd, F_GETFL) | os.O_ASYNC)

    def read(self) -> bool:
        """Take in what has come; whether more may. Of several tables only the newest counts."""
        while True:
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in filter(None, lines):
                self._obey(json.loads(line))

    def _obey(self, order: Mapping[str, Any]) -> None:
        if order["op"] == "stop":
            self.stop = True
        elif order["op"] == "sever":
            self.broken = Break(frozenset(order["members"]), order["seconds"])
        elif order["op"] == "table":
            table = Table.from_json(order)
            if self.newest is None or table.epoch > self.newest.epoch:
                self.newest = table
