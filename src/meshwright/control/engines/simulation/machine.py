"""What the chips of a simulated cluster are by nature: no two are quite alike, by its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import ConfigError
from meshwright.catalog import Chip, Cluster, cluster
from meshwright.control.engines.engine import ClusterOrder
from meshwright.control.engines.simulation.dice import Floats, Words, mix, normal, uniform
from meshwright.control.spec import ClusterSpec

Ints = npt.NDArray[np.int64]

ASSUMED_POWER_W = 500.0  # of a chip whose maker says nothing; Trainium2 is taken for about that
CLOCK_MHZ = 1400.0  # at full speed; Trainium2's engines run at 1.4 GHz
LIMIT_C = 85.0  # a chip slows down to stay below
RISE_C = 50.0  # of a chip at its full power above the air around it
ROOM_C = 22.0  # of the air that enters a rack
TAU_S, MEMORY_TAU_S = 25.0, 45.0  # by which core and memory follow (RC of a heat sink under air)
_RACK = 8  # nodes, the higher the warmer
_RACK_C, _ROW_C = 4.0, 3.0  # from the lowest node of a rack to the highest; from front to back
_IDLE, _BUSY = 0.13, 0.80  # shares of its full power, at rest and by work above that


@dataclass(frozen=True)
class Machine:
    """The chips of a cluster, by number; `near` are those that a chip has links to, -1: none."""

    catalogue: Cluster
    count: int
    per_node: int
    power_w: float
    memory_bytes: float
    link_bytes_s: float
    outer_bytes_s: float
    key: Words
    near: Ints
    speed: Floats  # share of the nominal
    ambient_c: Floats
    rise_c_w: Floats  # C for each W
    idle_w: Floats
    busy_w: Floats

    @property
    def chip(self) -> Chip:
        """Of the catalogue."""
        return self.catalogue.chip

    @property
    def nodes(self) -> int:
        """In all; the last may be a part of one."""
        return -(-self.count // self.per_node)

    def node(self, number: int) -> slice:
        """Its chips."""
        start = number * self.per_node
        return slice(start, min(start + self.per_node, self.count))


def catalogued(spec: ClusterSpec) -> Cluster:
    """The cluster that `spec` names. Raises ConfigError naming the key."""
    try:
        one = cluster(f"{spec.instance}:1")
        per_node = spec.chips_per_node or cluster(f"{spec.instance}:16").chips_per_node
    except ConfigError as error:
        raise ConfigError("instance", spec.instance, error.fix) from None
    try:
        return cluster(f"{spec.instance}:{spec.nodes * per_node}")
    except ConfigError as error:
        if "no such" in error.fix:  # an instance that the catalogue lacks
            raise ConfigError("instance", spec.instance, error.fix) from None
        key = "chips_per_node" if spec.chips_per_node else "nodes"
        value = spec.chips_per_node or spec.nodes
        raise ConfigError(key, value, f"{one.title}: {error.fix}") from None


def machine(order: ClusterOrder, replaced: Mapping[int, int]) -> Machine:
    """The chips of `order`; `replaced`: how often each node was replaced by another machine."""
    found, spec, per_node = catalogued(order.spec), order.spec, order.chips_per_node
    chips = np.arange(order.chips)
    node, place = chips // per_node, chips % per_node
    born = np.zeros(order.chips, np.uint64)
    for number, times in replaced.items():
        born[node == number] = times
    key = mix(spec.seed, chips.astype(np.uint64), born)
    power_w = found.chip.power_w or ASSUMED_POWER_W
    memory_gib = spec.memory_gib_per_chip
    inner, outer = found.levels[0], found.levels[-1]
    network = spec.network.bandwidth_gb_s
    height, depth = node % _RACK / (_RACK - 1), place / max(1, per_node - 1)
    return Machine(
        catalogue=found,
        count=order.chips,
        per_node=per_node,
        power_w=power_w,
        memory_bytes=memory_gib * 2.0**30 if memory_gib else found.chip.memory_bytes,
        link_bytes_s=inner.bandwidth_bytes_s,
        outer_bytes_s=network * 1e9 if network else outer.bandwidth_bytes_s,
        key=key,
        near=_neighbours(found, order.chips, spec.network.topology == "torus"),
        speed=1.0 + 0.012 * np.clip(normal(key, 1), -3, 3),
        ambient_c=ROOM_C + _RACK_C * height + _ROW_C * depth + uniform(key, 2),
        rise_c_w=RISE_C / power_w * (1.0 + 0.03 * np.clip(normal(key, 3), -3, 3)),
        idle_w=_IDLE * power_w * (1.0 + 0.05 * np.clip(normal(key, 4), -3, 3)),
        busy_w=_BUSY * power_w * (1.0 + 0.02 * np.clip(normal(key, 5), -3, 3)),
    )


def _neighbours(found: Cluster, count: int, torus: bool) -> Ints:
    """The chips that each has a link to in its domain: two along each dimension of a torus, all
    others where links go through a switch (then the next two stand for them)."""
    level = found.levels[0]
    chips = np.arange(count)
    first = chips // level.size * level.size
    shape = level.shape if torus and level.shape else (level.size,)
    wraps = level.wraps if torus and level.shape else (True,)
    within, stride, columns = chips - first, 1, []
    for extent, wrapped in zip(reversed(shape), reversed(wraps), strict=True):
        place = within // stride % extent
        for step in (-1, 1):
            moved = place + step
            inside = np.full(count, extent > 1) if wrapped else (moved >= 0) & (moved < extent)
            other = first + within + (moved % extent - place) * stride
            columns.append(np.where(inside & (other < count), other, -1))
        stride *= extent
    return np.stack(columns, axis=1)
