"""Linear layers of many experts at once: rows sorted by expert, a stacked weight [groups, out, in].

Every function here moves or multiplies whole rows, and no result depends on more than a group's own
rows and weight, so an expert computes the same bits wherever it lives. (For the products that holds
where rows are multiples of 64 bytes, which any useful width is.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.train.autograd import apply
from meshwright.train.nn.linear import Arithmetic, Deliver, WeightGradients

Counts = list[int]


class Grouped(nn.Module):
    """Base of a module whose parameters are stacked weights [groups, out, in].

    `arithmetic` and `later` are as in `Linear`; `delivers` has the deliverer of each parameter by
    name. `merge`, where set, turns a stacked gradient into the one to be used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arithmetic: Arithmetic | None = None
        self.later: WeightGradients | None = None
        self.delivers: dict[str, Deliver] = {}
        self.merge: Callable[[Tensor], Tensor] | None = None

    def product(self, name: str, x: Tensor, counts: Counts) -> Tensor:
        """Rows x [n, in] times their group's matrix of parameter `name`, [n, out].

        The first counts[0] rows are of group 0, and so on; a group without rows is fine.
        """
        return apply(_Product, x, getattr(self, name), counts, self, name)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Counts, module: Grouped, name: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.module, ctx.name = counts, module, name
        arithmetic = module.arithmetic
        own = None if arithmetic is None else lambda rows, i: arithmetic.forward(rows, weight[i])
        return _by_rows(x, weight.transpose(1, 2), counts, own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        counts, module, g = ctx.counts, ctx.module, grads[0].contiguous()
        arithmetic, merge = module.arithmetic, module.merge
        own = None if arithmetic is None else lambda rows, i: arithmetic.grad_input(rows, weight[i])
        grad_x = _by_rows(g, weight, counts, own)

        @torch.no_grad()  # it may run outside of the backward pass
        def make() -> Tensor:
            grad = _weight_gradient(g, x, counts, arithmetic)
            return grad if merge is None else merge(grad)

        deliver = module.delivers.get(ctx.name)
        if module.later is None or deliver is None:
            return grad_x, make(), None, None, None
        module.later.put(make, deliver)
        return grad_x, None, None, None, None


def _by_rows(
    a: Tensor, b: Tensor, counts: Counts, own: Callable[[Tensor, int], Tensor] | None
) -> Tensor:
    """Rows of `a` [n, k] times their group's matrix of `b` [groups, k, m]; `own` replaces that."""
    if own is None and _one_kernel(a):
        return F.grouped_mm(a, b, offs=_ends(counts, a.device))
    out = a.new_empty(a.shape[0], b.shape[2])
    for group, rows in _groups(counts):
        if own is None:
            torch.mm(a[rows], b[group], out=out[rows])
        else:
            out[rows] = own(a[rows], group)
    return out


def _weight_gradient(g: Tensor, x: Tensor, counts: Counts, arithmetic: Arithmetic | None) -> Tensor:
    """g.T @ x of each group, [groups, m, k]; zero where a group has no rows."""
    if arithmetic is None and _one_kernel(g):
        out = F.grouped_mm(g.t(), x, offs=_ends(counts, g.device))
    else:
        out = g.new_empty(len(counts), g.shape[1], x.shape[1])
        for group, rows in _groups(counts):
            if arithmetic is None:
                torch.mm(g[rows].t(), x[rows], out=out[group])
            else:
                out[group] = arithmetic.grad_weight(g[rows], x[rows])
    for group, count in enumerate(counts):
        if not count:
            out[group].zero_()
    return out


def _one_kernel(x: Tensor) -> bool:
    """Whether one grouped kernel does all groups."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0 and x.shape[1] % 8 == 0


def _ends(counts: Counts, device: torch.device) -> Tensor:
    """Where each group ends. From pinned memory, since a copy from elsewhere would wait for what
    the GPU has to do."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)


def _groups(counts: Counts) -> Iterator[tuple[int, slice]]:
    """Each group that has rows, and which."""
    for group, end in enumerate(accumulate(counts)):
        if counts[group]:
            yield group, slice(end - counts[group], end)


def gated(gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
    """silu(gate) * up, rows [n, ffn] of groups `counts`. Only the inputs are kept for backward."""
    return apply(_Gated, gate, up, counts)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.counts = counts
        out = torch.empty_like(gate)
        for rows in _runs(gate, counts):
            torch.mul(F.silu(gate[rows]), up[rows], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), g = ctx.saved_tensors, grads[0]
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        for rows in _runs(gate, ctx.counts):
            torch.mul(g[rows], F.silu(gate[rows]), out=grad_up[rows])
            grad_gate[rows] = torch.ops.aten.silu_backward(g[rows] * up[rows], gate[rows])
        return grad_gate, grad_up, None


def _runs(x: Tensor, counts: Counts) -> Iterator[slice]:
    """All rows at once on a GPU. A CPU takes the last elements of a run by other instructions, with
    other roundings: by group, so that they do not depend on which groups are neighbours."""
    if x.is_cuda:
        yield slice(None)
    else:
        yield from (rows for _, rows in _groups(counts))


def spread(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Tokens x [n, hidden] as one row for each assignment: row i is token order[i] // top_k.

    `order` holds different ones of the n * top_k assignments. The gradient of a token adds up
    those of its rows in the order of its choices, whatever `order` is.
    """
    return apply(_Spread, x, order, top_k)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (x.shape[0], top_k, x.shape[1])
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _by_token(grads[0], order, ctx.shape).sum(1), None, None


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Undo `spread`: the weighted sum of each token's rows, [n, hidden], added up in fp32.

    rows [assignments, hidden], `order` as in `spread`, weights fp32 [n, top_k]. A choice without a
    row counts as zero. The result has the type of `rows`.
    """
    return apply(_Combine, rows, order, weights)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        each = _by_token(rows, order, (*weights.shape, rows.shape[1]))
        ctx.save_for_backward(each, order, weights)
        total = each.new_zeros(each.shape[0], each.shape[2], dtype=torch.float32)
        for choice in range(weights.shape[1]):
            total.addcmul_(each[:, choice].float(), weights[:, choice, None])
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        each, order, weights = ctx.saved_tensors
        g = grads[0].float()
        grad_each, grad_weights = torch.empty_like(each), torch.empty_like(weights)
        for choice in range(weights.shape[1]):
            grad_each[:, choice] = g * weights[:, choice, None]
            grad_weights[:, choice] = (g * each[:, choice]).sum(-1)
        return grad_each.flatten(0, 1)[order], None, grad_weights


def _by_token(rows: Tensor, order: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Rows of assignments `order` as [tokens, top_k, hidden]; zero where there is none."""
    each = rows.new_zeros(shape)
    each.flatten(0, 1)[order] = rows
    return each


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order], with a gradient that only moves rows; `inverse` undoes `order`."""
    return apply(_Permute, x, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
