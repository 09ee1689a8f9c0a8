"""Ranks on a layout: coordinates, groups, and how they share sequences and experts."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.plan.layout import (
    AXES,
    Axis,
    ExpertAxis,
    Layout,
    coordinates,
    domain_groups,
    expert_grid,
    expert_groups,
    expert_lanes,
    groups,
)

EXPERT_AXES: tuple[ExpertAxis, ...] = ("replicas", "shards", "ep")

sizes = st.integers(1, 3)
layouts = st.builds(Layout, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes, pp=sizes)
axis_sets = st.lists(st.sampled_from(AXES), unique=True)


@settings(deadline=None)
@given(layouts)
def test_every_rank_has_its_own_coordinates_within_the_axes(layout: Layout) -> None:
    seen = {coordinates(layout, rank) for rank in range(layout.world)}
    assert len(seen) == layout.world == prod(getattr(layout, axis) for axis in AXES)
    for where in seen:
        assert all(0 <= getattr(where, axis) < getattr(layout, axis) for axis in AXES)


@settings(deadline=None)
@given(layouts, axis_sets)
def test_groups_partition_the_ranks(layout: Layout, axes: list[Axis]) -> None:
    found = groups(layout, *axes)
    assert sorted(rank for group in found for rank in group) == list(range(layout.world))
    assert {len(group) for group in found} == {prod(getattr(layout, axis) for axis in axes)}
    assert found == sorted(sorted(group) for group in found)


@settings(deadline=None)
@given(layouts, axis_sets)
def test_ranks_of_a_group_differ_in_its_axes_only(layout: Layout, axes: list[Axis]) -> None:
    fixed = [axis for axis in AXES if axis not in axes]
    for group in groups(layout, *axes):
        where = [coordinates(layout, rank) for rank in group]
        assert all(len({getattr(place, axis) for place in where}) == 1 for axis in fixed)


@settings(deadline=None)
@given(layouts)
def test_tensor_neighbours_are_adjacent_and_stages_far_apart(layout: Layout) -> None:
    for group in groups(layout, "tp"):
        assert group == list(range(group[0], group[0] + layout.tp))
    for group in groups(layout, "pp"):
        assert group == list(range(group[0], layout.world, layout.world // layout.pp))


def test_groups_of_the_quickstart() -> None:
    layout = Layout(dp_replicate=2, tp=2, pp=2)
    assert groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(layout, "dp_replicate", "dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(layout, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.label == "dp2xtp2xpp2"


@st.composite
def expert_layouts(draw: st.DrawFn) -> Layout:
    """Layouts whose `ep` their ranks can be cut into."""
    base = draw(layouts)
    etp = draw(st.sampled_from([1, base.tp]))
    base = base.model_copy(update={"etp": etp, "zero": draw(st.sampled_from([None, 1]))})
    if base.dp_shard * base.cp == 1:
        base = base.model_copy(update={"zero": None})
    lanes = expert_lanes(base)
    within = [n for n in range(1, lanes + 1) if lanes % n == 0]
    across = [lanes * n for n in range(1, base.dp_replicate + 1) if base.dp_replicate % n == 0]
    return base.model_copy(update={"ep": draw(st.sampled_from(within + across))})


@settings(deadline=None)
@given(expert_layouts())
def test_expert_axes_cut_each_stage_into_a_grid(layout: Layout) -> None:
    grid = expert_grid(layout)
    slices = layout.tp if layout.etp == layout.tp else 1
    assert grid.replicas * grid.shards * grid.ep * slices * layout.pp == layout.world
    assert grid.ep == layout.ep
    for axis in EXPERT_AXES:
        found = expert_groups(layout, axis)
        assert sorted(rank for group in found for rank in group) == list(range(layout.world))
        assert {len(group) for group in found} == {getattr(grid, axis)}
        for group in found:
            where = [coordinates(layout, rank) for rank in group]
            assert len({(at.pp, at.tp if slices > 1 else 0) for at in where}) == 1
    met = [set(group) for axis in EXPERT_AXES for group in expert_groups(layout, axis)]
    pairs = [frozenset((a, b)) for group in met for a in group for b in group if a < b]
    assert len(pairs) == len(set(pairs)), "two ranks meet on two axes"


def test_experts_of_a_small_layout() -> None:
    """Shards are next to each other, so that experts are near; copies are far."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2)
    assert expert_groups(layout, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert expert_groups(layout, "shards") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert expert_groups(layout, "replicas") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    sliced = layout.model_copy(update={"etp": 2})
    assert expert_groups(sliced, "ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    wide = layout.model_copy(update={"ep": 8})
    assert expert_groups(wide, "ep") == [list(range(8))]


def test_domains_cut_the_replicas_in_two_levels() -> None:
    layout = Layout(dp_replicate=4, tp=2, domain=2)
    assert domain_groups(layout, "inside") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert domain_groups(layout, "across") == [[0, 4], [2, 6], [1, 5], [3, 7]]
    with_context = Layout(dp_replicate=2, cp=2, domain=2)
    assert domain_groups(with_context, "inside") == [[0, 1], [2, 3]]
    alone = Layout(dp_replicate=3)
    assert domain_groups(alone, "inside") == [[0], [1], [2]]
    assert domain_groups(alone, "across") == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(), 1),
        (Layout(tp=4), 4),
        (Layout(tp=4, sp=False), 1),
        (Layout(cp=2), 4),
        (Layout(cp=2, cp_method="ulysses"), 2),
        (Layout(cp=2, tp=2), 4),
        (Layout(cp=2, tp=3), 12),
        (Layout(cp=3, tp=2, cp_method="ulysses"), 6),
    ],
    ids=str,
)
def test_parts_of_a_sequence(layout: Layout, parts: int) -> None:
    assert layout.sequence_split == parts


@pytest.mark.parametrize(
    ("layout", "chunks", "splits"),
    [
        (Layout(pp=2), 1, False),
        (Layout(pp=2, schedule="interleaved", vpp=3), 3, False),
        (Layout(pp=2, schedule="zbv"), 2, True),
        (Layout(pp=2, schedule="dualpipev", vpp=2), 2, True),
    ],
    ids=str,
)
def test_stages_of_a_rank_follow_from_the_schedule(
    layout: Layout, chunks: int, splits: bool
) -> None:
    assert (layout.chunks, layout.virtual_stages) == (chunks, 2 * chunks)
    assert layout.splits_backward is splits


def test_zero_follows_dp_shard_and_label_tells_the_axes() -> None:
    assert (Layout().zero_stage, Layout(dp_shard=2).zero_stage) == (0, 3)
    assert Layout(cp=2).zero_stage == 0
    assert (Layout().label, Layout(dp_shard=2, pp=3).label) == ("one process", "fsdp2xpp3")
    assert Layout(dp_shard=2, zero=1, cp=2, ep=4).label == "shard2xcp2xep4"
    assert Layout.model_validate(Layout(dp_shard=2).model_dump()) == Layout(dp_shard=2)


@pytest.mark.parametrize(("dp_shard", "zero"), [(1, 3), (1, 1), (2, 0)])
def test_zero_that_contradicts_dp_shard_is_refused(dp_shard: int, zero: int) -> None:
    with pytest.raises(ValidationError, match=f"zero = {zero} contradicts dp_shard = {dp_shard}"):
        Layout.model_validate({"dp_shard": dp_shard, "zero": zero})
    Layout.model_validate({"dp_shard": dp_shard, "zero": zero or 2, "cp": 2})


def test_sequence_parallelism_needs_a_tensor_group() -> None:
    flags = Counter(
        (tp, sp, Layout(tp=tp, sp=sp).sequence_parallel) for tp in (1, 2) for sp in (True, False)
    )
    assert set(flags) == {(1, True, False), (1, False, False), (2, True, True), (2, False, False)}
