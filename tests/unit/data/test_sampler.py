"""The sampler: a bijection in every epoch, stateless, and the same in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sampler import sample_index, sample_indices

SEEDS = st.integers(0, 2**64 - 1)
MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64 in plain integers."""
    x = (x + GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def reference(seed: int, k: int, n: int) -> int:
    """The sampler once more, one number at a time in Python's integers."""
    epoch, value = divmod(k, n)
    half = 3
    while 1 << 2 * half < n:
        half += 1
    size = 1 << half
    epoch_key = mix((mix(seed) + epoch) & MASK64)
    keys = [mix((epoch_key + r * GOLDEN) & MASK64) for r in range(1, 9)]
    while True:
        left, right = value >> half, value % size
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) % size)
        value = (left << half) | right
        if value < n:
            return value


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(1, 3000), st.integers(0, 2**40))
def test_every_epoch_visits_every_sample_once(seed: int, n: int, epoch: int) -> None:
    epoch %= 2**62 // n
    order = sample_indices(seed, np.arange(n) + epoch * n, n)
    assert np.array_equal(np.sort(order), np.arange(n))


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 2**62), min_size=1, max_size=20), st.integers(1, 2**45))
def test_vector_scalar_and_plain_integers_agree(seed: int, ks: list[int], n: int) -> None:
    expected = [reference(seed, k, n) for k in ks]
    assert sample_indices(seed, np.array(ks), n).tolist() == expected
    assert sample_index(seed, ks[0], n) == expected[0]


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 500), st.data())
def test_sample_does_not_depend_on_who_asks_with_it(seed: int, n: int, data: st.DataObject) -> None:
    everything = sample_indices(seed, np.arange(3 * n), n)
    some = np.array(data.draw(st.lists(st.integers(0, 3 * n - 1), min_size=1)))
    assert np.array_equal(sample_indices(seed, some, n), everything[some])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [sample_indices(s, np.arange(n) + e * n, n) for s in range(3) for e in range(3)]
    for i, first in enumerate(orders):
        assert (first == np.arange(n)).mean() < 0.01
        assert all((first == other).mean() < 0.01 for other in orders[:i])


@pytest.mark.parametrize("n", [2, 3, 5, 16, 100])
def test_each_sample_is_as_likely_in_each_place(n: int) -> None:
    """Chi-squared of the sample in the first and last place over 50,000 epochs."""
    epochs = 50_000
    for place in (0, n - 1):
        drawn = sample_indices(7, np.arange(epochs) * n + place, n)
        expected = epochs / n
        chi_squared = float(((np.bincount(drawn, minlength=n) - expected) ** 2 / expected).sum())
        freedom = n - 1
        assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5 + 8


def test_neighbours_are_not_kept_together() -> None:
    n = 10_000
    order = sample_indices(1, np.arange(n), n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).mean() < 0.002


def test_sequence_is_the_same_in_every_version() -> None:
    """Old runs must resume on the data they would have read: never change these numbers."""
    frozen = [347, 549, 615, 377, 778, 149, 380, 164]
    assert sample_indices(1234, np.arange(8), 1000).tolist() == frozen


def test_bad_arguments_are_refused() -> None:
    for k, n in ((-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="must be >= 0"):
            sample_index(0, k, n)
