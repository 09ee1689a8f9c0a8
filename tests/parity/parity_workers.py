"""What single ranks do in the case tests; also brings the trainer into the warm launcher."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import parity_faults
import torch
from on_rank import batches_of, on_rank, sums_of, take_steps

from meshwright.base.events import WorkerContext
from meshwright.checkpoint.opening import StoreAt, newest
from meshwright.data.store import open_store
from meshwright.data.windows import Windows
from meshwright.train.batches import held_out_batches
from meshwright.train.gradients import finish_gradients, gradient_divisor, vote
from meshwright.train.loss import IGNORE
from meshwright.train.mesh import Mesh
from meshwright.train.optim import learning_rate
from meshwright.train.state import load_state, owned_gradients, owned_state, save
from meshwright.train.trainer import Trainer


def global_norm(context: WorkerContext) -> None:
    """Every stage has one gradient, `args["norms"][stage]`: norm and the clipped values."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        trainer.data.begin_step()
        group = trainer.data.groups[-1]
        group.grad[0] = context.args["norms"][mesh.at.pp]
        agreed = vote(trainer.data.groups, sums_of(mesh, 0.0, 1), mesh, stop=False)
        clipped = float(group.grad[0]) / gradient_divisor(agreed, clip=1.0)
        return [agreed.grad_norm * agreed.tokens, clipped * agreed.tokens]

    on_rank(context, work)


def tied_gradient(context: WorkerContext) -> None:
    """Rank r's tied table has gradient `args["gradients"][r]` everywhere, the step two tokens."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        trainer.data.begin_step()
        tied = next(g for g in trainer.data.groups if g.slots[0].name == "embed.weight")
        tied.grad.fill_(context.args["gradients"][mesh.rank])
        tied.replicas.all_reduce(tied.grad)
        finish_gradients(trainer.data.groups, mesh)
        agreed = vote(trainer.data.groups, sums_of(mesh, 0.0, 1), mesh, stop=False)
        mean = tied.grad[: tied.used] / gradient_divisor(agreed, clip=1e9)
        return [agreed.tokens, sorted(set(mean.tolist()))]

    on_rank(context, work)


def weighted_loss(context: WorkerContext) -> None:
    """Rank r saw `args["counts"][r]` tokens of loss `args["losses"][r]` each: the step's loss."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        count, loss = context.args["counts"][mesh.rank], context.args["losses"][mesh.rank]
        return vote(trainer.data.groups, sums_of(mesh, count * loss, count), mesh, stop=False).loss

    on_rank(context, work)


def initial_weights(context: WorkerContext) -> None:
    """Save the initial state to `args["save"]`; the digest of each local shard."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        save(StoreAt(context.args["save"]), 0, mesh, owned_state(trainer), {})
        return [_digest(group.master) for group in trainer.data.groups]

    on_rank(context, work)


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def whole_parameters(context: WorkerContext) -> None:
    """After `args["steps"]` steps: what every tp rank holds whole, and its gradient."""

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        take_steps(context, trainer, range(context.args["steps"]))
        return {
            slot.name: [group.master[here].tolist(), group.grad[here].tolist()]
            for group in trainer.data.groups
            for slot, here, _ in group.spans()
            if slot.whole
        }

    on_rank(context, work)


def train_and_save(context: WorkerContext) -> None:
    """Load `args["load"]` if given, take steps up to `args["until"]`, save to `args["save"]`.

    With `args["twice"]` the state is loaded a second time, which must change nothing.
    """

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        first, load = 0, context.args.get("load")
        for _ in range(1 + bool(context.args.get("twice"))):
            first = load_state(trainer, newest(load)) if load else 0
        steps = range(first, context.args["until"])
        votes = take_steps(context, trainer, steps)
        save(StoreAt(context.args["save"]), steps.stop, mesh, owned_state(trainer), {})
        settings, whole = trainer.job.optimizer, trainer.job.job.steps
        rates = [learning_rate(settings, step, whole) for step in steps]
        return [[v.loss, v.grad_norm, rate] for v, rate in zip(votes, rates, strict=True)]

    on_rank(context, work)


def tied_copies(context: WorkerContext) -> None:
    """Digest of the tied table's master after three steps, and again after saving and loading."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        take_steps(context, trainer, range(3))
        trained = _tied_digests(trainer)
        at = StoreAt(context.args["save"])
        save(at, 3, mesh, owned_state(trainer), {})
        trainer.initialise()
        load_state(trainer, newest(at.address))
        return [trained, _tied_digests(trainer)]

    on_rank(context, work)


def _tied_digests(trainer: Trainer) -> list[str]:
    return [_digest(g.master) for g in trainer.data.groups if g.slots[0].tied]


def masked_step(context: WorkerContext) -> None:
    """One step in which every sequence has another number of valid targets, one sequence in four
    none at all: loss, tokens and norm; the gradients are saved to `args["save"]`.

    With `args["mean_of_means"]` each micro-batch's loss is divided by its own count, the fault.
    """
    if context.args.get("mean_of_means"):
        parity_faults.divide_by_own_count()

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        batches = batches_of(context, trainer, 0)
        for row in batches.flatten(0, 1):
            kept = int(row.sum()) % 4 * 7  # a function of the sequence, wherever it is
            row[1 + kept :] = IGNORE
        agreed = trainer.gradients(batches)
        gradients = owned_gradients(trainer, 1 / agreed.tokens)
        save(StoreAt(context.args["save"]), 0, mesh, gradients, {})
        return [agreed.loss, agreed.tokens, agreed.grad_norm]

    on_rank(context, work)


def evaluation(context: WorkerContext) -> None:
    """Loss and tokens of an evaluation, before and after a step."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        windows = Windows(open_store(Path(context.args["tokens"])), trainer.job.data.seq_len)
        batches = held_out_batches(trainer.job, mesh, windows)
        before = trainer.evaluate(batches)
        take_steps(context, trainer, range(1))
        after = trainer.evaluate(batches)
        return [before.loss, after.loss, before.tokens, after.tokens]

    on_rank(context, work)
