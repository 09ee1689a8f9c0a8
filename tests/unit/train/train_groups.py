"""Flat groups and meshes without processes, for unit tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.plan.layout import Layout
from meshwright.train import mesh
from meshwright.train.comm import Axis, Clock, Pending
from meshwright.train.nn.linear import WeightGradients
from meshwright.train.parallel.accumulate import Scatters
from meshwright.train.parallel.flat import Copies, FlatGroup, Slot, Storage


def alone() -> Axis:
    """An axis of one rank."""
    return Axis((0,), 0, None, Clock())


@dataclass(frozen=True)
class Twins(Axis):
    """This rank as the first of `size` that do the same; notes sizes of what is scattered."""

    scattered: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, size: int) -> Twins:
        """An axis of `size` ranks."""
        return cls(tuple(range(size)), 0, None, Clock())

    def start_all_reduce(self, x: Tensor) -> Pending:
        """`size` times `x`."""
        return Pending(None, self.clock, lambda: x.mul_(self.size))

    def start_all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`x` so often."""
        repeats = [self.size, *[1] * (x.dim() - 1)]
        return Pending(None, self.clock, lambda: out.copy_(x.repeat(repeats)))

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """`size` times the first slice."""
        self.scattered.append(x.numel())
        return Pending(None, self.clock, lambda: out.copy_(x.chunk(self.size)[0] * self.size))


def mesh_of(layout: Layout, rank: int) -> mesh.Mesh:
    """The mesh of one rank of `layout`; nobody can talk on it."""
    with patch("torch.distributed.new_group", return_value=None):
        return mesh.build_mesh(layout, rank, Clock())


def slot_of(name: str, shape: tuple[int, ...], **more: bool) -> Slot:
    """A slot of a module of its own that is all of a tensor."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    zero = (0,) * len(shape)
    return Slot(name, module, "weight", shape, shape, zero, decay=len(shape) > 1, **more)


def flat_group(
    parameters: list[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    zero: int = 0,
    shards: Axis | None = None,
) -> FlatGroup:
    """A group that holds `parameters` with these values; on the first of equal `shards`."""
    slots = [slot_of(name, tuple(value.shape), whole=True) for name, value in parameters]
    axis, host = shards or alone(), torch.device("cpu")
    storage = Storage(dtype, torch.float32, zero, host, host)
    copies = Copies(axis, alone(), axis, alone(), Scatters())
    group = FlatGroup(slots, copies, storage, WeightGradients())
    values = dict(parameters)
    for slot, here, part in group.spans():
        group.master[here] = values[slot.name].flatten()[part]
    group.weights.start_refresh()
    group.weights.finish_refresh()
    return group
