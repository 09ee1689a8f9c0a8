"""Who keeps what of whom."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import Redundancy, check_survivable, keeping, twins

LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "tp": 2, "pp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "pp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 4, "ep": 4},
    {"tp": 5},
]


def test_replicas_are_twins_and_shards_are_not() -> None:
    found = twins(Layout(dp_replicate=2, dp_shard=2, tp=2), experts=False)
    assert found[0] == (4,) and found[5] == (1,)
    assert twins(Layout(dp_shard=4), experts=False) == [()] * 4
    assert twins(Layout(cp=2, tp=2), experts=False)[0] == (2,)


def test_experts_that_are_shared_out_have_no_twin_among_replicas() -> None:
    """With ep over both replicas every rank has experts of its own."""
    assert twins(Layout(dp_replicate=2, ep=2), experts=True) == [(), ()]
    assert twins(Layout(dp_replicate=2, ep=2), experts=False) == [(1,), (0,)]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_every_state_has_a_keeper_that_is_another_rank(axes: dict[str, Any]) -> None:
    layout = Layout(**axes)
    found = keeping(layout, "mirror", experts="ep" in axes)
    world = range(layout.world)
    assert sorted(found.keepers) == sorted(found.keepers.values()) == list(world)
    assert all(rank != keeper for rank, keeper in found.keepers.items())
    everybody = {rank: found.wards(rank) for rank in world}
    for rank in world:
        survivors = {r: kept for r, kept in everybody.items() if r != rank}
        assert found.source(rank, survivors) is not None
    # Half of the ranks is half of the nodes.
    for nodes in (n for n in (2, 4) if layout.world % n == 0):
        per_node = layout.world // nodes
        assert all(r // per_node != k // per_node for r, k in found.keepers.items())


def test_a_keeper_that_has_no_whole_copy_is_no_source() -> None:
    found = keeping(Layout(dp_shard=4), "mirror", experts=False)
    assert found.source(0, {1: (3,), 2: (0,), 3: (1,)}) == 2
    assert found.source(0, {1: (3,), 2: (), 3: (1,)}) is None


def test_auto_takes_what_costs_nothing_where_it_is_enough() -> None:
    assert keeping(Layout(dp_replicate=2), "auto", experts=False).kind == "twin"
    assert keeping(Layout(dp_shard=2), "auto", experts=False).kind == "mirror"
    assert keeping(Layout(), "auto", experts=False).kind == "none"


@pytest.mark.parametrize(
    ("axes", "kind", "words"),
    [
        ({"dp_shard": 2}, "twin", "rank 0 of fsdp2 has no twin; use mirror"),
        ({}, "mirror", "no other to keep its state"),
        ({}, "parity", "use none, or shadow with a spare"),
    ],
)
def test_what_cannot_be_kept_is_refused(axes: dict[str, Any], kind: Redundancy, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        keeping(Layout(**axes), kind, experts=False)


@pytest.mark.parametrize(
    "axes", [{"rebalance_above": 1.5, "ep": 2}, {"grad_compression": "int8"}], ids=["moves", "int8"]
)
def test_state_that_cannot_be_given_to_others_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="redundancy to none"):
        check_survivable(Layout(dp_replicate=2, **axes))
    check_survivable(Layout(dp_replicate=2, grad_compression="fp8"))


def test_a_shadow_needs_a_spare_and_without_one_left_it_is_auto() -> None:
    assert keeping(Layout(dp_shard=2), "shadow", experts=False, shadowed=True).kind == "shadow"
    assert keeping(Layout(dp_shard=2), "shadow", experts=False).kind == "mirror"
    assert keeping(Layout(dp_replicate=2), "shadow", experts=False).kind == "twin"


def test_a_copy_is_on_another_node_wherever_ranks_are() -> None:
    for nodes in ((0, 0, 0, 1), (0, 1, 0, 1), (1, 1, 0, 0), (0, 1, 2, 0)):
        found = keeping(Layout(dp_shard=4), "mirror", experts=False, nodes=nodes)
        assert all(nodes[rank] != nodes[keeper] for rank, keeper in found.keepers.items()), nodes


def test_a_parity_makes_one_lost_rank_again_and_not_two() -> None:
    found = keeping(Layout(dp_shard=4, pp=2), "parity", experts=False)
    assert found.parity == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.keepers[0] >= 4 > found.keepers[4]
    keeper = found.keepers[0]
    everybody = {rank: found.wards(rank) for rank in range(8)}
    one = {rank: wards for rank, wards in everybody.items() if rank != 1}
    assert found.source(1, one) == keeper
    two = {rank: wards for rank, wards in one.items() if rank != 2}
    assert found.source(1, two) is None and found.source(2, two) is None
    without = {rank: wards for rank, wards in one.items() if rank != keeper}
    assert found.source(1, without) is None


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2}], ids=["two ranks", "one a stage"])
def test_a_parity_of_one_rank_is_a_mirror(axes: dict[str, Any]) -> None:
    assert keeping(Layout(**axes), "parity", experts=False).kind == "mirror"
