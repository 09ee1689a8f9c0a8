"""What a run starts from where its weights come from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.opening import StoreAt
from meshwright.plan.job import Job


def refuse_bad_start(job: Job) -> None:
    """Raise InputError if the folder of `model.hf` lacks weights, before anything is written."""
    if job.model.hf:
        # Imported here: it brings torch, which other runs need at their end only.
        from meshwright.ship.hf import read_hf

        read_hf(Path(job.model.hf))


def first_weights(job: Job, at: StoreAt) -> str | None:
    """The weights of `model.hf` as step 0 of a store, as `STORE#ID`; None where a run draws its
    own. Raises CheckpointError if they cannot be read or written."""
    if not job.model.hf:
        return None
    from meshwright.ship.start import start_commit

    return at.where(start_commit(Path(job.model.hf), at))
