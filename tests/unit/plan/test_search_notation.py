"""Layouts as one word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_questions import TINY_MOE, job

from meshwright.base.errors import ConfigError
from meshwright.plan.auto import question_of
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import layout_of
from meshwright.plan.search_notation import parse_layout, write_layout
from meshwright.plan.search_space import Space

QUESTION = question_of(job(TINY_MOE))
SPACE = Space(QUESTION)
EVERY = SPACE.expand(np.arange(len(SPACE.rows())))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(EVERY) - 1))
def test_what_is_written_is_read_as_the_same(index: int) -> None:
    layout = layout_of(QUESTION, EVERY, index)
    read = parse_layout(write_layout(layout), layout.world, QUESTION.precision)
    assert read.zero_stage == layout.zero_stage
    assert read.model_copy(update={"zero": layout.zero}) == layout


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tp8,pp4", Layout(tp=8, pp=4, dp_shard=4, zero=1, precision="bf16")),
        ("tp8 pp4 zero0", Layout(tp=8, pp=4, dp_replicate=4, zero=0, precision="bf16")),
        ("fsdp128", Layout(dp_shard=128, zero=3, precision="bf16")),
        (
            "shard8,zero3,mbs2,full",
            Layout(
                dp_replicate=16, dp_shard=8, zero=3, micro_batch=2, recompute="full",
                precision="bf16",
            ),
        ),
        (
            "TP8,PP4,VPP5,dp4",
            Layout(
                tp=8, pp=4, vpp=5, dp_shard=4, zero=1, schedule="interleaved", precision="bf16"
            ),
        ),
    ],
)  # fmt: skip
def test_left_out_words_are_filled_in(text: str, wanted: Layout) -> None:
    assert parse_layout(text, 128) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpp8", 'did you mean "tp"'),
        ("tp3", "does not divide 128"),
        ("dp4,shard4", "names dp twice"),
        ("tp8,dp4", "multiply to 32 chips, not 128"),
        ("tp0", "layout.tp"),
        ("zero5,tp8", "layout.zero"),
        ("tp8;pp4", "means nothing"),
    ],
)
def test_wrong_words_are_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, 128)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
