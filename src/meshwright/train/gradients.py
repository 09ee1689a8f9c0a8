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

_ROW = 4096  # numbers whose squares are added up in fp32


@dataclass(frozen=True)
class Vote:
    """What all ranks agree on at the end of a step; `grad_norm` is that of the mean gradient,
    `router_loss` what the routers' losses add to the mean `loss`; `bad` samples were left out;
    `save` says how the step is to be saved (see `saving.Due`), by the first rank's clock."""

    loss: float
    tokens: int
    grad_norm: float
    stop: bool
    router_loss: float = 0.0
    bad: int = 0
    save: int = 0

    @property
    def finite(self) -> bool:
        """Whether the step can be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def finish_gradients(groups: list[FlatGroup], mesh: Mesh) -> None:
    """Add the parts of gradients that stand on ranks outside the data-parallel axes.

    Weights that every tp rank holds whole may have seen only their slice of the sequence, or only
    their rank's heads or experts: summed over tp. A tied table has a part from the embedding and
    one from the head: summed over both ends. An expert at several places has a part at each. After
    this every gradient is the sum over all tokens of the step.
    """
    spans = [(slot, group.grad[here]) for group in groups for slot, here, _ in group.spans()]
    _sum_over(mesh.parts, [grad for slot, grad in spans if slot.partial])
    _sum_tied(mesh.ends, [grad for slot, grad in spans if slot.tied])


def _sum_over(axis: Axis, parts: list[Tensor]) -> None:
    """Sum `parts` over `axis`, in place, in one collective."""
    if axis.size == 1 or not parts:
        return
    packed = torch.cat(parts)
    axis.all_reduce(packed)
    for part, total in zip(parts, packed.split([p.numel() for p in parts]), strict=True):
        part.copy_(total)


def _sum_tied(ends: Axis, copies: list[Tensor]) -> None:
    """Sum the parts of the tied table, of which a rank that runs both ends has two."""
    if len(copies) == 2:
        copies[0].add_(copies[1])
        copies[1].copy_(copies[0])
        return
    _sum_over(ends, copies)


def counts_here(group: FlatGroup, slot: Slot, mesh: Mesh) -> bool:
    """Whether this rank answers for `slot`: of all equal copies exactly one does."""
    sliced_or_first = not slot.whole or mesh.tp.index == 0
    return group.replicas.index == 0 and not slot.copy and sliced_or_first


def square_sum(groups: list[FlatGroup], mesh: Mesh) -> Tensor | float:
    """Sum of squares of the gradients this rank answers for, fp64."""
    # An expert that changes places is cut and added up elsewhere: in fp64 no bit of the clip shows.
    precise = torch.float64 if mesh.layout.rebalance_above else torch.float32
    squares = [
        _squares(group.grad[here], precise)
        for group in groups
        for slot, here, _ in group.spans()
        if counts_here(group, slot, mesh)
    ]
    return torch.stack(squares).sum() if squares else 0.0


def _squares(x: Tensor, precision: torch.dtype) -> Tensor:
    """Sum of squares of a flat `x`, fp64, from norms of rows in `precision`.

    A norm of millions of numbers in fp32 is off by 1e-3 on a CPU, which adds them one by one; that
    of a row is not, and fp64 throughout would take ten times as long.
    """
    edge = x.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:edge].view(-1, _ROW), dim=1, dtype=precision)
    rest = torch.linalg.vector_norm(x[edge:], dtype=precision)
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def vote(
    groups: list[FlatGroup],
    sums: StepSums,
    mesh: Mesh,
    stop: bool,
    loss_scale: float = 1.0,
    bad: int = 0,
    save: int = 0,
) -> Vote:
    """Agree on loss, valid tokens, gradient norm and whether to stop or save, in one small
    all-reduce: the one time in a step that this process waits for the chip. All but one rank have
    nothing to say on `save`.

    Gradients are those of `loss_scale` times the loss; what is agreed on is not.
    """
    # The other tp ranks have computed the same; only the last stage has any loss or tokens.
    counted = mesh.tp.index == 0
    mine = [
        square_sum(groups, mesh),
        sums.loss if counted else 0.0,
        sums.tokens if counted else 0.0,
        float(stop),
        sums.penalty,
        bad,
        save,
    ]
    total = torch.stack([_fp64(x, sums.loss.device) for x in mine])
    mesh.world.all_reduce(total)
    squares, loss, tokens, stops, penalty, left_out, saves = total.tolist()
    count = max(tokens, 1.0)
    # In fp32 it is the same whatever the order in which ranks and experts were added up in fp64.
    norm = float(torch.tensor(math.sqrt(squares) / loss_scale, dtype=torch.float32))
    return Vote(
        loss=loss / count,
        tokens=int(tokens),
        grad_norm=norm / count,
        stop=stops > 0,
        router_loss=penalty / count,
        bad=int(left_out),
        save=int(saves),
    )


def _fp64(x: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.double()
    return torch.full((), x, dtype=torch.float64, device=device)


def gradient_divisor(agreed: Vote, clip: float, loss_scale: float = 1.0) -> float:
    """What the summed gradients are divided by: the valid tokens and the loss scale, and more where
    the norm of their mean exceeds `clip`, so that it comes to `clip`."""
    return max(agreed.tokens, 1) * max(1.0, agreed.grad_norm / clip) * loss_scale
