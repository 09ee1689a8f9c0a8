"""Mixtures: exact shares at any time, no draw twice, weights that change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.data.mixture import BLOCK, PRECISION, Mixture, Stage, even

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sources = draw(st.integers(1, 6))
    weights = st.lists(
        st.one_of(st.just(0.0), st.floats(0.01, 10)), min_size=sources, max_size=sources
    )
    starts = [0, *sorted(draw(st.sets(st.integers(1, 700), max_size=3)))]
    stages = [Stage(start, tuple(draw(weights.filter(any)))) for start in starts]
    return Mixture(tuple(stages), draw(st.integers(0, 2**64 - 1)))


@settings(max_examples=40, deadline=None)
@given(mixtures())
def test_every_draw_of_every_source_comes_once_and_none_is_left_out(mixture: Mixture) -> None:
    draws = mixture.draws(np.arange(16 * BLOCK))
    for source in range(mixture.sources):
        numbers = np.sort(draws.number[draws.source == source])
        last_block = numbers.size - BLOCK  # the numbers of a block that is not whole may have holes
        assert len(np.unique(numbers)) == numbers.size
        assert np.array_equal(numbers[: max(0, last_block)], np.arange(max(0, last_block)))


@settings(max_examples=40, deadline=None)
@given(mixtures(), st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_a_sample_does_not_depend_on_who_asks_with_it(mixture: Mixture, ks: list[int]) -> None:
    together = mixture.draws(np.array(ks))
    alone = [mixture.draws(np.array([k])) for k in ks]
    assert together.source.tolist() == [int(one.source[0]) for one in alone]
    assert together.number.tolist() == [int(one.number[0]) for one in alone]


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(0, 300))
def test_shares_are_exact(weights: list[float], blocks: int) -> None:
    """At the end of any block, to within the depth of the tree."""
    mixture = Mixture((Stage(0, tuple(weights)),), 5)
    n = blocks * BLOCK
    expected = np.array(weights) / sum(weights) * n
    counted = np.bincount(mixture.draws(np.arange(n)).source, minlength=len(weights))
    depth = (len(weights) - 1).bit_length()
    assert np.abs(counted - expected).max() <= depth + n / PRECISION
    assert np.array_equal(counted, mixture.taken(n))


def test_shares_are_exact_to_the_sample_over_a_period() -> None:
    mixture = Mixture((Stage(0, (0.7, 0.2, 0.1)),), 1)
    per_period = [734003, 209715, 104858]
    assert mixture.taken(PRECISION * 10**6).tolist() == [n * 10**6 for n in per_period]


def test_a_change_of_weights_happens_at_its_sample() -> None:
    mixture = Mixture((Stage(0, (1, 0)), Stage(100, (0, 1)), Stage(1000, (1, 1))), 3)
    draws = mixture.draws(np.arange(2024))
    assert not draws.source[:100].any()
    assert draws.source[100:1000].all()
    assert np.bincount(draws.source[1000:]).tolist() == [512, 512]
    assert np.array_equal(np.sort(draws.number[draws.source == 1]), np.arange(900 + 512))


def test_no_rank_sees_one_source_alone() -> None:
    """Strict alternation would give each of two ranks a source of its own."""
    source = even(2, 9).draws(np.arange(1024)).source
    assert 0.4 < source[::2].mean() < 0.6


def test_a_billionth_sample_costs_what_the_first_does() -> None:
    mixture = Mixture((Stage(0, (0.5, 0.3, 0.2)),), 1)
    far = mixture.draws(np.array([10**15]))
    assert far.number[0] == pytest.approx(10**15 * (0.5, 0.3, 0.2)[int(far.source[0])], rel=1e-5)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((), "begin at sample 0"),
        ((Stage(5, (1,)),), "begin at sample 0"),
        ((Stage(0, (1,)), Stage(0, (1,))), "each after the one before"),
        ((Stage(0, (1,)), Stage(9, (1, 2))), "one weight for each source"),
        ((Stage(0, (0, 0)),), "above it"),
        ((Stage(0, (-1, 2)),), "above it"),
        ((Stage(0, (float("nan"), 2)),), "above it"),
        ((Stage(0, (1e-9, 1)),), "is none"),
    ],
)
def test_wrong_mixtures(stages: tuple[Stage, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mixture(stages, 0)
