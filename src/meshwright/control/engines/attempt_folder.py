"""The folder of a job on a cluster of real nodes, which the service's host and all nodes see.

```
HOME/runs/JOB/ order.json  batch.sh  submitted.json  lead.lock  node-NAME.lock
               lead-ATTEMPT.begun  lead-ATTEMPT.ended  node-ATTEMPT-NAME.begun  *.log
```

Whoever leads the run (the trainer itself, or the conductor of a run with agents) holds `lead.lock`
for all its life, and so do its children: that it is free is the proof that nobody does. It fences a
second job or pod off, too. `order.json` is the newest attempt.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

ORDER_FILE = "order.json"
BATCH_FILE = "batch.sh"
LEAD = "lead"
_SUBMITTED_FILE = "submitted.json"


@dataclass(frozen=True)
class Order:
    """What is to be run, in plain JSON."""

    attempt: int
    started_s: float
    run_dir: str
    job_file: str
    nodes: Sequence[str]  # by the cluster's names; the agent of the first is number 0
    chips: Sequence[int]  # on each
    ranks: int
    survives: bool
    waits: bool
    python: str
    addresses: Mapping[str, str] = field(default_factory=dict)  # of nodes; empty: one machine


@dataclass(frozen=True)
class Folder:
    """One of them."""

    path: Path

    def order(self) -> Order | None:
        """The newest; None if there is none."""
        try:
            return Order(**json.loads((self.path / ORDER_FILE).read_text()))
        except FileNotFoundError:
            return None

    def give(self, order: Order) -> None:
        """Make it the newest. A folder that an earlier attempt made is used on."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(ORDER_FILE, asdict(order))

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """A whole file or none."""
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(document))
        partial.replace(self.path / name)

    def lock(self, name: str, wait: bool) -> int | None:
        """The descriptor that holds a lock, for children too; None if somebody else has it."""
        descriptor = os.open(self.path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.set_inheritable(descriptor, True)
        return descriptor

    def held(self, name: str) -> bool:
        """Whether somebody has it."""
        return is_held(self.path / f"{name}.lock")

    def mark(self, name: str, attempt: int, what: str, **said: Any) -> None:
        """Say that a part of an attempt has `begun` or `ended`."""
        self.write(f"{name}-{attempt}.{what}", said)

    def marked(self, name: str, attempt: int, what: str) -> bool:
        """Whether it has said so."""
        return (self.path / f"{name}-{attempt}.{what}").exists()

    def submitted(self) -> Mapping[str, Any]:
        """`attempt`, `at` (wall clock, s), `times` and Slurm's `job`, of the last submission."""
        try:
            found: Mapping[str, Any] = json.loads((self.path / _SUBMITTED_FILE).read_text())
        except FileNotFoundError:
            return {"attempt": 0, "at": 0.0, "times": 0, "job": None}
        return found

    def note_submitted(self, attempt: int, at: float, job: int | None) -> None:
        """Count one more."""
        before = self.submitted()
        times = before["times"] + 1 if before["attempt"] == attempt else 1
        said = {"attempt": attempt, "at": at, "times": times, "job": job}
        self.write(_SUBMITTED_FILE, said)

    @classmethod
    def of(cls, home: Path, job_id: str) -> Self:
        """That of a job of a cluster."""
        return cls(home / "runs" / job_id)


def is_held(path: Path) -> bool:
    """Whether a process has the lock of the file, if there is one."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
