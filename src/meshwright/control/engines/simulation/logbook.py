"""The run directory of a simulated run: what the trainer would have written by now, once each.

Lines are only ever added. A lock is held while lines are written, and the files are read again
where they are not as this object left them, so that after a crash, or under another service, each
line is there once.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.base.errors import RunError
from meshwright.base.events import Kind
from meshwright.conduct.protocol import encode
from meshwright.conduct.rundir import read_lines

MARK = "simulated"  # the key of an event that no trainer wrote; its value tells which one it is
_LOCK = ".simulated.lock"
_TAIL_BYTES = 1 << 16


@dataclass
class Logbook:
    """Of one run directory."""

    run: Path
    told: set[str] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)  # by attempt, the kind of its last event
    saved: int = 0  # step of the newest checkpoint
    evaluated: int = 0  # newest step that was evaluated, of the newest attempt
    last: int = 0  # step of the last line of metrics
    metrics_bytes: int = 0
    _events_bytes: int = 0
    _seq: int = 0
    _starts: int = 0

    @cached_property
    def events(self) -> Path:
        """One line for each event."""
        return self.run / "events.jsonl"

    @cached_property
    def metrics(self) -> Path:
        """One line for each step."""
        return self.run / "metrics.jsonl"

    def refresh(self) -> None:
        """Know what the files hold."""
        if _size(self.events) != self._events_bytes:
            self._read_events()
        if _size(self.metrics) != self.metrics_bytes:
            self.metrics_bytes, self.last = _tail(self.metrics)

    def last_since(self, begin_bytes: int) -> int:
        """Step of the last line of metrics after byte `begin_bytes`; 0: there is none."""
        return self.last if self.metrics_bytes > begin_bytes else 0

    def write(
        self,
        events: Iterable[Mapping[str, Any]],
        metrics: Iterable[Mapping[str, Any]],
        begin_bytes: int,
    ) -> None:
        """Add what is not there yet; metrics before `begin_bytes` are of an earlier attempt. Raises
        RunError if the disk does not take it."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            (self.run / "logs").mkdir(exist_ok=True)
            with (self.run / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.refresh()
                fresh = [event for event in events if event[MARK] not in self.told]
                if fresh:
                    data = b"".join(self._stamped(event) for event in fresh)
                    self._events_bytes = _append(self.events, self._events_bytes, data)
                last = self.last_since(begin_bytes)
                lines = [line for line in metrics if line["step"] > last]
                if lines:
                    data = b"".join(map(encode, lines))
                    self.metrics_bytes = _append(self.metrics, self.metrics_bytes, data)
                    self.last = lines[-1]["step"]
        except OSError as error:
            self._events_bytes = self.metrics_bytes = -1  # read them again
            raise RunError(f"{self.run}: cannot be written ({error.strerror})") from error

    def _stamped(self, event: Mapping[str, Any]) -> bytes:
        self._seq += 1
        self._starts += event["kind"] == Kind.RUN_STARTED
        self._know(event)
        stamp = {"seq": self._seq, "run": self.run.name, "incarnation": self._starts}
        return encode({**event, **stamp})

    def _know(self, event: Mapping[str, Any]) -> None:
        mark = str(event.get(MARK, ""))
        self.told.add(mark)
        if event["kind"] == Kind.RUN_STARTED:
            self.evaluated = event.get("resumed_from") or 0
        if event["kind"] == Kind.EVALUATED:
            self.evaluated = event["step"]
        if event["kind"] == Kind.CHECKPOINT_COMMITTED:
            self.saved = max(self.saved, event["step"])
        if event["kind"] in (Kind.RUN_FINISHED, Kind.RUN_FAILED, Kind.RUN_INTERRUPTED) and mark:
            self.ended[int(mark.partition("/")[0])] = event["kind"]

    def _read_events(self) -> None:
        self.told, self.ended, self.saved, self.evaluated = set(), {}, 0, 0
        self._seq = self._starts = 0
        for event in read_lines(self.events) if self.events.exists() else ():
            self._seq = event["seq"]
            self._starts += event["kind"] == Kind.RUN_STARTED
            self._know(event)
        self._events_bytes = _whole(self.events)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    size = _size(path)
    if not size:
        return 0
    with path.open("rb") as file:
        while size:
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            size = start
    return 0


def _tail(path: Path) -> tuple[int, int]:
    """Bytes of whole lines, and the step of the last of them."""
    whole = _whole(path)
    if not whole:
        return 0, 0
    with path.open("rb") as file:
        file.seek(max(0, whole - _TAIL_BYTES))
        last = file.read(min(whole, _TAIL_BYTES)).splitlines()[-1]
    return whole, int(json.loads(last)["step"])


def _append(path: Path, at: int, data: bytes) -> int:
    """Write after byte `at`, over a line that was torn; the size then."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, at)
        os.pwrite(handle, data, at)
    finally:
        os.close(handle)
    return at + len(data)
