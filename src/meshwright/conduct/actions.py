"""What the conductor of a run that survives does: all that `takeover.decide` can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.base.events import Kind
from meshwright.conduct.reach import Probe


@dataclass(frozen=True)
class SendTable:
    """Tell every member who holds which rank; `lost` ranks have a member without the state.
    `dp_replicate` is set where the layout changes; `moved` ranks are given away for safety;
    `shadows` has the spare that shadows each rank. `through`: all "save" their state in memory and
    wait, or "load" it in another layout."""

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    dp_replicate: int | None = None
    moved: tuple[int, ...] = ()
    through: Literal["save", "load"] | None = None
    shadows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """SIGKILL to one member."""

    member: int


@dataclass(frozen=True)
class KillAll:
    """SIGKILL to every member."""


@dataclass(frozen=True)
class StopMembers:
    """Ask these members to end."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """Fork a new member."""

    node: int
    member: int


@dataclass(frozen=True)
class Revive:
    """Start an agent for a node again."""

    node: int


@dataclass(frozen=True)
class Record:
    """Write an event down."""

    kind: Kind
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = SendTable | Kill | KillAll | StopMembers | Launch | Revive | Probe | Record
