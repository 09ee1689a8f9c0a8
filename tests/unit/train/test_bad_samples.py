"""Bad samples are counted alike by all ranks, and by whoever takes over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train_groups import mesh_of

from meshwright.base.errors import DataError
from meshwright.data.checksums import BLOCK_BYTES, block_sums
from meshwright.data.store import write_store
from meshwright.data.tolerance import BadSamples
from meshwright.plan.job import Job, resolve_job
from meshwright.train.bad_samples import BadSampleWords, count_bad
from meshwright.train.batches import step_batches
from meshwright.train.inputs import open_samples
from meshwright.train.recovery import set_words, state_words
from meshwright.train.state import trainer_meta
from meshwright.train.trainer import Trainer

VOCAB = 300


def job_of(**data: object) -> Job:
    return resolve_job(
        {
            "job": {"steps": 4},
            "model": {"preset": "tiny", "layers": 1, "vocab": VOCAB},
            "data": {"seq_len": 63, "global_batch": 64, "verify": True, **data},
        }
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A store of two blocks, of which the second is damaged."""
    prefix, items = tmp_path / "train", BLOCK_BYTES
    with write_store(prefix, VOCAB, 0) as writer:
        writer.extend(np.arange(items) % VOCAB, np.array([items]))
    path = prefix.with_suffix(".bin")
    prefix.with_suffix(".crc").write_bytes(block_sums(path).tobytes())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return prefix


def test_a_step_goes_without_them_and_counts_them(prefix: Path) -> None:
    job = job_of(bad_samples=50)
    trainer = Trainer(job, mesh_of(job.layout, 0), torch.device("cpu"), 0)
    trainer.initialise()
    rows = open_samples(str(prefix), job, 0, BadSamples(allowed=None))
    words = BadSampleWords(trainer.mesh, rows, job.data)
    batches = step_batches(job, trainer.mesh, rows, 0)
    bad = int((batches == -100).all(-1).sum())
    assert 10 < bad < 50
    agreed = trainer.gradients(batches)
    assert (agreed.bad, agreed.tokens, agreed.finite) == (bad, 63 * (64 - bad), True)
    trainer.update(0, agreed)
    told = words.found(batches, 0)
    assert [sample for sample, _ in told] == np.flatnonzero(
        batches.flatten(0, 1)[:, 0] < 0
    ).tolist()
    assert all("train.bin: bytes 262144 to 524288: damaged" in what for _, what in told)
    words.refuse_too_many(trainer.bad_samples, 1)
    agreed = trainer.gradients(step_batches(job, trainer.mesh, rows, 1), step=1)
    trainer.update(1, agreed)
    assert trainer.bad_samples == bad + agreed.bad > 50
    with pytest.raises(DataError, match=f"^step 2: .*damaged.*; {trainer.bad_samples} bad samples"):
        words.refuse_too_many(trainer.bad_samples, 2)
    other = Trainer(job, mesh_of(job.layout, 0), torch.device("cpu"), 0)
    set_words(other, state_words(trainer))  # a spare that takes over
    assert other.bad_samples == trainer_meta(trainer)["bad_samples"] == trainer.bad_samples


def test_none_is_allowed_unless_the_job_says_so(prefix: Path) -> None:
    job = job_of()
    mesh = mesh_of(job.layout, 0)
    rows = open_samples(str(prefix), job, 0, BadSamples(allowed=None))
    words = BadSampleWords(mesh, rows, job.data)
    words.found(step_batches(job, mesh, rows, 0), 0)
    with pytest.raises(
        DataError, match=r"^step 1: .*damaged.*let the run go on .*data\.bad_samples$"
    ):
        words.refuse_too_many(1, 1)
    with pytest.raises(DataError, match="damaged"):  # where nobody counts, as in `check`
        open_samples(str(prefix), job, 0).read(np.arange(64))


def test_those_that_see_what_others_count_do_not() -> None:
    """Of two tp ranks with one sequence each counts once."""
    batches = torch.full((1, 2, 8), -100)
    layout = job_of().layout.model_copy(update={"tp": 2, "dp_replicate": 2})
    counted = [count_bad(batches, mesh_of(layout, rank)) for rank in range(layout.world)]
    assert sum(counted) == 2 * layout.dp
