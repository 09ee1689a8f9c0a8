"""The conductor of one run: starts the workers, keeps what they say, and ends the run.

It never imports the trainer: it knows its entry point by name, and what it says by
`base/events.py`.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from meshwright.base.errors import RunError
from meshwright.base.events import Kind
from meshwright.conduct.decide import (
    Event,
    Patience,
    Phase,
    State,
    StopAsked,
    Tick,
    decide,
    first_cause,
)
from meshwright.conduct.protocol import Exit, Message, log_path, signal_name
from meshwright.conduct.rundir import RunDir

_log = logging.getLogger(__name__)

_POLL_S = 0.1  # how long a request to stop may go unseen
_LOG_TAIL_BYTES = 1 << 13
_LAST_LINE_CHARS = 300
_UNSAVED = "stopped before its state was saved; --resume goes on from the last checkpoint"
_OWN_KINDS = {Kind.RUN_STARTED, Kind.RANK_LOST, Kind.RUN_FINISHED, Kind.RUN_FAILED}


class Status(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    `step` is the step that was saved for an interrupted run, else the last one with metrics, else
    the one it was resumed from, else 0. `error` is one line: why a run failed, or what an
    interrupted one lost; None for the good ends.
    """

    status: Status
    step: int
    wall_s: float
    error: str | None


class Engine(Protocol):
    """What starts workers; `local.LocalEngine` says what each of these does."""

    def wait_warm(self, timeout_s: float) -> bool: ...
    def launch(
        self, entry: str, world: int, log_dir: Path, args: Mapping[str, Any]
    ) -> tuple[int, ...]: ...
    def stop(self, number: signal.Signals) -> None: ...
    def poll(self, timeout_s: float) -> list[Message | Exit]: ...


def run(
    engine: Engine,
    rundir: RunDir,
    entry: str,
    world: int,
    args: Mapping[str, Any],
    on_event: Callable[[Message], None],
    stop_requests: Callable[[], int],
    *,
    started: Mapping[str, Any] | None = None,
    patience: Patience | None = None,
) -> Outcome:
    """Run `entry` ("module:function") on `world` workers to the end; blocks until it is reached.

    `on_event` gets each message: events as stored, METRICS and PROGRESS as they came.
    `stop_requests` says how often the user has asked to stop so far (see `signals.StopSignals`):
    at the first the workers get SIGTERM, to save and end; at the second they are killed.
    `started` goes into RUN_STARTED: `layout`, and `resumed_from` (a step, or None).
    A rank that dies ends the run: the outcome names it, and no worker is left.
    Raises RunError if the run directory cannot be written.
    """
    conductor = _Conductor(
        engine=engine,
        rundir=rundir,
        world=world,
        on_event=on_event,
        stop_requests=stop_requests,
        state=State(frozenset(range(world)), patience=patience or Patience()),
        step=(started or {}).get("resumed_from") or 0,
    )
    try:
        conductor.store({"kind": Kind.RUN_STARTED, "world": world, **(started or {})})
        try:
            conductor.follow(entry, args)
        except RunError as error:  # the launcher is lost, or refuses
            engine.stop(signal.SIGKILL)
            return conductor.conclude(Status.FAILED, str(error))
        return conductor.judge()
    except BaseException:
        engine.stop(signal.SIGKILL)
        raise


@dataclass
class _Conductor:
    """The effects around `decide`."""

    engine: Engine
    rundir: RunDir
    world: int
    on_event: Callable[[Message], None]
    stop_requests: Callable[[], int]
    state: State
    step: int
    begun_s: float = field(default_factory=time.monotonic)
    asked: int = 0
    saved_step: int | None = None
    unsaved: set[int] = field(default_factory=set)
    step_of_rank: dict[int, int] = field(default_factory=dict)
    log_start_bytes: dict[int, int] = field(default_factory=dict)

    def follow(self, entry: str, args: Mapping[str, Any]) -> None:
        """Launch, and act on all that happens until the run is over."""
        while not self.engine.wait_warm(_POLL_S):
            if self.stop_requests():
                return
        for rank in range(self.world):
            log = log_path(self.rundir.logs, rank)
            self.log_start_bytes[rank] = log.stat().st_size if log.exists() else 0
        self.engine.launch(entry, self.world, self.rundir.logs, args)
        while self.state.phase is not Phase.OVER:
            for heard in self.engine.poll(_POLL_S):
                if isinstance(heard, Exit):
                    self._apply(heard)
                else:
                    self._hear(heard)
            for _ in range(self.stop_requests() - self.asked):
                self.asked += 1
                self._apply(StopAsked())
            self._apply(Tick())

    def _apply(self, event: Event) -> None:
        self.state, action = decide(self.state, event, time.monotonic())
        if action is not None:
            self.engine.stop(action.value)

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind in _OWN_KINDS:
            _log.warning("rank %s may not say %s: dropped", message["rank"], kind)
        elif kind == Kind.RUN_INTERRUPTED:  # every rank may say so; told once, at the end
            self.saved_step = message["step"]
        elif kind == Kind.PROGRESS:
            self.step_of_rank[message["rank"]] = message["step"]
            self.on_event(message)
        elif kind == Kind.METRICS:
            self.step = message["step"]
            self.rundir.append_metrics(message)
            self.on_event(message)
        elif kind == Kind.CHECKPOINT_FAILED:  # where a disk is full, every rank says so
            if message["step"] not in self.unsaved:
                self.unsaved.add(message["step"])
                self.store(message)
        else:
            self.store(message)

    def store(self, message: Mapping[str, Any]) -> None:
        """Append an event, and show it."""
        self.on_event(self.rundir.append_event(message))

    def judge(self) -> Outcome:
        """How the run ended, after it is over."""
        cause = first_cause(self.state.deaths)
        # A rank that our own SIGTERM found before it could handle it has not failed.
        stopped = self.state.stop_asked and cause is not None and cause.signal == signal.SIGTERM
        if cause is not None and not stopped:
            return self._lose(cause)
        if self.saved_step is not None:
            self.step = self.saved_step
            return self.conclude(Status.INTERRUPTED, None)
        if len(self.state.returned) == self.world:
            return self.conclude(Status.FINISHED, None)
        return self.conclude(Status.INTERRUPTED, _UNSAVED)

    def _lose(self, death: Exit) -> Outcome:
        log = log_path(self.rundir.logs, death.rank)
        step = self.step_of_rank.get(death.rank)
        lost = {"kind": Kind.RANK_LOST, "rank": death.rank, "step": step, "pid": death.pid}
        name = None if death.signal is None else signal_name(death.signal)
        self.store({**lost, "signal": name, "exit_code": death.code, "log": str(log)})
        said = last_line(log, self.log_start_bytes[death.rank])
        return self.conclude(Status.FAILED, describe(death, step, said, log))

    def conclude(self, status: Status, error: str | None) -> Outcome:
        """Write the last event of this incarnation."""
        outcome = Outcome(status, self.step, time.monotonic() - self.begun_s, error)
        kind = Kind(f"run_{status}")
        self.store({"kind": kind, "step": self.step, "wall_s": outcome.wall_s, "error": error})
        return outcome


def describe(death: Exit, step: int | None, last_line: str, log: Path) -> str:
    """One line that names rank, step, signal or exit code, and log of a rank that is lost."""
    when = "before its first step" if step is None else f"at step {step}"
    if death.signal is not None:
        what = f"died {when} by {signal_name(death.signal)} (pid {death.pid})"
    elif death.code == 0:
        what = f"left {when} with exit code 0, its work undone"
    else:
        what = (
            f"failed {when} with exit code {death.code}: {_plain(last_line) or 'it wrote nothing'}"
        )
    return f"rank {death.rank} {what}; log: {log}"


def _plain(line: str) -> str:
    """Our own errors speak for themselves, without the path of their class."""
    return re.sub(r"^meshwright\.base\.errors\.\w+: ", "", line)


def last_line(log: Path, start_bytes: int) -> str:
    """The last line with anything on it that was written after `start_bytes`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start_bytes, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:_LAST_LINE_CHARS] if lines else ""
