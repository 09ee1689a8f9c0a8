"""What is written down of a run that survives: once, whoever says it how often."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.muster import Muster
from meshwright.conduct.protocol import Exit, Message, member_log_path, signal_name
from meshwright.conduct.rundir import RunDir

# A member that takes over rank 0 says all since the last checkpoint again.
_ONCE_A_STEP = frozenset(
    {Kind.EVALUATED, Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_FAILED, Kind.STEP_SKIPPED}
)


@dataclass
class Ledger:
    """The run directory, and who watches. `step` is the last with metrics, of this incarnation or
    what it was resumed from."""

    rundir: RunDir
    muster: Muster
    on_event: Callable[[Message], None]
    metrics_step: int
    step: int
    committed_step: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    _said: set[tuple[str, int]] = field(default_factory=set)

    def store(self, message: Mapping[str, Any]) -> None:
        """Append an event, and show it."""
        self.on_event(self.rundir.append_event(message))

    def store_said(self, message: Message) -> None:
        """Append what a member said, unless it has been said."""
        kind = message["kind"]
        if kind in _ONCE_A_STEP:
            if (kind, message["step"]) in self._said:
                return
            self._said.add((kind, message["step"]))
        if kind == Kind.CHECKPOINT_COMMITTED:
            self.committed_step = message["step"]
        self.store(message)

    def measure(self, message: Message) -> None:
        """Append the metrics of a step, unless it has some."""
        if message["step"] > self.metrics_step:
            self.step = self.metrics_step = message["step"]
            self.rundir.append_metrics(message)
            self.on_event(message)

    def record(self, kind: Kind, fields: Mapping[str, Any]) -> None:
        """Append what `takeover.decide` wants written down."""
        said = {"kind": kind, **fields}
        if kind == Kind.RANK_LOST:
            end: Exit | None = said.pop("exit")
            name = signal_name(end.signal) if end and end.signal is not None else None
            code = end.code if end else None
            said |= {"pid": end.pid if end else None, "signal": name, "exit_code": code}
            said["log"] = str(member_log_path(self.rundir.logs, said["member"]))
        elif kind == Kind.RESIZED:
            sizes = {key: said[key] for key in ("before", "after") if isinstance(said[key], int)}
            said |= {key: self.muster.label(size) for key, size in sizes.items()}
        self.store(said)

    def conclude(self, status: Status, error: str | None) -> Outcome:
        """Write the last event of this incarnation."""
        outcome = Outcome(status, self.step, time.monotonic() - self.begun_s, error)
        kind = Kind(f"run_{status}")
        self.store({"kind": kind, "step": self.step, "wall_s": outcome.wall_s, "error": error})
        return outcome
