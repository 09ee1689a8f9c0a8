"""Windows over a store and the endless sequence of training samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import DataError
from meshwright.data.order import MixedRows, plain_order
from meshwright.data.sampler import sample_index
from meshwright.data.store import TokenStore
from meshwright.data.windows import JoinedWindows, Windows


def counting_store(n_tokens: int) -> TokenStore:
    return TokenStore(Path("made"), np.arange(n_tokens, dtype=np.uint16), np.array([0, n_tokens]))


@pytest.mark.parametrize(("n_tokens", "n"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_windows_overlap_by_the_target_alone(n_tokens: int, n: int) -> None:
    windows = Windows(counting_store(n_tokens), 4)
    assert len(windows) == n
    read = windows.read(np.arange(n))
    assert read.dtype == np.int64
    assert read.tolist() == [[4 * i + j for j in range(5)] for i in range(n)]
    assert read[:, 1:].ravel().tolist() == list(range(1, 4 * n + 1))


def test_ids_above_the_int16_range_keep_their_value() -> None:
    store = TokenStore(Path("made"), np.array([65_535, 40_000], np.uint16), np.array([0, 2]))
    assert Windows(store, 1).read(np.array([0])).tolist() == [[65_535, 40_000]]


def test_store_too_small_for_a_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"4 tokens, too few .*data\.seq_len = 4.*lower"):
        Windows(counting_store(4), 4)


@pytest.mark.parametrize("index", [-1, 2])
def test_window_outside_the_store_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        Windows(counting_store(9), 4).read(np.array([0, index]))


def test_spread_covers_the_store_evenly() -> None:
    windows = Windows(counting_store(101), 1)
    assert windows.spread(4).tolist() == [0, 25, 50, 75]
    assert windows.spread(1000).tolist() == list(range(100))


def test_any_split_over_ranks_reads_the_same_samples() -> None:
    windows = Windows(counting_store(1001), 4)
    samples = MixedRows([windows], plain_order(len(windows), 3))
    ks = np.arange(480, 520)  # over the end of the first epoch, 250 windows
    whole = samples.read(ks)
    for ranks in (1, 2, 5):
        parts = [samples.read(part) for part in np.split(ks, ranks)]
        assert np.array_equal(np.concatenate(parts), whole)
    assert whole[7].tolist() == windows.read(np.array([sample_index(3, 487, 250)]))[0].tolist()


def test_several_stores_are_looked_at_by_their_shares() -> None:
    parts = [Windows(counting_store(1001), 1), Windows(counting_store(101), 1)]
    joined = JoinedWindows(parts, (0.75, 0.25))
    assert len(joined) == 1100
    chosen = joined.spread(40)
    assert chosen.tolist() == [i * 1000 // 30 for i in range(30)] + [*range(1000, 1100, 10)]
    shown = joined.read(chosen[[1, 35]])
    assert np.array_equal(shown[:1], parts[0].read(np.array([33])))
    assert np.array_equal(shown[1:], parts[1].read(np.array([50])))
    assert JoinedWindows(parts, (1.0, 0.0)).spread(10).max() < 1000
