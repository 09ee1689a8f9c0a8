"""What a run directory tells of the run in it, for any engine that can read it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.rundir import living_agents
from meshwright.control.words import RunState

_ENDS = (Kind.RUN_FINISHED, Kind.RUN_FAILED, Kind.RUN_INTERRUPTED)
_TAIL_BYTES = 1 << 13
_WORDS_MOST = 500
CONDUCTOR_GONE = "its conductor is gone and its agents train on; start it again"
SAVED_AND_ENDED = 130  # the exit code of a conductor that was asked to stop


@dataclass(frozen=True)
class Told:
    """By the events of one attempt: all of its incarnations, for agents may outlive a conductor."""

    started: bool = False
    ready: frozenset[int] = frozenset()  # ranks that have been, in any of them
    end: Kind | None = None  # of the last one
    error: str = ""


def tell(told: Told, event: dict[str, Any]) -> Told:
    """With one event more."""
    kind = event.get("kind")
    if kind == Kind.RUN_STARTED:
        return replace(told, started=True, end=None, error="")
    if kind == Kind.RANK_READY:
        return replace(told, ready=told.ready | {int(event.get("rank", -1))})
    if kind in _ENDS:
        return replace(told, end=Kind(str(kind)), error=str(event.get("error") or ""))
    return told


def state_of(told: Told, ranks: int) -> RunState:
    """Of a run whose conductor or agents live."""
    return RunState.RUNNING if len(told.ready) >= ranks else RunState.STARTING


@dataclass
class Follower:
    """Reads the events of a run from `begin` (bytes) on, each of them once."""

    run_dir: Path
    begin: int = 0
    told: Told = Told()
    _read: int = 0  # bytes so far
    _file: tuple[int, int] = (0, 0)
    _rest: bytes = field(default=b"", repr=False)

    def look(self) -> Told:
        """With what has come since the last look."""
        try:
            with (self.run_dir / "events.jsonl").open("rb") as file:
                status = os.fstat(file.fileno())
                which = (status.st_dev, status.st_ino)
                if which != self._file or status.st_size < self._read:
                    self._file, self._read = which, self.begin
                    self.told, self._rest = Told(), b""
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return self.told
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in filter(None, lines):
            try:
                self.told = tell(self.told, json.loads(line))
            except (ValueError, TypeError, AttributeError):
                continue  # torn by the end of a conductor, or no event
        return self.told


def agents_live(run_dir: Path) -> bool:
    """Whether ranks may train on, with or without a conductor; of this machine's agents, or where
    the file system takes locks for all machines, of any."""
    return run_dir.is_dir() and bool(living_agents(run_dir))


def has_begun(run_dir: Path) -> bool:
    """Whether anything was written there."""
    return run_dir.is_dir() and any(run_dir.iterdir())


def last_step(run_dir: Path) -> float:
    """The newest step that has metrics, read from the end of them; NaN if none."""
    for line in reversed(_tail(run_dir / "metrics.jsonl", 0).split(b"\n")[:-1]):
        try:
            return float(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return float("nan")


def complaint(log: Path, begin: int = 0) -> str:
    """What a command said last after `begin` (bytes): the line of its error, or any."""
    lines = [line.strip() for line in _tail(log, begin).decode(errors="replace").splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = errors or list(filter(None, lines))
    return said[-1][:_WORDS_MOST] if said else ""


def _tail(path: Path, begin: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def end_of(told: Told, code: int | None, said: str) -> tuple[RunState, str]:
    """How an attempt ended of which nothing lives: by its exit code, or where that was never
    written (None) by its events. `said`: the last words of its log."""
    if code == 0:
        return RunState.FINISHED, ""
    if code == SAVED_AND_ENDED:
        return RunState.STOPPED, told.error
    if code is not None:
        own = told.error if told.end == Kind.RUN_FAILED else ""
        return RunState.FAILED, own or said or f"its command ended with exit code {code}"
    match told.end:
        case Kind.RUN_FINISHED:
            return RunState.FINISHED, "its conductor was killed after the last step"
        case Kind.RUN_INTERRUPTED:
            return RunState.STOPPED, told.error
        case Kind.RUN_FAILED:
            return RunState.FAILED, told.error
    return RunState.LOST, "its conductor was killed, and no agent lives"
