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
from meshwright.plan.job import Job
from meshwright.train.batches import held_out_batches, step_batches
from meshwright.train.gradients import finish_gradients, gradient_divisor, vote
from meshwright.train.loss import IGNORE
from meshwright.train.mesh import Mesh
from meshwright.train.optim import learning_rate
from meshwright.train.parallel.pipeline import StepSums
from meshwright.train.state import load_state, owned_gradients, owned_state, save
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
        clipped = float(group.grad[0]) / gradient_divisor(agreed, clip=1.0)
        return [agreed.grad_norm * agreed.tokens, clipped * agreed.tokens]

    _on_rank(context, work)


def tied_gradient(context: WorkerContext) -> None:
    """Rank r's tied table has gradient `args["gradients"][r]` everywhere, the step two tokens."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        trainer.data.begin_step()
        tied = next(g for g in trainer.data.groups if g.slots[0].name == "embed.weight")
        tied.grad.fill_(context.args["gradients"][mesh.rank])
        mesh.dp_replicate.all_reduce(tied.grad)
        finish_gradients(trainer.data.groups, mesh)
        agreed = vote(trainer.data.groups, StepSums(torch.zeros(()), 1), mesh, stop=False)
        mean = tied.grad[: tied.used] / gradient_divisor(agreed, clip=1e9)
        return [agreed.tokens, sorted(set(mean.tolist()))]

    _on_rank(context, work)


def weighted_loss(context: WorkerContext) -> None:
    """Rank r saw `args["counts"][r]` tokens of loss `args["losses"][r]` each: the step's loss."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        count, loss = context.args["counts"][mesh.rank], context.args["losses"][mesh.rank]
        sums = StepSums(torch.tensor(float(count * loss)), count)
        return vote(trainer.data.groups, sums, mesh, stop=False).loss

    _on_rank(context, work)


def initial_weights(context: WorkerContext) -> None:
    """Save the initial state to `args["save"]`; the digest of each local shard."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        save(Path(context.args["save"]), 0, mesh, owned_state(trainer), {})
        return [hashlib.sha256(g.master.numpy().tobytes()).hexdigest() for g in trainer.data.groups]

    _on_rank(context, work)


def whole_parameters(context: WorkerContext) -> None:
    """After `args["steps"]` steps: what every tp rank holds whole, and its gradient."""

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
            rate = learning_rate(trainer.job.optimizer, step, trainer.job.job.steps)
            losses.append([agreed.loss, agreed.grad_norm, rate])
        root, until = Path(context.args["save"]), context.args["until"]
        save(root, until, mesh, owned_state(trainer), {})
        return losses

    _on_rank(context, work)


def tied_copies(context: WorkerContext) -> None:
    """Digest of the tied table's master after three steps, and again after saving and loading."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        samples = open_samples(context.args["tokens"], trainer.job)
        for step in range(3):
            agreed = trainer.gradients(step_batches(trainer.job, mesh, samples, step))
            trainer.update(step, agreed)
        trained = _tied_digest(trainer)
        root = Path(context.args["save"])
        save(root, 3, mesh, owned_state(trainer), {})
        mesh.wait_for_all()
        trainer.initialise()
        load_state(trainer, root / "step-000003")
        return [trained, _tied_digest(trainer)]

    _on_rank(context, work)


def _tied_digest(trainer: Trainer) -> str | None:
    for group in trainer.data.groups:
        if group.slots[0].tied:
            return hashlib.sha256(group.master.numpy().tobytes()).hexdigest()
    return None


def masked_step(context: WorkerContext) -> None:
    """One step in which every sequence has another number of valid targets, one sequence in four
    none at all: loss, tokens and norm; the gradients are saved to `args["save"]`.

    With `args["mean_of_means"]` each micro-batch's loss is divided by its own count, the fault.
    """
    if context.args.get("mean_of_means"):
        parity_faults.divide_by_own_count()

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        samples = open_samples(context.args["tokens"], trainer.job)
        batches = step_batches(trainer.job, mesh, samples, 0)
        for row in batches.flatten(0, 1):
            kept = int(row.sum()) % 4 * 7  # a function of the sequence, wherever it is
            row[1 + kept :] = IGNORE
        agreed = trainer.gradients(batches)
        gradients = owned_gradients(trainer, 1 / agreed.tokens)
        save(Path(context.args["save"]), 0, mesh, gradients, {})
        return [agreed.loss, agreed.tokens, agreed.grad_norm]

    _on_rank(context, work)


def evaluation(context: WorkerContext) -> None:
    """Loss and tokens of an evaluation, before and after a step."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        samples = open_samples(context.args["tokens"], trainer.job)
        batches = held_out_batches(trainer.job, mesh, samples.windows)
        before = trainer.evaluate(batches)
        trainer.update(0, trainer.gradients(step_batches(trainer.job, mesh, samples, 0)))
        after = trainer.evaluate(batches)
        return [before.loss, after.loss, before.tokens, after.tokens]

    _on_rank(context, work)
