"""The file beside a run that says who conducts it: held locked by its conductor, as long as that
lives, whoever started it.

The lock is taken by the service and handed to the conductor with its job, so that there is no
moment at which the run is started and not locked: a message that nobody has read yet holds it too.
What the file says is written whole, by one who holds the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_SIZE = 512  # of the record, blanks included: one write, which is never seen by halves
_READS = 5


@dataclass(frozen=True)
class Launched:
    """The newest attempt at a run that a conductor was chosen for."""

    attempt: int
    pid: int
    start: int  # of the process, in ticks since the machine began
    taken: bool = False  # the conductor has begun; before that nothing has happened
    events: int = 0  # bytes of events.jsonl and of the log when it began
    log: int = 0
    code: int | None = None  # what it ended with; None: it lives, or was killed
    killed: bool = False  # on request


def launch_file(run_dir: Path) -> Path:
    """Of a run; beside it, for it is there first."""
    return run_dir.with_name(f"{run_dir.name}.launch")


def log_file(run_dir: Path) -> Path:
    """What its conductors print."""
    return run_dir.with_name(f"{run_dir.name}.log")


def acquire(run_dir: Path, wait_s: float = 0.0) -> int | None:
    """A descriptor that holds the lock of a run, until all its copies are closed; None where a
    conductor has it."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(launch_file(run_dir), os.O_RDWR | os.O_CREAT, 0o644)
    deadline_s = time.monotonic() + wait_s
    while not _locks(lock, fcntl.LOCK_EX):
        if time.monotonic() >= deadline_s:
            os.close(lock)
            return None
        time.sleep(0.01)
    return lock


def is_held(run_dir: Path) -> bool:
    """Whether a conductor of the run lives, or has been given it and has not read that yet."""
    try:
        lock = os.open(launch_file(run_dir), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _locks(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _locks(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(lock: int, launched: Launched) -> None:
    """Replace what the file says."""
    os.pwrite(lock, json.dumps(asdict(launched)).ljust(_SIZE - 1).encode() + b"\n", 0)


def read(run_dir: Path) -> Launched | None:
    """What the file says; None if nothing."""
    for _ in range(_READS):
        try:
            with launch_file(run_dir).open("rb") as file:
                text = file.read(_SIZE)
        except FileNotFoundError:
            return None
        if not text.strip():
            return None
        try:
            return Launched(**json.loads(text))
        except ValueError:  # read while it was written
            time.sleep(0.001)
    return None
