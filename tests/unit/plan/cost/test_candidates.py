"""Columns of layouts say what the layouts say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.plan.cost.candidates import ATTENTION, DUALPIPE, FULL, MLP, NONE, Candidates
from meshwright.plan.layout import Layout, expert_lanes

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shard, cp, tp = draw(SIZES), draw(SIZES), draw(SIZES)
    schedule, vpp = draw(
        st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 1)])
    )
    return Layout.model_validate(
        {
            "dp_replicate": draw(SIZES),
            "dp_shard": shard,
            "tp": tp,
            "sp": draw(st.booleans()),
            "cp": cp,
            "cp_method": draw(st.sampled_from(["ring", "ulysses"])),
            "pp": draw(SIZES),
            "vpp": vpp,
            "schedule": schedule,
            "zero": draw(st.sampled_from([1, 2, 3])) if shard * cp > 1 else 0,
            "micro_batch": draw(SIZES),
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "offload": draw(st.sampled_from(["none", "optimizer", "both"])),
        }
    )


@settings(deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=5))
def test_columns_give_the_layouts_back(given_layouts: list[Layout]) -> None:
    columns = Candidates.from_layouts(given_layouts)
    assert len(columns) == len(given_layouts)
    assert [columns.layout(index) for index in range(len(columns))] == given_layouts


@settings(deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=5))
def test_derived_columns_are_the_properties_of_the_layouts(given_layouts: list[Layout]) -> None:
    columns = Candidates.from_layouts(given_layouts)
    for name in ("dp", "world", "chunks", "virtual_stages", "sequence_parallel"):
        expected = [getattr(layout, name) for layout in given_layouts]
        assert getattr(columns, name).tolist() == expected, name
    lanes = [layout.dp_replicate * expert_lanes(layout) for layout in given_layouts]
    assert columns.expert_lanes.tolist() == lanes


def test_recomputed_parts_have_codes() -> None:
    def code(**keys: object) -> int:
        return int(Candidates.from_layouts([Layout.model_validate(keys)]).recompute[0])

    assert code() == NONE
    assert code(recompute="full") == FULL
    assert code(recompute="selective") == ATTENTION
    assert code(recompute="selective", recompute_parts=["mlp"]) == MLP
    assert code(recompute="selective", recompute_parts=["mlp", "attention"]) == FULL


def test_unstated_zero_follows_the_shards() -> None:
    assert Candidates.of(2, dp_shard=[1, 4]).zero.tolist() == [0, 3]


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="no such columns: zeros"):
        Candidates.of(1, zeros=1)


def test_a_schedule_of_other_frameworks_has_no_layout() -> None:
    with pytest.raises(ConfigError, match=r"layout\.schedule = 'dualpipe'"):
        Candidates.of(1, pp=4, schedule=DUALPIPE).layout(0)


def test_take_and_join() -> None:
    columns = Candidates.of(3, tp=[1, 2, 4])
    assert columns.take([2, 0]).tp.tolist() == [4, 1]
    assert columns.take(columns.tp > 1).tp.tolist() == [2, 4]
    assert Candidates.join([columns, columns.take([0])]).tp.tolist() == [1, 2, 4, 1]


def test_micro_batches_count_sequences_of_a_rank() -> None:
    columns = Candidates.of(1, dp_replicate=2, dp_shard=2, micro_batch=4)
    np.testing.assert_array_equal(columns.micro_batches(64), [4.0])
