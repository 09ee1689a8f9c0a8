"""Where the commits of a run are."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.opening import StoreAt
from meshwright.plan.job import Job


def store_of(job: Job, run: Path) -> StoreAt:
    """That of the run of `job` in the folder `run`."""
    section = job.checkpoint
    own = str((run / "checkpoints").resolve())
    return StoreAt(section.store or own, section.branch, section.encrypt, section.replica)
