"""The frame of every worker of the case tests: a trainer, something done with it, its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from meshwright.train.replacing import Move
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


@dataclass(frozen=True)
class Taken:
    """A step: what the ranks agreed on, and the experts that changed places after it."""

    step: int
    agreed: Vote
    moves: list[Move]


def each_step(
    context: WorkerContext, trainer: Trainer, steps: range, rate_of: int | None = None
) -> Iterator[Taken]:
    """Train on the store at `args["tokens"]`, at each step's learning rate or at that of step
    `rate_of`."""
    for step in steps:
        agreed = trainer.gradients(batches_of(context, trainer, step), step=step)
        yield Taken(step, agreed, trainer.update(step if rate_of is None else rate_of, agreed))


def take_steps(context: WorkerContext, trainer: Trainer, steps: range) -> list[Vote]:
    """Train on the store at `args["tokens"]`."""
    return [taken.agreed for taken in each_step(context, trainer, steps)]


def sums_of(mesh: Mesh, loss: float, tokens: int) -> StepSums:
    """The sums of a step over this rank's stages: the last one has loss and tokens."""
    layout = mesh.layout
    last = mesh.at.pp == rank_of(layout.virtual_stages - 1, layout.schedule, layout.pp)
    return StepSums(torch.tensor(loss * last), torch.zeros(()), tokens * last)
