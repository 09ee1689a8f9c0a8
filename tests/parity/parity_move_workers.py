"""What ranks do in the tests of overflows and of experts that change places."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from on_rank import batches_of, each_step, on_rank
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.checkpoint.opening import StoreAt, newest
from meshwright.plan.experts import Placement
from meshwright.plan.schedule import Action
from meshwright.train.mesh import Mesh
from meshwright.train.precision.scaling import LossScale
from meshwright.train.state import load_state, owned_state, save, trainer_meta
from meshwright.train.trainer import Trainer


def overflowing(context: WorkerContext) -> None:
    """Steps from a loss scale of `args["scale"]`, or from the commit `args["load"]`, to 30; the
    state after `args["save_at"]` is saved to `args["save"]`. The scale after each step and its
    loss, and how many steps were applied."""

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        args = context.args
        trainer.loss_scale = LossScale(args["scale"])
        first = load_state(trainer, newest(args["load"])) if args.get("load") else 0
        scales, losses, applied = [], [], 0
        for taken in each_step(context, trainer, range(first, 30), rate_of=0):
            applied += taken.agreed.finite
            scales.append(trainer.loss_scale.scale)
            losses.append(taken.agreed.loss)
            if taken.step + 1 == args["save_at"] and not args.get("load"):
                _save(context, trainer, args["save_at"])
        return [scales, losses, applied]

    on_rank(context, work)


def moving_experts(context: WorkerContext) -> None:
    """Train to `args["until"]` and save to `args["save"]`; after step `args["move_after"]` every
    layer's experts are dealt out anew. Losses, moves, and the experts held before and after."""

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        losses, moves = [], []
        load, until = context.args.get("load"), context.args["until"]
        first = load_state(trainer, newest(load)) if load else 0
        held = [_held_experts(trainer)]
        for taken in each_step(context, trainer, range(first, until)):
            agreed = taken.agreed
            moves += [asdict(move) for move in taken.moves]
            losses.append([agreed.loss, agreed.grad_norm, agreed.router_loss])
            if taken.step + 1 == context.args["move_after"]:
                _deal_anew(trainer)
        held.append(_held_experts(trainer))
        _save(context, trainer, until)
        return {"losses": losses, "moves": moves, "held": held}

    on_rank(context, work)


def _save(context: WorkerContext, trainer: Trainer, step: int) -> None:
    root = StoreAt(context.args["save"])
    save(root, step, trainer.mesh, owned_state(trainer), trainer_meta(trainer))


def _held_experts(trainer: Trainer) -> list[list[int]]:
    ep = trainer.mesh.experts.ep.index
    return [list(moe.placement.on(ep)) for moe in trainer.routing.layers.values()]


def _deal_anew(trainer: Trainer) -> None:
    """Odd experts to the first half of the places, even ones to the second, each backwards."""
    for layer, moe in trainer.routing.layers.items():
        experts = sorted(moe.placement.experts, key=lambda e: (e % 2 == 0, -e))
        trainer.replacer.move(layer, Placement(tuple(experts), moe.placement.ep))


def layers_present(context: WorkerContext) -> None:
    """For each kind of action of a step, the most layers that were gathered after one of them."""

    def work(trainer: Trainer, _mesh: Mesh) -> Any:
        most: dict[str, int] = {}
        right = trainer.pipeline._execute

        def watched(state: Any, i: int, action: Action, batches: Tensor) -> None:
            right(state, i, action, batches)
            layers = [g for g in trainer.data.groups if g.slots[0].name.startswith("layers.")]
            present = sum(g.weights.buffer.untyped_storage().nbytes() > 0 for g in layers)
            most[action.kind] = max(most.get(action.kind, 0), present)

        trainer.pipeline._execute = watched  # type: ignore[method-assign] # to look on
        trainer.gradients(batches_of(context, trainer, 0))
        return most

    on_rank(context, work)
