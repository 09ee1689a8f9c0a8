"""A chip, a level of network and a cluster, in SI units, each figure with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.base.errors import ConfigError, did_you_mean

Kind = Literal["vendor", "measured", "assumed"]
Wiring = Literal["switch", "torus2d", "torus3d", "ring", "mesh", "fat_tree"]


@dataclass(frozen=True)
class Figure:
    """One number: its unit, who says so, and when it was said or read."""

    value: float
    unit: str
    source: str
    date: str
    kind: Kind


@dataclass(frozen=True)
class Chip:
    """An accelerator. `peak_flops` are dense FLOP/s of matrix products by precision."""

    name: str
    title: str
    vendor: str
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    peak_flops: Mapping[str, float]
    power_w: float | None
    figures: Mapping[str, Figure]

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of `precision`. Raises ConfigError if the catalogue has none for it."""
        if precision not in self.peak_flops:
            hint = did_you_mean(precision, self.peak_flops)
            fix = f"{self.title} has no such peak in the catalogue{hint}; known: " + ", ".join(
                self.peak_flops
            )
            raise ConfigError("precision", precision, fix)
        return self.peak_flops[precision]


@dataclass(frozen=True)
class Level:
    """One level of the network. `bandwidth_bytes_s` is what one chip sends in one direction over
    all its links of this level; `size` the chips inside one unit.

    A torus or ring has `shape`, the extent of each dimension in steps of this level, and `wraps`,
    which of them close into rings.
    """

    name: str
    title: str
    size: int
    bandwidth_bytes_s: float
    latency_s: float
    kind: Wiring
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    figures: Mapping[str, Figure]

    @property
    def link_bytes_s(self) -> float:
        """One-way bandwidth of a single link: a torus has two to a dimension, a mesh one to each
        other chip. Elsewhere a chip sends as over one."""
        if self.shape:
            return self.bandwidth_bytes_s / (2 * len(self.shape))
        return self.bandwidth_bytes_s / (self.size - 1 if self.kind == "mesh" else 1)


@dataclass(frozen=True)
class Cluster:
    """Chips and how they are joined, levels innermost first; the last one holds all chips.

    `price_per_chip_hour` is in USD; None where no price was found.
    """

    name: str
    title: str
    chip: Chip
    chips: int
    chips_per_node: int
    levels: tuple[Level, ...]
    price_per_chip_hour: float | None
    storage_bytes_s_per_node: float
    figures: Mapping[str, Figure]

    @property
    def nodes(self) -> int:
        """Machines that hold the chips."""
        return -(-self.chips // self.chips_per_node)

    @property
    def domain(self) -> int:
        """Chips joined by the scale-up fabric: those of the innermost level."""
        return self.levels[0].size

    @property
    def all_figures(self) -> dict[str, Figure]:
        """Every figure behind the cluster, by dotted name: `chip.memory_bytes`,
        `nvlink4-8.latency_s`, `price_per_chip_hour`."""
        found = {f"chip.{key}": figure for key, figure in self.chip.figures.items()}
        for level in self.levels:
            found |= {f"{level.name}.{key}": figure for key, figure in level.figures.items()}
        return {**found, **self.figures}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Figures that nobody measured or documents, as lines for a report."""
        return tuple(
            f"{key} = {figure.value:g} {figure.unit}: {figure.source}"
            for key, figure in self.all_figures.items()
            if figure.kind == "assumed"
        )
