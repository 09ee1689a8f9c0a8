"""The supervisor of a script that is not ours: starts its ranks, watches them, starts them again.

It decides nothing (`foreign_decide.py`) and judges nothing (`foreign_looks.py`): here are the
effects. What is kept: `events.jsonl`, a log of each rank over all incarnations, and the progress
files that the script may touch.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct import foreign_environment as environment
from meshwright.conduct import foreign_processes as processes
from meshwright.conduct.foreign_decide import (
    Cause,
    Decision,
    Ended,
    Event,
    Reached,
    Result,
    Rules,
    Stage,
    Start,
    StopAsked,
    Stuck,
    Tick,
    Trouble,
    begin,
    decide,
)
from meshwright.conduct.foreign_looks import Look, Watcher, judge
from meshwright.conduct.foreign_spares import Spares
from meshwright.conduct.foreign_words import describe, last_line
from meshwright.conduct.limits import limits
from meshwright.conduct.processes import read_process
from meshwright.conduct.protocol import log_path, signal_name
from meshwright.conduct.rundir import RunDir

_POLL_S = 0.02
_KILLED_S = 2.0  # for a killed rank to be gone; then the kernel holds it
_LENIENCE = 2.5  # a restart of all ranks costs more than giving one to a spare
_RANKS_A_POLL = 50  # with more of them, looks are as much rarer


@dataclass(frozen=True)
class Settings:
    """What to run, and how."""

    command: processes.Command
    rules: Rules
    longest_stall_s: float
    spares: int = 0
    preload: tuple[str, ...] = ()
    jax: bool = False


@dataclass(frozen=True)
class Outcome:
    """How it ended. `error` is one line, None for a good end; `step` the highest that was told."""

    result: Result
    restarts: int
    step: int | None
    error: str | None


def supervise(
    settings: Settings,
    rundir: RunDir,
    stop_requests: Callable[[], int],
    note: Callable[[str], None],
    show: RawIOBase | None = None,
) -> Outcome:
    """Run the script to its end, through as many restarts as the rules allow; blocks.

    `stop_requests` says how often the user has asked to stop. `note` gets a line for each incident.
    What rank 0 writes is copied to `show`, which must not be buffered. No process is left, however
    it ends.
    Raises InputError if the program cannot be run, RunError if the disk does not take an event.
    """
    processes.adopt_orphans()
    supervisor = _Supervisor(settings, rundir, stop_requests, note, show)
    try:
        return supervisor.run()
    finally:
        supervisor.end_all()


@dataclass
class _Supervisor:
    settings: Settings
    rundir: RunDir
    stop_requests: Callable[[], int]
    note: Callable[[str], None]
    show: RawIOBase | None
    begun_s: float = field(default_factory=time.monotonic)
    ours: frozenset[int] = field(default_factory=lambda: frozenset(processes.descendants()))
    ports: environment.Ports = field(default_factory=environment.Ports)
    ranks: dict[int, processes.Child] = field(default_factory=dict)
    deaths: dict[int, tuple[float, int, int]] = field(default_factory=dict)  # ts, pid, code
    watchers: dict[int, Watcher] = field(default_factory=dict)
    old_bytes: dict[int, int] = field(default_factory=dict)  # of the logs, by rank
    shown_bytes: int = 0
    asked: int = 0
    incident_s: float | None = None

    def __post_init__(self) -> None:
        settings, world = self.settings, self.settings.rules.world
        self.common = environment.defaults(os.environ, world)
        self.spares = Spares(
            settings.command, settings.spares, settings.preload, self.common, self.rundir.logs
        )
        self.progress = self.rundir.path / "progress"
        self.progress.mkdir(exist_ok=True)

    def run(self) -> Outcome:
        """Act on what happens until the job is over."""
        self.shown_bytes = self._log_bytes(0)
        self.job, _ = decision = begin(self.settings.rules, time.monotonic())
        self._take(decision)
        while self.job.stage is not Stage.OVER:
            ends = self._await_ends()
            self._reach()
            for rank, code in ends:
                self._apply(Ended(rank, *_split(code)))
            for _ in range(self.stop_requests() - self.asked):
                self.asked += 1
                self._apply(StopAsked())
            self._look()
            self._apply(Tick())
            self._copy()
        return self._conclude()

    def end_all(self) -> None:
        """Kill every process that is left."""
        for child in self.ranks.values():
            child.send(signal.SIGKILL)
        for child in self.ranks.values():
            if child.ends(_KILLED_S):
                child.reap()
        self.spares.end()
        processes.end_orphans(self.ours)
        self.ports.close()

    def _apply(self, event: Event) -> None:
        self._take(decide(self.job, event, time.monotonic()))

    def _take(self, decision: Decision) -> None:
        before, (self.job, actions) = self.job, decision
        known = self.job.cause or len(self.job.causes) > len(before.causes)
        if known and self.incident_s is None:
            self.incident_s = time.monotonic()
        if len(self.job.causes) > len(before.causes):
            self._tell_incident(self.job.causes[-1])
        for action in actions:
            if isinstance(action, Start):
                self._start()
                continue
            for rank in sorted(action.ranks & self.ranks.keys()):
                self.ranks[rank].send(action.number)

    def _await_ends(self) -> list[tuple[int, int]]:
        """The ranks that have ended, and how; waits for the first of them until the next look."""
        poller = select.poll()
        by_fd = {child.pidfd: rank for rank, child in self.ranks.items()}
        for pidfd in by_fd:
            poller.register(pidfd, select.POLLIN)
        ended = poller.poll(1000 * _POLL_S * max(1.0, len(by_fd) / _RANKS_A_POLL))
        return [(by_fd[pidfd], self._bury(by_fd[pidfd])) for pidfd, _ in ended]

    def _bury(self, rank: int) -> int:
        child = self.ranks.pop(rank)
        code = child.reap()
        self.watchers[rank].last_look()
        self.deaths[rank] = time.time(), child.pid, code
        return code

    def _start(self) -> None:
        """A new incarnation; the last one is gone, to its last process."""
        processes.end_orphans({*self.ours, *self.spares.pids})
        self.ports.close()
        self.ports = environment.Ports()
        world, warm = self.settings.rules.world, self.spares.warm()
        self.deaths = {}
        for rank in range(world):
            self._start_rank(rank)
        down_s = None if self.incident_s is None else time.monotonic() - self.incident_s
        self._store(
            Kind.RUN_STARTED,
            world=world,
            layout=None,
            resumed_from=None,
            restarts=self.job.restarts,
            warm=min(warm, world),
            down_s=down_s,
        )
        self.incident_s = None

    def _start_rank(self, rank: int) -> None:
        progress, log = self.progress / f"rank-{rank}", log_path(self.rundir.logs, rank)
        self.old_bytes[rank] = self._log_bytes(rank)
        shared = environment.Shared(
            world=self.settings.rules.world,
            master_port=self.ports.master,
            coordinator_port=self.ports.coordinator,
            restarts=self.job.restarts,
            max_restarts=self.settings.rules.max_restarts,
            run_id=self.rundir.id,
            run_dir=self.rundir.path.resolve(),
            jax=self.settings.jax,
        )
        told = environment.of_rank(shared, rank, progress.resolve())
        child = self.spares.take(told, log.resolve())
        if child is None:
            child = processes.start(self.settings.command.words, {**self.common, **told}, log)
        self.ranks[rank] = child
        self.watchers[rank] = Watcher(rank, log, progress)

    def _look(self) -> None:
        """See how each rank is doing, and judge."""
        now_s, looks = time.monotonic(), list[Look]()
        for rank, child in self.ranks.items():
            if process := read_process(child.pid):
                looks.append(self.watchers[rank].look(now_s, process))
        self._reach()
        if self.job.stage is not Stage.RUNNING:
            return
        longest_stall_s = self.settings.longest_stall_s
        if cause := judge(looks, longest_stall_s, _LENIENCE * limits(longest_stall_s).frozen_s):
            self._tell_stuck(cause, looks)
            self._apply(Stuck(cause))
        elif any(look.signs > 1 for look in looks):  # they need no help to start any more
            self._refill()

    def _refill(self) -> None:
        was_broken = self.spares.broken
        self.spares.refill()
        if (log := self.spares.broken) and not was_broken:
            self._alert(f"no spares: they fail to import, {last_line(log, 0)}; log: {log}")

    def _alert(self, what: str) -> None:
        self.note(what)
        self._store(Kind.ALERT, what=what, node=None)

    def _reach(self) -> None:
        steps = [watcher.step for watcher in self.watchers.values() if watcher.step is not None]
        if steps and (self.job.step is None or max(steps) > self.job.step):
            self._apply(Reached(max(steps)))

    def _tell_stuck(self, cause: Cause, looks: list[Look]) -> None:
        named = next((look for look in looks if look.rank == cause.rank), None)
        frozen = named is not None and cause.trouble is Trouble.FROZEN
        stalled_s = named.state_s if named and frozen else min(look.quiet_s for look in looks)
        step = named.step if named else None
        who = {"rank": cause.rank, "member": cause.rank, "step": step, "phase": None}
        self._store(Kind.HANG, **who, stalled_s=stalled_s, what=cause.what)

    def _tell_incident(self, cause: Cause) -> None:
        self.note(self._words(cause))
        if cause.rank is None:
            return
        ts, pid, code = self.deaths[cause.rank]
        exit_code, number = _split(code)
        self._store(
            Kind.RANK_LOST,
            ts=ts,
            rank=cause.rank,
            step=self.watchers[cause.rank].step,
            pid=pid,
            signal=None if number is None else signal_name(number),
            exit_code=exit_code,
            log=str(log_path(self.rundir.logs, cause.rank)),
        )

    def _words(self, cause: Cause) -> str:
        rank = cause.rank or 0
        log = log_path(self.rundir.logs, rank)
        return describe(cause, self.watchers[rank].step, log, self.old_bytes[rank])

    def _copy(self) -> None:
        """What rank 0 has written since the last time, to whoever looks on."""
        if self.show is None or self._log_bytes(0) == self.shown_bytes:
            return
        with log_path(self.rundir.logs, 0).open("rb") as log:
            log.seek(self.shown_bytes)
            data = log.read()
        try:
            self.shown_bytes += self.show.write(data) or 0
        except OSError:  # nobody looks on any more
            self.show = None

    def _conclude(self) -> Outcome:
        job, error = self.job, None
        self._copy()
        assert job.result is not None
        if job.result is Result.FAILED and job.cause is not None:
            error = f"{job.reason}; the last: {self._words(job.cause)}"
        steps = (step for step in (job.step, job.best_step) if step is not None)
        step, wall_s = max(steps, default=None), time.monotonic() - self.begun_s
        self._store(Kind(f"run_{job.result}"), step=step, wall_s=wall_s, error=error)
        return Outcome(job.result, job.restarts, step, error)

    def _store(self, kind: Kind, **fields: Any) -> None:
        event: Mapping[str, Any] = {"kind": kind, **fields}
        self.rundir.append_event(event)

    def _log_bytes(self, rank: int) -> int:
        log = log_path(self.rundir.logs, rank)
        return log.stat().st_size if log.exists() else 0


def _split(code: int) -> tuple[int | None, int | None]:
    """Exit code and signal, one of them None."""
    return (code, None) if code >= 0 else (None, -code)
