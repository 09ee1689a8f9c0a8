"""What a forked worker does: join the group, build the trainer, train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.data.store import open_store
from meshwright.data.windows import TrainSamples, Windows
from meshwright.plan.job import Job
from meshwright.train.comm import Clock
from meshwright.train.device import (
    backend_for,
    measure_peak_flops,
    pick_device,
    threads_per_worker,
)
from meshwright.train.loop import RunInputs, TrainLoop
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.state import load_state
from meshwright.train.trainer import Trainer

_JOIN_TIMEOUT = timedelta(seconds=120)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class TrainArgs:
    """What `main` needs, as plain values. `resume_from` is a checkpoint folder or None,
    `end_of_text` the token that ends a document."""

    job: dict[str, Any]
    train_prefix: str
    held_out_prefix: str
    checkpoints: str
    resume_from: str | None
    baselines: dict[str, float]
    end_of_text: int


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
    events = EventWriter(context.event_fd, context.rank)
    torch.set_num_threads(threads_per_worker(context.world))
    peak = 0.0
    if context.rank == 0:  # the others wait for its store meanwhile
        dtype = COMPUTE_DTYPES[job.layout.precision]
        peak = measure_peak_flops(dtype, pick_device(0, context.world), context.world)
    with joined(context, job) as mesh:
        device = pick_device(context.rank, context.world)
        trainer = Trainer(job, mesh, device, args.end_of_text)
        first_step = 0
        if args.resume_from is None:
            trainer.initialise()
        else:
            first_step = load_state(trainer, Path(args.resume_from))
        events.emit(Kind.RANK_READY, step=first_step, peak_flops_per_chip=peak or None)
        inputs = RunInputs(
            train=open_samples(args.train_prefix, job),
            held_out=Windows(open_store(Path(args.held_out_prefix)), job.data.seq_len),
            checkpoints=Path(args.checkpoints),
            baselines=args.baselines,
            peak_flops=peak,
        )
        TrainLoop(trainer, inputs, events).run(first_step)


def open_samples(prefix: str, job: Job) -> TrainSamples:
    """The training samples of `job` from the token store at `prefix`."""
    return TrainSamples(Windows(open_store(Path(prefix)), job.data.seq_len), job.job.seed)
