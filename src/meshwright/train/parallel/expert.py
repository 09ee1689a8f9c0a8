"""Expert parallelism: rows travel to the ranks that host their experts and back (arXiv 2006.16668).

Nothing is dropped here, whatever the imbalance, and a rank without rows joins every exchange. An
expert's rows come sorted by source rank, then token, wherever it lives: a re-placement changes no
bit of outputs or gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plan.experts import Placement
from meshwright.train.autograd import apply
from meshwright.train.comm import Axis
from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.grouped import permute
from meshwright.train.nn.linear import WeightGradients
from meshwright.train.nn.moe import Experts, MoE, run_here


def apply_expert_parallel(
    model: nn.Module,
    ep: Axis,
    etp: Axis | None,
    sequence: Axis,
    placement: Placement,
    enter: Boundary = stay,
    leave: Boundary = stay,
) -> None:
    """Cut the (meta) experts of every MoE layer to this rank's places and widths.

    `etp` is the tp axis where its ranks share each expert's width (None: each rank routes tokens of
    its own); `enter` and `leave` are then the boundaries of tensor parallelism. `sequence` joins
    the ranks that route parts of the same sequences: cp, and tp too where it slices them, varying
    fastest.
    """
    widths = 1 if etp is None else etp.size
    for module in model.modules():
        if not isinstance(module, MoE):
            continue
        for name, whole in list(module.experts.named_parameters(recurse=False)):
            shape = [placement.per_rank, *whole.shape[1:]]
            shape[2 if name == "down" else 1] //= widths
            setattr(module.experts, name, nn.Parameter(whole.new_empty(shape)))
        module.router.sequence = sequence
        module.dispatch = Exchange(ep)
        set_placement(module, ep, placement)
        if widths > 1:
            module.router.copies = widths
            module.enter, module.leave = enter, leave


def set_placement(moe: MoE, ep: Axis, placement: Placement) -> None:
    """Send tokens to the places of `placement`; the trainer moves the weights (`move_experts`)."""
    moe.host(placement)
    add_up = partial(add_up_replicas, ep, placement)
    moe.experts.merge = add_up if placement.replicated else None


@dataclass(frozen=True)
class Exchange:
    """The dispatch of experts shared out over `ep`, equally many places on each rank."""

    ep: Axis

    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        """Rows [n, hidden] sorted by place, counts int64 [places] of all ranks; the experts'
        results in the order of `rows`."""
        ep = self.ep
        if ep.size == 1:
            return run_here(rows, counts, experts)
        per_rank = [counts.numel() // ep.size] * ep.size
        arriving = torch.empty_like(counts)
        ep.all_to_all(arriving, counts, per_rank, per_rank)
        table = torch.stack((counts, arriving)).view(2, ep.size, -1)
        sent, received = table.sum(2).tolist()
        order, inverse = _place_order(table[1], sum(received))
        here = _travel(rows, ep, received, sent, experts.later)
        done = experts(permute(here, order, inverse), table[1].sum(0).tolist())
        return _travel(permute(done, inverse, order), ep, sent, received, experts.later)


def _place_order(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`total` rows that come by source rank, then place, counts [ranks, places]: the order by
    place, then source rank, and its inverse."""
    ranks, places = counts.shape
    place = torch.arange(places, device=counts.device).repeat(ranks)
    of_rows = place.repeat_interleave(counts.flatten(), output_size=total)
    order = torch.argsort(of_rows, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse


def _travel(
    x: Tensor, ep: Axis, received: list[int], sent: list[int], later: WeightGradients | None
) -> Tensor:
    return apply(_Travel, x, ep, received, sent, later)


class _Travel(torch.autograd.Function):
    """Rows to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ep: Axis,
        received: list[int],
        sent: list[int],
        later: WeightGradients | None,
    ) -> Tensor:
        ctx.ep, ctx.received, ctx.sent, ctx.later = ep, received, sent, later
        out = x.new_empty(sum(received), x.shape[1])
        ep.all_to_all(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        g = grads[0].contiguous()
        out = g.new_empty(sum(ctx.sent), g.shape[1])
        pending = ctx.ep.start_all_to_all(out, g, ctx.sent, ctx.received)
        if ctx.later is not None:
            ctx.later.overlap()
        pending.wait()
        return out, None, None, None, None


def add_up_replicas(ep: Axis, placement: Placement, grad: Tensor) -> Tensor:
    """A stacked gradient [places of this rank, ...] in which every place of a replicated expert has
    the sum over all of its places, the same bits on each."""
    slots = {expert: i for i, expert in enumerate(placement.replicated)}
    mine = [(i, slots[e]) for i, e in enumerate(placement.on(ep.index)) if e in slots]
    totals = grad.new_zeros(len(slots), *grad.shape[1:], dtype=torch.float32)
    for place, slot in mine:
        totals[slot] += grad[place]
    ep.all_reduce(totals)
    for place, slot in mine:
        grad[place] = totals[slot]
    return grad


def gather_by_expert(ep: Axis, placement: Placement, values: Tensor) -> Tensor:
    """`values` [places of this rank, ...] of all ranks as [experts, ...], one of each expert.

    What is added up over experts in this order has the same bits in every placement.
    """
    everywhere = values.new_empty(len(placement.experts), *values.shape[1:])
    ep.all_gather(everywhere, values.contiguous())
    first = [places[0] for places in placement.places]
    return everywhere[torch.tensor(first, device=values.device)]


def move_experts(ep: Axis, old: Placement, new: Placement, stacked: Tensor) -> Tensor:
    """`stacked` [places of this rank, ...] of placement `old`, as placement `new` says; no bit of a
    row changes. For weights, masters and moments, each whole in its rows."""
    moves = [(_source(old, new, place), place) for place in range(len(new.experts))]
    rank, size = ep.index, ep.size
    home = rank * old.per_rank
    leaving = [s - home for s, _ in moves if s // old.per_rank == rank]
    coming = [(s // old.per_rank, p) for s, p in moves if p // new.per_rank == rank]
    sent = _tally((p // new.per_rank for s, p in moves if s // old.per_rank == rank), size)
    received = _tally((source for source, _ in coming), size)
    rows = stacked[torch.tensor(leaving, dtype=torch.int64, device=stacked.device)]
    arrived = stacked.new_empty(len(coming), *stacked.shape[1:])
    ep.all_to_all(arrived, rows, received, sent)
    out = torch.empty_like(arrived)
    targets = [place - rank * new.per_rank for _, place in sorted(coming)]
    out[torch.tensor(targets, dtype=torch.int64, device=out.device)] = arrived
    return out


def _source(old: Placement, new: Placement, place: int) -> int:
    """The old place that fills new `place`: one of the same rank if there is any."""
    rank, candidates = place // new.per_rank, old.places[new.experts[place]]
    return min(candidates, key=lambda p: (p // old.per_rank != rank, p))


def _tally(ranks: Iterable[int], size: int) -> list[int]:
    listed = list(ranks)
    return [listed.count(rank) for rank in range(size)]
