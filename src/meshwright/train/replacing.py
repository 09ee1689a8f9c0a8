"""Experts that change places: when, and how their weights and moments follow.

Every rank of a stage sees the same loads and so decides alike; what moves is bytes, never numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.pieces import FloatArray
from meshwright.plan.experts import Placement, Trigger, imbalance, rebalance
from meshwright.train.mesh import Mesh
from meshwright.train.nn.moe import MoE
from meshwright.train.parallel.expert import move_experts, set_placement
from meshwright.train.parallel.flat import FlatGroup, Slot

_PLACES = "router.places/layers.{}.mlp.router"
_TRIGGER = "router.trigger/layers.{}.mlp.router"


@dataclass(frozen=True)
class Move:
    """Experts of a layer that changed places, and the chips' imbalance (max / mean) around it."""

    layer: int
    moved: int
    before: float
    after: float


class ExpertHome(NamedTuple):
    """Where the experts of one layer live on this rank: module, flat group, and everything that is
    laid out like the group's master (itself, and the optimizer's moments)."""

    moe: MoE
    group: FlatGroup
    flats: tuple[Tensor, ...]


class Replacer:
    """Watches the load of every layer and re-places its experts when an imbalance lasts."""

    def __init__(self, homes: dict[int, ExpertHome], mesh: Mesh) -> None:
        self._homes, self._mesh = homes, mesh
        self._triggers = {layer: Trigger() for layer in homes}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps where experts move: places, and how long an imbalance has lasted.
        fp32, as all that checkpoints hold."""
        if not self._mesh.layout.rebalance_above:
            return {}
        kept: dict[str, Tensor] = {}
        for layer, home in self._homes.items():
            kept[_PLACES.format(layer)] = torch.tensor(home.moe.placement.experts).float()
            kept[_TRIGGER.format(layer)] = torch.tensor(self._triggers[layer].as_numbers()).float()
        return kept

    def restore(self, saved: Mapping[str, FloatArray]) -> None:
        """Go on from a `state`, before weights are loaded. Places of another number, as more
        replicas make, are left as they are."""
        for layer, home in self._homes.items():
            places, old = saved.get(_PLACES.format(layer)), home.moe.placement
            if places is None or len(places) != len(old.experts):
                continue
            self._settle_in(home, Placement(tuple(int(e) for e in places), old.ep))
            numbers = saved[_TRIGGER.format(layer)]
            self._triggers[layer] = Trigger.from_numbers([float(x) for x in numbers])

    def after_step(self, counts: Callable[[], dict[int, list[int]]]) -> list[Move]:
        """Take in the step's assignments by layer and expert; what has been moved."""
        above = self._mesh.layout.rebalance_above
        if not above:
            return []
        loads = counts()
        found = (self._watch(layer, loads[layer], above) for layer in self._homes)
        return [move for move in found if move is not None]

    def _watch(self, layer: int, counts: list[int], above: float) -> Move | None:
        home = self._homes[layer]
        old = home.moe.placement
        trigger = self._triggers[layer].after(counts, old, above)
        self._triggers[layer] = trigger
        new = rebalance(trigger.mean_loads, old) if trigger.due else None
        if new is None:
            return None
        self.move(layer, new)
        loads = trigger.mean_loads
        moved = sum(a != b for a, b in zip(old.experts, new.experts, strict=True))
        return Move(layer, moved, imbalance(loads, old), imbalance(loads, new))

    def move(self, layer: int, new: Placement) -> None:
        """Give the experts of `layer` the places of `new`, with their weights and moments."""
        moe, group, flats = self._homes[layer]
        ep, old = self._mesh.experts.ep, moe.placement
        for flat in flats:
            whole = flat.new_empty(group.shard_size * group.shards.size)
            group.shards.all_gather(whole, flat)
            start = 0
            for slots in _stacks(group.slots):
                stop = start + sum(slot.numel for slot in slots)
                stacked = whole[start:stop].view(len(slots), -1)
                stacked.copy_(move_experts(ep, old, new, stacked))
                start = stop
            flat.copy_(whole[group.first : group.first + group.shard_size])
        self._settle_in(self._homes[layer], new)
        group.weights.start_refresh()
        group.weights.finish_refresh()

    def _settle_in(self, home: ExpertHome, new: Placement) -> None:
        """Tokens go, and slots are named, by `new`; the numbers must follow."""
        ep = self._mesh.experts.ep
        set_placement(home.moe, ep, new)
        home.group.slots = [
            slot for slots in _stacks(home.group.slots) for slot in _renamed(slots, new, ep.index)
        ]


def _stacks(slots: list[Slot]) -> list[list[Slot]]:
    """Slots by the stacked parameter that they are rows of."""
    return [list(run) for _, run in groupby(slots, lambda slot: slot.attribute)]


def _renamed(slots: list[Slot], placement: Placement, rank: int) -> list[Slot]:
    """The slots of one stacked parameter, as the experts that they now hold."""
    first = rank * placement.per_rank
    return [
        replace(
            slot,
            box_offset=(expert, *slot.box_offset[1:]),
            copy=place != placement.places[expert][0],
        )
        for place, (slot, expert) in enumerate(zip(slots, placement.on(rank), strict=True), first)
    ]
