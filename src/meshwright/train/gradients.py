"""From this rank's summed gradients to the step's mean gradient, clipped by one global norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.train.comm import Axis
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.flat import FlatGroup, Slot
from meshwright.train.parallel.pipeline import StepSums


@dataclass(frozen=True)
class Vote:
    """What all ranks agree on at the end of a step; `grad_norm` is that of the mean gradient."""

    loss: float
    tokens: int
    grad_norm: float
    stop: bool


def finish_gradients(groups: list[FlatGroup], mesh: Mesh) -> None:
    """Add the parts of gradients that stand on ranks outside the data-parallel axes.

    Weights that every tp rank holds whole saw only their slice of the sequence: summed over tp. A
    tied table has a part from the embedding and one from the head: summed over both ends. After
    this every gradient is the sum over all tokens of the step.
    """
    spans = [(slot, group.grad[here]) for group in groups for slot, here, _ in group.spans()]
    if mesh.layout.sequence_parallel:
        _sum_over(mesh.tp, [grad for slot, grad in spans if slot.whole])
    _sum_over(mesh.ends, [grad for slot, grad in spans if slot.tied])


def _sum_over(axis: Axis, parts: list[Tensor]) -> None:
    """Sum `parts` over `axis`, in place, in one collective."""
    if axis.size == 1 or not parts:
        return
    packed = torch.cat(parts)
    axis.all_reduce(packed)
    for part, total in zip(parts, packed.split([p.numel() for p in parts]), strict=True):
        part.copy_(total)


def counts_here(slot: Slot, mesh: Mesh) -> bool:
    """Whether this rank answers for `slot`: of all equal copies exactly one does."""
    return mesh.at.dp_replicate == 0 and not slot.copy and (not slot.whole or mesh.tp.index == 0)


def square_sum(groups: list[FlatGroup], mesh: Mesh) -> float:
    """Sum of squares of the gradients this rank answers for."""
    norms = [
        torch.linalg.vector_norm(group.grad[here])
        for group in groups
        for slot, here, _ in group.spans()
        if counts_here(slot, mesh)
    ]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def vote(groups: list[FlatGroup], sums: StepSums, mesh: Mesh, stop: bool) -> Vote:
    """Agree on loss, valid tokens, gradient norm and whether to stop, in one small all-reduce."""
    reports_loss = mesh.last_stage and mesh.tp.index == 0
    mine = [
        square_sum(groups, mesh),
        float(sums.loss) if reports_loss else 0.0,
        float(sums.tokens) if reports_loss else 0.0,
        float(stop),
    ]
    total = torch.tensor(mine, dtype=torch.float64)
    mesh.world.all_reduce(total)
    squares, loss, tokens, stops = total.tolist()
    count = max(tokens, 1.0)
    return Vote(loss / count, int(tokens), math.sqrt(squares) / count, stops > 0)


def gradient_divisor(agreed: Vote, clip: float) -> float:
    """What the summed gradients are divided by: the valid tokens, and more where the norm of their
    mean exceeds `clip`, so that it comes to `clip`."""
    return max(agreed.tokens, 1) * max(1.0, agreed.grad_norm / clip)
