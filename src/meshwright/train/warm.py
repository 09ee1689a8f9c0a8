"""What a spare does in advance, so that it loses no time when it takes a rank over."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.train.batches import step_batches
from meshwright.train.comm import Clock
from meshwright.train.inputs import TrainArgs, open_inputs
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.trainer import Trainer

_SHARE_OF_MEMORY = 0.25  # of what is free, for trainers that are made in advance
_BYTES_PER_PARAMETER = 24  # weights, master, gradient and moments, and something for the rest
_LAYERS = 2


def warm_up(args: TrainArgs, job: Job, mesh_of: Callable[[int], Mesh]) -> dict[int, Trainer]:
    """Take a step alone with a small relative of the model, so that all code and memory that a step
    needs has been touched; then trainers of the ranks of `job`, as many as there is room for."""
    _step_alone(args, job)
    device = torch.device("cpu")
    world = job.layout.world
    per_rank = _BYTES_PER_PARAMETER * job.model.params / (job.layout.tp * job.layout.pp)
    room = int(_SHARE_OF_MEMORY * _free_bytes() / max(per_rank, 1))
    return {
        rank: Trainer(job, mesh_of(rank), device, args.end_of_text)
        for rank in range(min(world, room))
    }


def _step_alone(args: TrainArgs, job: Job) -> None:
    dense = min(job.model.first_dense_layers, 1)
    shape = {"layers": min(job.model.layers, _LAYERS), "first_dense_layers": dense}
    layout = Layout(micro_batch=job.layout.micro_batch, precision=job.layout.precision)
    batch = job.data.model_copy(update={"global_batch": layout.micro_batch})
    small = job.model_copy(
        update={"model": job.model.model_copy(update=shape), "layout": layout, "data": batch}
    )
    mesh = build_mesh(layout, 0, Clock())
    trainer = Trainer(small, mesh, torch.device("cpu"), args.end_of_text)
    trainer.initialise()
    samples = open_inputs(args, job, 0.0).train
    trainer.update(0, trainer.gradients(step_batches(small, mesh, samples, 0)))


def _free_bytes() -> int:
    with open("/proc/meminfo") as lines:  # noqa: PTH123
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10
