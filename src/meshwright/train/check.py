"""The worker's side of `meshwright check`: a few steps, with everything needed to compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.checkpoint.opening import StoreAt, read_commit
from meshwright.plan.job import Job
from meshwright.train.batches import step_batches
from meshwright.train.compare import GRADIENTS, STATE, TRACE
from meshwright.train.device import pick_device, threads_per_worker
from meshwright.train.state import load_state, owned_gradients, owned_state, save
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined, open_samples


@dataclass(frozen=True)
class CheckArgs:
    """What `main` needs, as plain values."""

    job: dict[str, Any]
    train_prefix: str | Sequence[str]
    steps: int
    out_dir: str
    end_of_text: int
    start_from: str | None = None  # a commit, STORE#ID; None: weights are drawn


def main(context: WorkerContext) -> None:
    """Take `steps` steps; leave losses, gradient norms, step 1's gradients and the last state."""
    args = CheckArgs(**context.args)
    job, out = Job.model_validate(args.job), Path(args.out_dir)
    torch.set_num_threads(threads_per_worker(context.world))
    events = EventWriter(context.event_fd, context.rank)
    with joined(context, job) as mesh:
        device = pick_device(context.rank, context.world)
        trainer = Trainer(job, mesh, device, args.end_of_text)
        if args.start_from is None:
            trainer.initialise()
        else:
            load_state(trainer, read_commit(args.start_from))
        samples = open_samples(args.train_prefix, job, args.end_of_text)
        trace = []
        for step in range(args.steps):
            events.emit(Kind.PROGRESS, step=step + 1)
            agreed = trainer.gradients(step_batches(job, mesh, samples, step), step=step)
            if step == 0:
                mean = owned_gradients(trainer, 1 / max(agreed.tokens, 1))
                save(StoreAt(str(out / GRADIENTS)), 0, mesh, mean, {})
            trainer.update(step, agreed)
            trace.append(asdict(agreed))
        save(StoreAt(str(out / STATE)), 0, mesh, owned_state(trainer), {})
        if mesh.rank == 0:
            (out / TRACE).write_text(json.dumps(trace))
