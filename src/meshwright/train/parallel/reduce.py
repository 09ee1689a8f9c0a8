"""How gradients are added up over an axis: all at once, level by level, in order, or compressed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from meshwright.plan.layout import Layout
from meshwright.train.comm import Axis, Pending
from meshwright.train.parallel.compress import CompressedReduction


class AllReduction(Protocol):
    """Whole sums over one axis of the mesh."""

    def start_all_reduce(self, x: Tensor) -> Pending:
        """`x` becomes the sum, in place."""


class Reduction(AllReduction, Protocol):
    """Sums, and sums of which each rank gets a slice."""

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """`out` [n] becomes this rank's slice of the sum of `x` [size * n]."""


class Hierarchical:
    """Inside the domain, then across: the slow links carry 1 / `inner.size` of the bytes.

    Source: arXiv 1909.02061; `inner` and `outer` cut one axis in two. Inside it adds up in rank
    order whatever an element's place in the buffer: with nobody across, moving an expert to another
    place changes no bit.
    """

    def __init__(self, inner: Axis, outer: Axis) -> None:
        self._inner, self._outer = inner, outer

    def start_all_reduce(self, x: Tensor) -> Pending:
        """The sum of `x` over both levels, in place."""
        whole, part = _padded(x, self._inner.size)
        scattered = self._inner.start_reduce_scatter(part, whole)

        def across() -> None:
            scattered.wait()
            self._outer.all_reduce(part)
            self._inner.all_gather(whole, part)
            x.copy_(whole[: x.numel()])

        return Pending(None, self._inner.clock, across)


def _padded(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """`x` with zeros up to a multiple of `parts`, and room for one part of it."""
    size = -(-x.numel() // parts)
    whole = x.new_zeros(size * parts)
    whole[: x.numel()] = x.flatten()
    return whole, x.new_empty(size)


def shard_reduction(axis: Axis, layout: Layout, numel: int, device: torch.device) -> Reduction:
    """How `numel` gradients are reduced and scattered over `axis` under `layout`."""
    if axis.size > 1 and layout.grad_compression != "none":
        return CompressedReduction(axis, layout.grad_compression, numel, device)
    return axis


def replica_reduction(
    axis: Axis,
    levels: tuple[Axis, Axis],
    layout: Layout,
    numel: int,
    device: torch.device,
    in_order: bool,
) -> AllReduction:
    """How `numel` gradients are added up over `axis`, which `levels` cut in two; `in_order` where
    their places in the buffer may change."""
    if axis.size > 1 and layout.grad_compression != "none":
        return CompressedReduction(axis, layout.grad_compression, numel, device)
    inner, outer = levels
    if min(inner.size, outer.size) > 1:
        return Hierarchical(inner, outer)
    return Hierarchical(axis, outer) if in_order and axis.size > 2 else axis
