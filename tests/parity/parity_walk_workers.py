"""A rank of a run that walks through layouts: it loads, tells what it has, trains, and dies."""

from __future__ import annotations

import os
import signal
import time

import torch

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.checkpoint.opening import StoreAt
from meshwright.plan.job import Job
from meshwright.train.inputs import TrainArgs, open_inputs, start
from meshwright.train.loop import TrainLoop
from meshwright.train.state import owned_state, save, trainer_meta
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined

LIMIT_S = 120.0  # for a commit: a guard against hanging


def walk(context: WorkerContext) -> None:
    """As `worker.main`. What was loaded is committed, under this layout, to `args["witness"]`. Rank
    `args["victim"]` dies after `args["steps"]` steps, if these are not 0, and if `args["saved"]`
    when something of them has been committed."""
    named = dict(context.args)
    witness, victim = StoreAt(named.pop("witness")), named.pop("victim") % context.world
    steps, saved = named.pop("steps"), named.pop("saved")
    args = TrainArgs(**named)
    job = Job.model_validate(args.job)
    torch.set_num_threads(1)
    events = EventWriter(context.event_fd, context.rank)
    with joined(context, job) as mesh:
        trainer = Trainer(job, mesh, torch.device("cpu"), args.end_of_text)
        first = start(trainer, args)
        save(witness, first, mesh, owned_state(trainer), trainer_meta(trainer))
        events.emit(Kind.RANK_READY, step=first, peak_flops_per_chip=None)
        loop = TrainLoop(trainer, open_inputs(args, job, 1.0), events)

        def begin(step: int) -> None:
            if steps and context.rank == victim and step == first + steps + 1:
                if saved:
                    _await_newer(StoreAt(**args.checkpoints), first)
                os.kill(os.getpid(), signal.SIGKILL)

        loop.begin_step = begin
        loop.run(first)


def _await_newer(at: StoreAt, step: int) -> None:
    end_s = time.monotonic() + LIMIT_S
    while (head := at.head()) is None or head.step <= step:
        assert time.monotonic() < end_s
        time.sleep(0.02)
