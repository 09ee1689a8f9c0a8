"""The worker's side of `meshwright check`: a few steps, with everything needed to compare them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.checkpoint import store
from meshwright.checkpoint.pieces import FloatArray, Piece
from meshwright.plan.job import Job
from meshwright.train.compare import GRADIENTS, STATE, TRACE
from meshwright.train.loop import step_batches
from meshwright.train.mesh import Mesh
from meshwright.train.state import owned_gradients, owned_state
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined, open_samples


@dataclass(frozen=True)
class CheckArgs:
    """What `main` needs, as plain values."""

    job: dict[str, Any]
    train_prefix: str
    steps: int
    out_dir: str


def main(context: WorkerContext) -> None:
    """Take `steps` steps; leave losses, gradient norms, step 1's gradients and the last state."""
    args = CheckArgs(**context.args)
    job, out = Job.model_validate(args.job), Path(args.out_dir)
    events = EventWriter(context.event_fd, context.rank)
    with joined(context, job) as mesh:
        trainer = Trainer(job, mesh, torch.device("cpu"))
        trainer.initialise()
        samples = open_samples(args.train_prefix, job)
        trace = []
        for step in range(args.steps):
            events.emit(Kind.PROGRESS, step=step + 1)
            agreed = trainer.gradients(step_batches(job, mesh, samples, step))
            if step == 0:
                mean = owned_gradients(trainer, 1 / max(agreed.tokens, 1))
                save(out / GRADIENTS, mesh, mean)
            trainer.update(step, agreed)
            trace.append(asdict(agreed))
        save(out / STATE, mesh, owned_state(trainer))
        if mesh.rank == 0:
            (out / TRACE).write_text(json.dumps(trace))


def save(root: Path, mesh: Mesh, pieces: Mapping[Piece, FloatArray]) -> None:
    """Commit every rank's pieces as step 0 of the store at `root`."""
    if mesh.rank == 0:
        store.begin(root, 0)
    mesh.wait_for_all()
    store.write_rank(store.pending_dir(root, 0), mesh.rank, pieces)
    mesh.wait_for_all()
    if mesh.rank == 0:
        store.commit(root, 0, {}, mesh.layout.world)
