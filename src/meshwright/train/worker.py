"""What a forked worker does: join the group, build the trainer, train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# The first backward pass imports it, for a second: once here instead of on every forked rank.
import torch.fx.experimental.symbolic_shapes

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.plan.job import Job
from meshwright.train.comm import Clock
from meshwright.train.device import (
    backend_for,
    measure_peak_flops,
    pick_device,
    threads_per_worker,
)
from meshwright.train.inputs import TrainArgs, open_inputs, open_samples, start
from meshwright.train.loop import TrainLoop
from meshwright.train.masking import check_apart
from meshwright.train.member import Member
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.trainer import Trainer

__all__ = ["TrainArgs", "joined", "main", "open_samples"]

_JOIN_TIMEOUT = timedelta(seconds=120)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@contextmanager
def joined(context: WorkerContext, job: Job) -> Iterator[Mesh]:
    """The mesh of this worker, its process groups alive inside the block."""
    device = pick_device(context.rank, context.world)
    store = dist.TCPStore(  # type: ignore[attr-defined] # public, but not exported by its types
        "127.0.0.1",
        context.store_port,
        context.world,
        is_master=context.store_fd is not None,
        master_listen_fd=context.store_fd,
        timeout=_JOIN_TIMEOUT,
        wait_for_workers=False,
    )
    dist.init_process_group(
        backend_for(device),
        store=store,
        rank=context.rank,
        world_size=context.world,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        yield build_mesh(job.layout, context.rank, Clock())
    finally:
        dist.destroy_process_group()


def main(context: WorkerContext) -> None:
    """Train: the entry point of `meshwright train`. `context.args` are those of `TrainArgs`."""
    args = TrainArgs(**context.args)
    job = Job.model_validate(args.job)
    torch.set_num_threads(threads_per_worker(context.world))
    check_apart(job, pick_device(context.rank, context.world))
    if context.orders_fd is not None:
        Member(context, args, job).run()
        return
    events = EventWriter(context.event_fd, context.rank)
    peak = 0.0
    if context.rank == 0:  # the others wait for its store meanwhile
        dtype = COMPUTE_DTYPES[job.layout.precision]
        peak = measure_peak_flops(dtype, pick_device(0, context.world), context.world)
    with joined(context, job) as mesh:
        device = pick_device(context.rank, context.world)
        trainer = Trainer(job, mesh, device, args.end_of_text)
        first_step = start(trainer, args)
        events.emit(Kind.RANK_READY, step=first_step, peak_flops_per_chip=peak or None)
        TrainLoop(trainer, open_inputs(args, job, peak), events).run(first_step)
