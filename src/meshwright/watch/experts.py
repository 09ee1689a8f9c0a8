"""Who got how many tokens: the loads of a mixture of experts over a run, as pure functions.

An imbalance is max / mean: 1 is even, 2 means that the fullest gets twice its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwright.base.events import ExpertLoad

Item = TypeVar("Item")


@dataclass(frozen=True)
class LayerLoads:
    """The reports of one layer, by step."""

    layer: int
    by_step: dict[int, ExpertLoad]


@dataclass(frozen=True)
class Fullest:
    """The worst of one report: the layer with the most uneven experts, and the most uneven chips of
    any layer."""

    step: int
    layer: int
    expert: int
    imbalance: float
    chip_imbalance: float


def by_layer(loads: Iterable[ExpertLoad]) -> list[LayerLoads]:
    """`loads` of each layer, by layer."""
    found: dict[int, dict[int, ExpertLoad]] = {}
    for load in loads:
        found.setdefault(load.layer, {})[load.step] = load
    return [LayerLoads(layer, by_step) for layer, by_step in sorted(found.items())]


def report_steps(loads: Iterable[ExpertLoad]) -> list[int]:
    """Steps at which any layer reported, ascending."""
    return sorted({load.step for load in loads})


def milestones(items: Sequence[Item]) -> list[Item]:
    """The first, the middle and the last of `items`; fewer where these are the same."""
    places = sorted({0, len(items) // 2, len(items) - 1}) if items else []
    return [items[place] for place in places]


def fullest(loads: Sequence[ExpertLoad]) -> Fullest | None:
    """The worst of the newest report; None without reports."""
    if not loads:
        return None
    step = max(load.step for load in loads)
    newest = [load for load in loads if load.step == step]
    worst = max(newest, key=lambda load: load.imbalance)
    chips = max(load.chip_imbalance for load in newest)
    return Fullest(step, worst.layer, worst.hottest, worst.imbalance, chips)


def imbalance_words(imbalance: float, layer: int, chip_imbalance: float | None) -> str:
    """`load max/mean 1.83 (layer 3), chips 1.31`; without chips where they are not asked about."""
    words = f"load max/mean {imbalance:.2f} (layer {layer})"
    return words if chip_imbalance is None else f"{words}, chips {chip_imbalance:.2f}"
