"""What a worker of `meshwright train` is given, and how it opens it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.reader import Reader
from meshwright.data.store import open_store
from meshwright.data.windows import TrainSamples, Windows
from meshwright.plan.job import Job
from meshwright.train.loop import RunInputs
from meshwright.train.state import load_state
from meshwright.train.trainer import Trainer


@dataclass(frozen=True)
class TrainArgs:
    """What `worker.main` needs, as plain values. `resume_from` is a checkpoint folder or None,
    `end_of_text` the token that ends a document, `predicted_step_time_s` the planner's; `faults`
    are those that a drill has armed (see `faults.Fault`)."""

    job: dict[str, Any]
    train_prefix: str
    held_out_prefix: str
    checkpoints: str
    resume_from: str | None
    baselines: dict[str, float]
    end_of_text: int
    predicted_step_time_s: float | None = None
    faults: Sequence[dict[str, Any]] = ()


def open_inputs(args: TrainArgs, job: Job, peak_flops: float) -> RunInputs:
    """The data of `job`, and where its checkpoints go."""
    return RunInputs(
        train=open_samples(args.train_prefix, job),
        held_out=Windows(open_store(Path(args.held_out_prefix)), job.data.seq_len),
        checkpoints=Path(args.checkpoints),
        baselines=args.baselines,
        peak_flops=peak_flops,
        predicted_step_time_s=args.predicted_step_time_s,
    )


def open_samples(prefix: str, job: Job) -> TrainSamples:
    """The training samples of `job` from the token store at `prefix`."""
    return TrainSamples(Windows(open_store(Path(prefix)), job.data.seq_len), job.job.seed)


def start(trainer: Trainer, resume_from: str | None) -> int:
    """Give `trainer` its first weights, or those of a checkpoint; the step to go on with."""
    if resume_from is None:
        trainer.initialise()
        return 0
    return load_state(trainer, Path(resume_from))


def first_step(resume_from: str | None) -> int:
    """The step that `start` goes on with."""
    return 0 if resume_from is None else Reader(Path(resume_from)).step
