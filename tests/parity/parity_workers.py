"""What single ranks do in the case tests; also brings the trainer into the warm launcher."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity_faults
import torch

from meshwright.base.events import WorkerContext
from meshwright.checkpoint import store
from meshwright.plan.job import Job
from meshwright.train.check import save
from meshwright.train.gradients import finish_gradients, scale_gradients, vote
from meshwright.train.loop import step_batches
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.pipeline import StepSums
from meshwright.train.state import load_state, owned_state
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined, open_samples

__all__ = ["parity_faults"]


def _on_rank(context: WorkerContext, work: Callable[[Trainer, Mesh], Any]) -> None:
    job = Job.model_validate(context.args["job"])
    with joined(context, job) as mesh:
        trainer = Trainer(job, mesh, torch.device("cpu"))
        trainer.initialise()
        result = work(trainer, mesh)
        (Path(context.args["out"]) / f"{context.rank}.json").write_text(json.dumps(result))
        mesh.wait_for_all()


def global_norm(context: WorkerContext) -> None:
    """Every stage has one gradient, `args["norms"][stage]`: norm and the clipped values."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        trainer.data.begin_step()
        group = trainer.data.groups[-1]
        group.grad[0] = context.args["norms"][mesh.at.pp]
        agreed = vote(trainer.data.groups, StepSums(torch.zeros(()), 1), mesh, stop=False)
        scale_gradients(trainer.data.groups, agreed, clip=1.0)
        return [agreed.grad_norm * agreed.tokens, float(group.grad[0]) * agreed.tokens]

    _on_rank(context, work)


def tied_gradient(context: WorkerContext) -> None:
    """Rank r's tied table has gradient `args["gradients"][r]` everywhere: the mean of two steps."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        trainer.data.begin_step()
        tied = next(g for g in trainer.data.groups if g.slots[0].name == "embed.weight")
        tied.grad.fill_(context.args["gradients"][mesh.rank])
        mesh.dp_replicate.all_reduce(tied.grad)
        finish_gradients(trainer.data.groups, mesh)
        agreed = vote(trainer.data.groups, StepSums(torch.zeros(()), 1), mesh, stop=False)
        scale_gradients(trainer.data.groups, agreed, clip=1e9)
        return [agreed.tokens, sorted(set(tied.grad[: tied.used].tolist()))]

    _on_rank(context, work)


def weighted_loss(context: WorkerContext) -> None:
    """Rank r saw `args["counts"][r]` tokens of loss `args["losses"][r]` each: the step's loss."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        count, loss = context.args["counts"][mesh.rank], context.args["losses"][mesh.rank]
        sums = StepSums(torch.tensor(float(count * loss)), count)
        return vote(trainer.data.groups, sums, mesh, stop=False).loss

    _on_rank(context, work)


def initial_weights(context: WorkerContext) -> None:
    """Save the initial weights; the digest of each local shard."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        save(Path(context.args["out"]) / "weights", mesh, owned_state(trainer))
        return [hashlib.sha256(g.master.numpy().tobytes()).hexdigest() for g in trainer.data.groups]

    _on_rank(context, work)


def whole_parameters(context: WorkerContext) -> None:
    """After `args["steps"]` steps: digests of what every tp rank holds whole, and its gradient."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        samples = open_samples(context.args["tokens"], trainer.job)
        for step in range(context.args["steps"]):
            agreed = trainer.gradients(step_batches(trainer.job, mesh, samples, step))
            trainer.update(step, agreed)
        return {
            slot.name: [group.master[here].tolist(), group.grad[here].tolist()]
            for group in trainer.data.groups
            for slot, here, _ in group.spans()
            if slot.whole
        }

    _on_rank(context, work)


def train_and_save(context: WorkerContext) -> None:
    """Load `args["load"]` if given, take steps up to `args["until"]`, save to `args["save"]`.

    With `args["twice"]` the state is loaded a second time, which must change nothing.
    """

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        first, load = 0, context.args.get("load")
        for _ in range(1 + bool(context.args.get("twice"))):
            first = load_state(trainer, Path(load)) if load else 0
        samples = open_samples(context.args["tokens"], trainer.job)
        losses = []
        for step in range(first, context.args["until"]):
            agreed = trainer.gradients(step_batches(trainer.job, mesh, samples, step))
            trainer.update(step, agreed)
            losses.append([agreed.loss, agreed.grad_norm])
        _commit(Path(context.args["save"]), context.args["until"], trainer, mesh)
        return losses

    _on_rank(context, work)


def _commit(root: Path, step: int, trainer: Trainer, mesh: Mesh) -> None:
    if mesh.rank == 0:
        store.begin(root, step)
    mesh.wait_for_all()
    store.write_rank(store.pending_dir(root, step), mesh.rank, owned_state(trainer))
    mesh.wait_for_all()
    if mesh.rank == 0:
        store.commit(root, step, {}, mesh.layout.world)
