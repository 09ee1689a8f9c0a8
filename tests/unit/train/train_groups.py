"""Flat groups without a process group, for unit tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.train.comm import Axis, Clock
from meshwright.train.parallel.flat import FlatGroup, Slot


def alone() -> Axis:
    """An axis of one rank."""
    return Axis((0,), 0, None, Clock())


def flat_group(
    parameters: list[tuple[str, Tensor]], dtype: torch.dtype = torch.float32
) -> FlatGroup:
    """A group that holds `parameters`, unsharded, with these values."""
    slots = []
    for name, value in parameters:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(value.shape, device="meta"))
        shape = tuple(value.shape)
        slots.append(
            Slot(
                name=name,
                module=module,
                attribute="weight",
                shape=shape,
                global_shape=shape,
                box_offset=(0,) * len(shape),
                decay=len(shape) > 1,
                whole=True,
                tied=False,
                copy=False,
            )
        )
    group = FlatGroup(slots, alone(), alone(), dtype, torch.device("cpu"))
    values = dict(parameters)
    for slot, here, _ in group.spans():
        group.master[here] = values[slot.name].flatten()
    group.refresh()
    return group
