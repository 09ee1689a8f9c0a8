"""Run directories as the service reads them; those who train write them.

A run may be under way: a last line without its end is left for later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.base.errors import NotFoundError
from meshwright.base.events import Kind

_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 14
_LOG_BYTES = 1 << 16
# Told often, and of no use to who watches from afar.
_QUIET = frozenset({Kind.RANK_PROFILE, Kind.EXPERT_LOAD, Kind.REDUNDANCY})


def new_events(run: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Events of a run from byte `offset` on, at most a megabyte of them, and where to go on."""
    lines, offset = _lines(run / "events.jsonl", offset)
    return [event for event in lines if event.get("kind") not in _QUIET], offset


def story_of(run: Path) -> int | None:
    """Tells one file of events from another that takes its place; None where there is none."""
    try:
        return (run / "events.jsonl").stat().st_ino
    except FileNotFoundError:
        return None


def last_metrics(run: Path) -> dict[str, Any] | None:
    """Those of the last step."""
    path = run / "metrics.jsonl"
    try:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
    except FileNotFoundError:
        return None
    lines, _ = _lines(path, start)
    return lines[-1] if lines else None


def metrics(run: Path, after: int, limit: int) -> list[dict[str, Any]]:
    """Those of steps after `after`, at most `limit` of them, spread evenly with the last one."""
    found = [line for line in _all_lines(run / "metrics.jsonl") if line.get("step", 0) > after]
    if len(found) <= limit:
        return found
    places = {round(i * (len(found) - 1) / max(1, limit - 1)) for i in range(limit)}
    return [found[place] for place in sorted(places)]


def killed_rank(run: Path) -> str | None:
    """One line if what ended the run was a signal to a rank, which says nothing against the job."""
    last: dict[str, Any] | None = None
    for event in _all_lines(run / "events.jsonl"):
        if event.get("kind") in (Kind.RUN_STARTED, Kind.TAKEOVER_DONE):
            last = None
        elif event.get("kind") == Kind.RANK_LOST:
            last = last or event  # the first is the cause, others follow from it
    if last is None or not last.get("signal"):
        return None
    return f"rank {last.get('rank')} was ended by {last['signal']}"


def logs(run: Path) -> list[str]:
    """Names of the log files."""
    folder = run / "logs"
    return sorted(path.name for path in folder.glob("*.log")) if folder.is_dir() else []


def log_text(run: Path, name: str) -> str:
    """The end of a log file. Raises NotFoundError for a name that `logs` does not list."""
    names = logs(run)
    if name not in names:
        known = ", ".join(names[:8]) or "none yet"
        raise NotFoundError(f"log {name!r}: there is none of that name; there is {known}")
    with (run / "logs" / name).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        return file.read(_LOG_BYTES).decode(errors="replace")


def _all_lines(path: Path) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        lines, following = _lines(path, offset)
        yield from lines
        if following == offset:
            return
        offset = following


def _lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines from `offset` on; what is no JSON object is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_READ_BYTES)
    except FileNotFoundError:
        return [], offset
    whole = data.rfind(b"\n") + 1
    found = []
    for line in data[:whole].splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            found.append(fields)
    return found, offset + whole
