"""What single ranks do in the tests of experts, packed documents, dropout and data."""

from __future__ import annotations

import hashlib
from typing import Any

import parity_expert_faults
import torch
import torch.nn.functional as F
from on_rank import batches_of, on_rank, sums_of, take_steps
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.checkpoint.opening import StoreAt, newest
from meshwright.data.order import MixedRows
from meshwright.train.gradients import counts_here, gradient_divisor, vote
from meshwright.train.mesh import Mesh
from meshwright.train.nn import dropout
from meshwright.train.parallel.context import local_order
from meshwright.train.parallel.slots import is_expert
from meshwright.train.state import load_state, owned_gradients, save
from meshwright.train.trainer import Trainer


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()


def expert_norm(context: WorkerContext) -> None:
    """Expert e of the one routed layer has gradient `args["experts"][e]` in one element and every
    rank's first dense element `args["dense"]`: the norm, what the clip to 1 divides by, how many
    groups of experts are here, and this rank's dense moments.
    """
    if context.args.get("averaged"):
        parity_expert_faults.norms_averaged_over_ranks()

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        values, dense = context.args["experts"], context.args["dense"]
        for group in trainer.data.groups:
            group.grad.zero_()
            for slot, here, part in group.spans():
                if part.start or any(slot.box_offset[1:]):
                    continue
                if slot.attribute == "gate" and is_expert(slot):
                    group.grad[here.start] = values[slot.box_offset[0]]
                elif slot.name == "embed.weight" and slot.box_offset[0] == 0:
                    group.grad[here.start] = dense
        trainer.routing.sum_counts()
        agreed = vote(trainer.data.groups, sums_of(mesh, 0.0, 1), mesh, stop=False)
        norm = agreed.grad_norm * agreed.tokens
        held = sum(any(map(is_expert, group.slots)) for group in trainer.data.groups)
        trainer.update(0, agreed)
        digests = {
            group.slots[0].name: _digest(moments[0])
            for group, moments in zip(trainer.data.groups, trainer.optimizer.moments, strict=True)
            if not is_expert(group.slots[0])
        }
        return [norm, gradient_divisor(agreed, 1.0), held, digests]

    on_rank(context, work)


def clipped_moments(context: WorkerContext) -> None:
    """After one step: the agreed norm, and the norm of all first moments over all ranks."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        agreed = take_steps(context, trainer, range(1))[0]
        squares = torch.zeros((), dtype=torch.float64)
        pairs = zip(trainer.data.groups, trainer.optimizer.moments, strict=True)
        for group, (first, _) in pairs:
            for slot, here, _ in group.spans():
                if counts_here(group, slot, mesh):
                    squares += first[here].double().square().sum()
        mesh.world.all_reduce(squares)
        return [agreed.loss, agreed.grad_norm, float(squares.sqrt())]

    on_rank(context, work)


def routed_counts(context: WorkerContext) -> None:
    """Assignments by layer and expert and the router loss of each of two steps, and the state that
    routers keep; with `args["again"]` recomputation counts too, the fault."""
    if context.args.get("again"):
        parity_expert_faults.count_when_recomputing()

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        seen = []
        for step in range(2):
            agreed = take_steps(context, trainer, range(step, step + 1))[0]
            seen.append([agreed.loss, agreed.router_loss, trainer.routing.counts()])
        state = {name: values.tolist() for name, values in trainer.routing.state().items()}
        return [seen, state]

    on_rank(context, work)


def silent_experts(context: WorkerContext) -> None:
    """One step in which no token goes to the experts `args["unused"]`: loss and norm; the gradients
    are saved to `args["save"]`."""

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        for moe in trainer.routing.layers.values():
            moe.router.bias[context.args["unused"]] = -1e3
        agreed = trainer.gradients(batches_of(context, trainer, 0))
        gradients = owned_gradients(trainer, 1 / agreed.tokens)
        save(StoreAt(context.args["save"]), 0, mesh, gradients, {})
        return [agreed.loss, agreed.grad_norm]

    on_rank(context, work)


def outputs_by_place(context: WorkerContext) -> None:
    """The digest of the logits of each token of this rank, by its place in the one sequence
    `args["sequence"]`."""
    if context.args.get("blind"):
        parity_expert_faults.documents_are_not_told_apart()

    def work(trainer: Trainer, mesh: Mesh) -> Any:
        tokens = torch.tensor([[context.args["sequence"]]])
        model, layout = trainer.stages[0], mesh.layout
        found: list[Tensor] = []
        model.register_forward_hook(lambda *call: found.append(call[2]))
        trainer.evaluate(tokens)
        logits = F.linear(found[0], model.head_weight)[0]
        order = local_order(tokens.shape[-1] - 1, layout.cp, mesh.cp.index, layout.cp_method)
        return {place: _digest(row) for place, row in zip(order.tolist(), logits, strict=True)}

    on_rank(context, work)


def dropout_masks(context: WorkerContext) -> None:
    """Digests of the masks of two steps, in the order in which they were made; and the loss of an
    evaluation, with how many masks that made."""

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        digests: list[str] = []
        right = dropout.dropped

        def recorded(*args: Any) -> Tensor:
            mask = right(*args)
            digests.append(_digest(mask))
            return mask

        vars(dropout)["dropped"] = recorded
        steps = []
        for step in range(2):
            trainer.gradients(batches_of(context, trainer, 0), step=step)
            steps.append(digests.copy())
            digests.clear()
        evaluated = trainer.evaluate(batches_of(context, trainer, 0))
        return [steps, evaluated.loss, len(digests)]

    on_rank(context, work)


def sample_ids(context: WorkerContext) -> None:
    """The numbers of the samples that this rank sees in each step up to `args["until"]`, from the
    checkpoint `args["load"]` if given."""

    seen: list[list[int]] = []
    right = MixedRows.read

    def noted(self: MixedRows, ks: Any) -> Any:
        seen.append(ks.tolist())
        return right(self, ks)

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        load = context.args.get("load")
        for step in range(load_state(trainer, newest(load)) if load else 0, context.args["until"]):
            batches_of(context, trainer, step)
        return seen

    MixedRows.read = noted  # type: ignore[method-assign] # in this forked process alone
    on_rank(context, work)
