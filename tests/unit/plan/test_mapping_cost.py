"""Seconds of the traffic of one group, from the wires on its way."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog import cluster
from meshwright.plan.mapping_cost import Digits, Traffic, group_cost, merged, spread


def cost(ref: str, digits: Digits, traffic: Traffic) -> tuple[str, float]:
    there = cluster(ref)
    found = group_cost(there, there.chips, digits, traffic)
    return found.level, found.seconds


@pytest.mark.parametrize(
    "ref, digits, pattern, level, bandwidth",
    [
        # 8 ranks of a node leave it over 8 ways; one rank of each node over one.
        ("p5:64", ((1, 64),), "ring", "efa-400g", 400e9),
        ("p5:64", ((8, 8),), "ring", "efa-400g", 50e9),
        ("p5:64", ((4, 16),), "ring", "efa-400g", 100e9),
        ("p5:64", ((1, 8),), "ring", "nvlink4-8", 450e9),
        # Of 63 peers 56 are outside.
        ("p5:64", ((1, 64),), "all_to_all", "efa-400g", 50e9 * 63 / 56),
        ("p5:64", ((8, 8),), "all_to_all", "efa-400g", 50e9),
        ("p5:64", ((1, 64),), "p2p", "efa-400g", 50e9),
        ("p5:64", ((1, 2),), "p2p", "nvlink4-8", 450e9),
        # Two chips of a mesh have one link of 64 GB/s between them.
        ("mi300x:8", ((1, 2),), "ring", "xgmi-8", 64e9),
        ("mi300x:8", ((1, 8),), "ring", "xgmi-8", 448e9),
        ("mi300x:8", ((1, 8),), "all_to_all", "xgmi-8", 448e9),
        # A closed ring of 16 passes 45 GB/s each way; interleaved groups share the links.
        ("v5e:256", ((1, 16),), "ring", "ici-v5e", 90e9),
        ("v5e:256", ((16, 16),), "ring", "ici-v5e", 90e9),
        ("v5e:256", ((1, 256),), "ring", "ici-v5e", 180e9),
        ("v5e:256", ((2, 8),), "ring", "ici-v5e", 45e9),
        ("v5e:256", ((1, 8),), "ring", "ici-v5e", 45e9),
        # The cut of a closed ring of 16: 8 chips send 8/15 of theirs over two links.
        ("v5e:256", ((1, 16),), "all_to_all", "ici-v5e", 45e9 * 15 / 32),
    ],
)
def test_bandwidth_is_what_the_wires_on_the_way_can_do(
    ref: str, digits: Digits, pattern: str, level: str, bandwidth: float
) -> None:
    traffic = Traffic(1e9, pattern)  # type: ignore[arg-type]
    reached, seconds = cost(ref, digits, traffic)
    assert reached == level
    assert seconds == pytest.approx(1e9 / bandwidth)


def test_each_step_of_a_ring_pays_the_latency_of_the_level_it_crosses() -> None:
    found = group_cost(cluster("p5:64"), 64, ((1, 16),), Traffic(1e9, "ring", messages=10))
    nvlink, efa = cluster("p5:64").levels
    # 16 ranks on two nodes: 14 steps inside, 1 between.
    assert found.latency_s == pytest.approx(10 * (14 * nvlink.latency_s + efa.latency_s))
    assert found.seconds == pytest.approx(found.latency_s + 1e9 / 400e9)


def brute_spread(digits: Digits, world: int, unit: int) -> tuple[int, int]:
    """`spread` by walking over every copy of the group."""
    most, fewest = 0, world
    firsts = [c for c in range(world) if all(c // s % n == 0 for s, n in digits)]
    for first in firsts:
        members = [first]
        for stride, size in digits:
            members = [chip + step * stride for chip in members for step in range(size)]
        units = [chip // unit for chip in members]
        most = max(most, len(set(units)))
        fewest = min(fewest, min(units.count(u) for u in units))
    return most, fewest


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([2, 3, 4, 5, 8, 9, 16]),
)
def test_spread_counts_every_copy_also_where_nothing_divides(
    sizes: list[int], data: st.DataObject, unit: int
) -> None:
    strides = [prod(sizes[:place]) for place in range(len(sizes))]
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    digits = merged(tuple((strides[place], sizes[place]) for place in sorted(chosen)))
    world = prod(sizes)
    most, fewest = brute_spread(digits, world, unit)
    found_most, found_fewest = spread(digits, world, unit)
    assert found_most == most
    assert found_fewest == fewest
