"""What a member is at, for everybody who follows that, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from meshwright.base.events import EventWriter, Kind
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.train.agreement import Guard
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.faults import Faults
from meshwright.train.link_reports import LinkReports


@dataclass
class Watch:
    """Follows what the trainer is at: for the agent, for faults, and to hear of a new table."""

    fabric: Fabric
    pulse: PulseWriter | None
    faults: Faults
    links: LinkReports
    step: int = 0
    phase: Phase = Phase.IDLE
    computing: bool = False  # whatever is under way may be cut short anywhere
    guard: Guard | None = None

    def on_order(self, _signal: int, frame: FrameType | None) -> None:
        """There are orders: a long computation need not end first. Raises Interrupted."""
        if self.computing and not _imports(frame):
            self.fabric.hear()

    def shadow(self, step: int, phase: Phase) -> None:
        """A spare is at `phase` of `step`, from 1, for a rank that it shadows."""
        if self.pulse is not None:
            self.pulse.enter(phase)
        self.faults.enter(step, phase)

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, begins."""
        self.step, self.phase, self.computing = step, Phase.DATA, False
        if self.pulse is not None:
            self.pulse.step(self.fabric.epoch, step)
        self.links.begin_step()
        self.faults.enter(step, Phase.DATA)

    def enter(self, phase: Phase) -> None:
        """See `comm.Watch`. Raises Interrupted, but not in the middle of a takeover."""
        self.computing = False
        self._tell(phase)
        self.faults.enter(self.step, phase)
        if phase not in (Phase.TAKEOVER, Phase.OPTIMIZER):
            self.fabric.look()
        if phase is Phase.CHECKPOINT and self.guard is not None:
            self.guard.verify(self.step - 1)
        self.computing = phase in (Phase.FORWARD, Phase.BACKWARD)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A takeover in the midst of a phase, which goes on after it; or else it ends there."""
        phase, computing = self.phase, self.computing
        self.computing = False
        self._tell(Phase.TAKEOVER)
        yield
        self._tell(phase)
        self.computing = computing

    def _tell(self, phase: Phase) -> None:
        self.phase = phase
        if self.pulse is not None:
            self.pulse.enter(phase)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported there, which would be left half made."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@dataclass
class Events:
    """Writes to the agent, in the name of the rank that the member holds; -1 for none."""

    fd: int
    member: int
    fabric: Fabric | None = None

    def emit(self, kind: Kind, **fields: Any) -> None:
        """See `base.events.EventWriter`."""
        rank, epoch = (-1, 0) if self.fabric is None else (self.fabric.rank, self.fabric.epoch)
        named = {"member": self.member, "epoch": epoch, **fields}
        EventWriter(self.fd, rank).emit(kind, **named)
