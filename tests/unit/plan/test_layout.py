"""Ranks on a layout: coordinates, groups, stages."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.plan.layout import AXES, Axis, Layout, coordinates, groups, stage_layers

sizes = st.integers(1, 4)
layouts = st.builds(Layout, dp_replicate=sizes, dp_shard=sizes, tp=sizes, pp=sizes)
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


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 32))
def test_stages_hold_every_layer_once_in_order(layers: int, stages: int) -> None:
    split = stage_layers(layers, stages)
    assert len(split) == stages
    assert [layer for stage in split for layer in stage] == list(range(layers))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 32))
def test_stages_are_even_and_the_last_which_holds_the_head_is_never_larger(
    layers: int, stages: int
) -> None:
    counts = [len(stage) for stage in stage_layers(layers, stages)]
    assert set(counts) <= {layers // stages, layers // stages + 1}
    assert counts[-1] == min(counts)
    extra = [stage for stage, count in enumerate(counts) if count > min(counts)]
    assert extra == list(range(extra[0], extra[0] + len(extra))) if extra else True
    if stages > 2 and len(extra) < stages - 1:
        assert counts[0] == min(counts)


def test_zero_follows_dp_shard_and_label_tells_the_axes() -> None:
    assert (Layout().zero_stage, Layout(dp_shard=2).zero_stage) == (0, 3)
    assert (Layout().label, Layout(dp_shard=2, pp=3).label) == ("one process", "fsdp2xpp3")
    assert Layout.model_validate(Layout(dp_shard=2).model_dump()) == Layout(dp_shard=2)


@pytest.mark.parametrize("dp_shard, zero", [(1, 3), (2, 0)])
def test_zero_that_contradicts_dp_shard_is_refused(dp_shard: int, zero: int) -> None:
    with pytest.raises(ValidationError, match=f"zero = {zero} contradicts dp_shard = {dp_shard}"):
        Layout.model_validate({"dp_shard": dp_shard, "zero": zero})


def test_sequence_parallelism_needs_a_tensor_group() -> None:
    flags = Counter(
        (tp, sp, Layout(tp=tp, sp=sp).sequence_parallel) for tp in (1, 2) for sp in (True, False)
    )
    assert set(flags) == {(1, True, False), (1, False, False), (2, True, True), (2, False, False)}
