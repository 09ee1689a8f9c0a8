"""As `parity_faults`: what can be wrong with experts, routers and documents."""

from __future__ import annotations

from typing import Any

import torch
from parity_faults import break_in, scale_gradients
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.train import assembly, check, gradients, routing
from meshwright.train.nn import router
from meshwright.train.nn.passing import Pass
from meshwright.train.parallel import expert, pipeline, slots


def experts_scaled_by_ep(context: WorkerContext) -> None:
    """Experts get ep times their gradient, as if every rank of ep had the same tokens."""
    scale_gradients(lambda name: ".experts." in name, lambda mesh: mesh.experts.ep.size)
    check.main(context)


def router_not_summed_over_tp(context: WorkerContext) -> None:
    """A tp rank keeps the router gradient of its own experts' widths or slice of tokens."""

    def breaker(right: Any) -> Any:
        def wrong(name: str, sequence_parallel: bool) -> bool:
            return not name.endswith("router.weight") and bool(right(name, sequence_parallel))

        return wrong

    break_in(slots, "is_partial", breaker)
    check.main(context)


def _charge(scale: float) -> None:
    """Router losses count `scale` times in gradients."""

    def breaker(right: Any) -> Any:
        def wrong(x: Tensor, penalty: Tensor, by: float) -> Any:
            return right(x, penalty, by * scale)

        return wrong

    break_in(router, "charge", breaker)


def router_losses_discarded(context: WorkerContext) -> None:
    """What carries a router loss's gradient is thrown away."""
    break_in(router, "charge", lambda _: lambda x, _penalty, _scale: x)
    check.main(context)


def router_losses_times_4(context: WorkerContext) -> None:
    """Router losses are means over a micro-batch, added up over 4 of them."""
    _charge(4.0)
    check.main(context)


def router_losses_of_every_copy(context: WorkerContext) -> None:
    """Ranks that route the same tokens each charge the whole loss."""

    def breaker(right: Any) -> Any:
        def wrong(model: Any, *args: Any) -> None:
            right(model, *args)
            for module in model.modules():
                if isinstance(module, router.Router):
                    module.copies = 1

        return wrong

    break_in(assembly, "apply_expert_parallel", breaker)
    check.main(context)


def sequence_loss_of_own_part(context: WorkerContext) -> None:
    """A context-parallel rank balances its part of a sequence as if it were all of it."""

    def breaker(right: Any) -> Any:
        def wrong(self: router.Router, scores: Tensor) -> Any:
            self.sequence = None
            return right(self, scores)

        return wrong

    break_in(router.Router, "_sequence_load", breaker)
    check.main(context)


def counts_not_summed(context: WorkerContext) -> None:
    """A rank learns from its own tokens alone."""

    def wrong(self: routing.Routing) -> None:
        self._counts = {layer: moe.router.counts.clone() for layer, moe in self.layers.items()}

    break_in(routing.Routing, "sum_counts", lambda _: wrong)
    check.main(context)


def places_of_an_expert_not_summed(context: WorkerContext) -> None:
    """Each place of a replicated expert goes on with the gradient of its own tokens."""
    break_in(expert, "add_up_replicas", lambda _: lambda _ep, _placement, grad: grad)
    check.main(context)


def count_when_recomputing() -> None:
    """A layer that is run again counts its tokens again."""
    break_in(Pass, "counting", lambda _: property(lambda self: self.training))


def norms_averaged_over_ranks() -> None:
    """The norm is the mean of what each rank has, where squares must be added up."""

    def breaker(right: Any) -> Any:
        def wrong(groups: Any, mesh: Any) -> float:
            total = torch.tensor(right(groups, mesh), dtype=torch.float64).sqrt()
            mesh.world.all_reduce(total)
            # The ranks' squares are still to be added up: each gives an equal part.
            return float(total / mesh.world.size) ** 2 / float(mesh.world.size)

        return wrong

    break_in(gradients, "square_sum", breaker)


def documents_are_not_told_apart() -> None:
    """A packed sequence is taken for one document."""
    break_in(pipeline, "document_ids", lambda _: lambda tokens, _end: torch.zeros_like(tokens))
