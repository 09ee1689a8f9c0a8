"""The frame of every worker of the case tests: a trainer, something done with it, its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.plan.job import Job
from meshwright.plan.schedule import rank_of
from meshwright.train.batches import step_batches
from meshwright.train.gradients import Vote
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.pipeline import StepSums
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined, open_samples

END_OF_TEXT = 0


def on_rank(context: WorkerContext, work: Callable[[Trainer, Mesh], Any]) -> None:
    """Build the trainer of `args["job"]`, do `work`, leave its JSON result in `args["out"]`."""
    job = Job.model_validate(context.args["job"])
    torch.set_num_threads(1)
    with joined(context, job) as mesh:
        trainer = Trainer(job, mesh, torch.device("cpu"), END_OF_TEXT)
        trainer.initialise()
        result = work(trainer, mesh)
        (Path(context.args["out"]) / f"{context.rank}.json").write_text(json.dumps(result))
        mesh.wait_for_all()


def batches_of(context: WorkerContext, trainer: Trainer, step: int) -> Tensor:
    """This rank's tokens of step `step` from the store at `args["tokens"]`."""
    samples = open_samples(context.args["tokens"], trainer.job)
    return step_batches(trainer.job, trainer.mesh, samples, step)


def take_steps(context: WorkerContext, trainer: Trainer, steps: range) -> list[Vote]:
    """Train on the store at `args["tokens"]`."""
    votes = []
    for step in steps:
        votes.append(trainer.gradients(batches_of(context, trainer, step), step=step))
        trainer.update(step, votes[-1])
    return votes


def sums_of(mesh: Mesh, loss: float, tokens: int) -> StepSums:
    """The sums of a step over this rank's stages: the last one has loss and tokens."""
    layout = mesh.layout
    last = mesh.at.pp == rank_of(layout.virtual_stages - 1, layout.schedule, layout.pp)
    return StepSums(torch.tensor(loss * last), torch.zeros(()), tokens * last)
