"""Which rank sits on which chip, and what its traffic costs there."""

from __future__ import annotations

import time
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster, cluster
from meshwright.plan.layout import Axis, Layout, expert_groups, groups
from meshwright.plan.mapping import RankMap, map_ranks, ranks_in_order
from meshwright.plan.mapping_cost import Traffic, group_cost

CLUSTERS = ("p5:64", "h100:512", "gb200-nvl72:576", "mi300x:64", "trn2u:128", "v5e:256", "v5p:512")
AXES: tuple[Axis, ...] = ("tp", "cp", "dp_shard", "dp_replicate", "pp")

powers = st.sampled_from([1, 2, 4])
layouts = st.builds(
    lambda tp, cp, shard, replicate, pp: Layout(
        tp=tp, cp=cp, dp_shard=shard, dp_replicate=replicate, pp=pp, zero=1 if shard > 1 else None
    ),
    *[powers] * 5,
).filter(lambda layout: layout.world <= 64)
traffics = st.fixed_dictionaries(
    {
        axis: st.builds(
            Traffic,
            bytes=st.floats(1e6, 1e12),
            pattern=st.sampled_from(["ring", "all_to_all", "p2p"]),
            messages=st.integers(0, 1000),
        )
        for axis in AXES
    }
)


def ring(bytes_: float) -> Traffic:
    return Traffic(bytes_, "ring")


def chips_of(mapping: RankMap, members: list[int]) -> list[int]:
    return [mapping.chip_of(rank) for rank in members]


def nodes_of(mapping: RankMap, members: list[int]) -> set[int]:
    return {mapping.coordinates(rank).node for rank in members}


# Where things end up


def test_tp_stays_inside_the_node_when_its_traffic_dominates() -> None:
    layout = Layout(tp=8, dp_shard=4, pp=2, zero=1)
    traffic = {"tp": ring(100e9), "dp_shard": ring(5e9), "pp": Traffic(1e9, "p2p")}
    found = map_ranks(layout, cluster("p5:64"), traffic)
    assert all(len(nodes_of(found, members)) == 1 for members in groups(layout, "tp"))
    assert found.placements["tp"].level == "nvlink4-8"
    assert found.placements["tp"].bandwidth_bytes_s == pytest.approx(450e9)


def test_experts_share_a_domain_when_their_exchange_dominates() -> None:
    layout = Layout(dp_shard=16, tp=4, pp=1, ep=8, etp=1, zero=1)
    light_tp = {"tp": ring(1e9), "dp_shard": ring(10e9), "ep": Traffic(100e9, "all_to_all")}
    found = map_ranks(layout, cluster("p5:64"), light_tp)
    assert all(len(nodes_of(found, members)) == 1 for members in expert_groups(layout, "ep"))
    assert found.placements["ep"].level == "nvlink4-8"


def test_experts_across_pipeline_stages_get_the_node_when_their_axis_is_not_innermost() -> None:
    layout = Layout(dp_replicate=2, dp_shard=8, pp=4, ep=8, zero=1)
    traffic = {
        "ep": Traffic(100e9, "all_to_all"),
        "dp_shard": ring(1e9),
        "dp_replicate": ring(8e9),
        "pp": Traffic(1e9, "p2p"),
    }
    found = map_ranks(layout, cluster("p5:64"), traffic)
    assert found.placements["ep"].level == "nvlink4-8"
    assert all(len(nodes_of(found, members)) == 1 for members in expert_groups(layout, "ep"))


def test_a_message_to_the_next_stage_takes_the_network_and_gradients_the_node() -> None:
    layout = Layout(pp=8, dp_replicate=8)
    traffic = {"pp": Traffic(1e9, "p2p"), "dp_replicate": ring(100e9)}
    found = map_ranks(layout, cluster("p5:64"), traffic)
    assert found.placements["dp_replicate"].level == "nvlink4-8"
    turned = map_ranks(
        layout,
        cluster("p5:64"),
        {"pp": Traffic(100e9, "p2p"), "dp_replicate": ring(1e9)},
    )
    assert turned.placements["pp"].level == "nvlink4-8"


def test_without_a_reason_ranks_stay_in_order() -> None:
    layout = Layout(tp=4, dp_shard=4, pp=2, zero=1)
    found = map_ranks(layout, cluster("local:32"), {"tp": ring(1e9), "pp": Traffic(1e9, "p2p")})
    assert found.chips.tolist() == list(range(32))


def test_a_tensor_group_of_a_torus_is_a_ring_of_neighbours() -> None:
    layout = Layout(tp=16, dp_shard=16)
    found = map_ranks(layout, cluster("v5e:256"), {"tp": ring(100e9), "dp_shard": ring(10e9)})
    level = found.cluster.levels[0]
    for members in groups(layout, "tp"):
        places = [found.coordinates(rank).torus for rank in members]
        for one, other in zip(places, places[1:] + places[:1], strict=True):
            steps = [
                min((a - b) % n, (b - a) % n)
                for a, b, n in zip(one, other, level.shape, strict=True)
            ]
            assert sum(steps) == 1, (one, other)
    assert found.placements["tp"].bandwidth_bytes_s == pytest.approx(2 * level.link_bytes_s)


def test_four_ranks_fold_into_a_square_of_an_open_torus() -> None:
    """A line of 4 has one link each way at a chip, a square of 2 x 2 has two."""
    layout = Layout(tp=4, dp_shard=16)
    found = map_ranks(layout, cluster("v5e:64"), {"tp": ring(100e9), "dp_shard": ring(1e9)})
    places = [found.coordinates(rank).torus for rank in groups(layout, "tp")[0]]
    assert {len({place[dimension] for place in places}) for dimension in (0, 1)} == {2}
    link = found.cluster.levels[0].link_bytes_s
    assert found.placements["tp"].bandwidth_bytes_s == pytest.approx(2 * link)
    straight = ranks_in_order(layout, cluster("v5e:64"), {"tp": ring(100e9)})
    assert straight.placements["tp"].bandwidth_bytes_s == pytest.approx(link)


def test_an_ultraserver_takes_tp_inside_the_instance_and_the_rest_along_its_rings() -> None:
    layout = Layout(tp=16, dp_shard=4)
    found = map_ranks(layout, cluster("trn2u:64"), {"tp": ring(100e9), "dp_shard": ring(1e9)})
    assert found.placements["tp"].level == "neuronlink3-16"
    assert found.placements["tp"].bandwidth_bytes_s == pytest.approx(512e9)
    assert found.placements["dp_shard"].level == "neuronlink3-64"
    assert found.placements["dp_shard"].bandwidth_bytes_s == pytest.approx(128e9)


# What it costs


@settings(deadline=None, max_examples=60)
@given(layouts, st.sampled_from(CLUSTERS), traffics)
def test_terms_add_up_and_beat_no_wire(
    layout: Layout, ref: str, traffic: dict[str, Traffic]
) -> None:
    there = cluster(ref)
    found = map_ranks(layout, there, traffic)
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    fastest = there.levels[0].bandwidth_bytes_s
    for axis, placement in found.placements.items():
        if getattr(layout, axis) > 1:
            assert placement.seconds >= traffic[axis].bytes / fastest * (1 - 1e-9)
            assert placement.seconds >= placement.latency_s >= 0
        else:
            assert placement.seconds == 0


@settings(deadline=None, max_examples=60)
@given(layouts, st.sampled_from(CLUSTERS), traffics)
def test_every_rank_has_a_chip_of_its_own_and_the_search_beats_the_order_of_ranks(
    layout: Layout, ref: str, traffic: dict[str, Traffic]
) -> None:
    found = map_ranks(layout, cluster(ref), traffic)
    assert sorted(found.chips.tolist()) == list(range(layout.world))
    assert found.seconds <= ranks_in_order(layout, cluster(ref), traffic).seconds * (1 + 1e-9)
    for rank in (0, layout.world - 1):
        place = found.coordinates(rank)
        assert place.chip == place.node * found.cluster.chips_per_node + place.slot


def all_orders_seconds(layout: Layout, there: Cluster, traffic: dict[str, Traffic]) -> float:
    """The cheapest order of whole axes, by trying each."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    best = float("inf")
    for order in permutations(AXES):
        total, stride = 0.0, 1
        for axis in order:
            digits = ((stride, sizes[axis]),)
            total += group_cost(there, layout.world, digits, traffic[axis]).seconds
            stride *= sizes[axis]
        best = min(best, total)
    return best


@settings(deadline=None, max_examples=40)
@given(layouts, st.sampled_from(CLUSTERS), traffics)
def test_no_order_of_whole_axes_is_cheaper(
    layout: Layout, ref: str, traffic: dict[str, Traffic]
) -> None:
    found = map_ranks(layout, cluster(ref), traffic)
    assert found.seconds <= all_orders_seconds(layout, cluster(ref), traffic) * (1 + 1e-8)
    if all(piece.step == 1 for piece in found.order):
        best = all_orders_seconds(layout, cluster(ref), traffic)
        assert found.seconds == pytest.approx(best, rel=1e-8)


def all_placements_seconds(layout: Layout, there: Cluster, axis_bytes: dict[Axis, float]) -> float:
    """The cheapest of all ways to share the ranks out over two nodes; inside a node all chips are
    alike."""
    best = float("inf")
    inner, outer = there.levels
    for first in combinations(range(layout.world), inner.size):
        total = 0.0
        for axis, bytes_ in axis_bytes.items():
            worst = 0.0
            for members in groups(layout, axis):
                nodes = [rank in first for rank in members]
                crossing = len(set(nodes)) > 1
                share = min(nodes.count(node) for node in nodes)
                slow = bytes_ / (outer.bandwidth_bytes_s * share) if crossing else 0.0
                worst = max(worst, slow, bytes_ / inner.bandwidth_bytes_s if share > 1 else 0.0)
            total += worst
        best = min(best, total)
    return best


@pytest.mark.parametrize("tp, dp, pp", [(9e9, 1e9, 2e9), (1e9, 9e9, 2e9), (1e9, 2e9, 9e9)])
def test_no_placement_at_all_is_cheaper_on_eight_chips(tp: float, dp: float, pp: float) -> None:
    layout = Layout(tp=2, dp_replicate=2, pp=2)
    there = cluster("p5:16")
    halves = tuple(
        level.__class__(**{**vars(level), "size": size})
        for level, size in zip(there.levels, (4, 8), strict=True)
    )
    small = Cluster(**{**vars(there), "chips": 8, "chips_per_node": 4, "levels": halves})
    bytes_: dict[Axis, float] = {"tp": tp, "dp_replicate": dp, "pp": pp}
    found = map_ranks(layout, small, {axis: ring(amount) for axis, amount in bytes_.items()})
    assert found.seconds == pytest.approx(all_placements_seconds(layout, small, bytes_))


@settings(deadline=None, max_examples=40)
@given(layouts, st.sampled_from(CLUSTERS), traffics, st.sampled_from(AXES), st.floats(1, 100))
def test_more_traffic_never_takes_less_time(
    layout: Layout, ref: str, traffic: dict[str, Traffic], axis: Axis, times: float
) -> None:
    before = map_ranks(layout, cluster(ref), traffic).seconds
    one = traffic[axis]
    more = {**traffic, axis: Traffic(one.bytes * times, one.pattern, one.messages)}
    assert map_ranks(layout, cluster(ref), more).seconds >= before * (1 - 1e-8)


def test_faster_wires_never_take_more_time() -> None:
    layout = Layout(tp=8, dp_shard=8, pp=4, zero=1)
    traffic = {"tp": ring(50e9), "dp_shard": ring(20e9), "pp": Traffic(2e9, "p2p")}
    slow, fast = cluster("p4d:256"), cluster("p5:256")
    assert map_ranks(layout, fast, traffic).seconds < map_ranks(layout, slow, traffic).seconds


def test_groups_of_several_axes_are_priced_as_one() -> None:
    layout = Layout(tp=8, cp=2, dp_shard=4)
    both = ranks_in_order(layout, cluster("p5:64"), {"fsdp": ring(10e9)})
    one = ranks_in_order(Layout(tp=8, dp_shard=8), cluster("p5:64"), {"dp_shard": ring(10e9)})
    assert both.seconds == one.seconds


def test_16384_chips_are_mapped_within_a_second() -> None:
    layout = Layout(dp_shard=16, dp_replicate=8, tp=8, cp=2, pp=8, ep=32, zero=1)
    traffic = {
        "tp": ring(100e9),
        "cp": ring(5e9),
        "dp_shard": ring(10e9),
        "dp_replicate": ring(5e9),
        "pp": Traffic(1e9, "p2p"),
        "ep": Traffic(20e9, "all_to_all"),
    }
    there = cluster("h100:16384")
    start = time.process_time()
    found = map_ranks(layout, there, traffic)
    assert len(np.unique(found.chips)) == 16384
    assert time.process_time() - start < 1.0


def test_too_few_chips_and_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 64 chips, p5:32 has 32"):
        map_ranks(Layout(tp=8, dp_shard=8), cluster("p5:32"), {})
    with pytest.raises(ConfigError, match='did you mean "dp_shard"'):
        map_ranks(Layout(), cluster("p5:8"), {"dp_shards": ring(1.0)})
