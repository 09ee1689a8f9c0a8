"""One global order: exactly once over any ranks, workers, kills and resumes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError, DataError
from meshwright.data.mixture import Mixture, Stage, even
from meshwright.data.order import MixedRows, Order, plain_order
from meshwright.data.packing import PackedRows
from meshwright.data.reader import BatchReader
from meshwright.data.sampler import sample_indices
from meshwright.data.share import Share
from meshwright.data.store import TokenStore
from meshwright.data.windows import Windows


@dataclass(frozen=True)
class Numbers:
    """Samples that are their own source and number."""

    source: int
    size: int
    seq_len: int = 1

    @property
    def store(self) -> TokenStore:
        return TokenStore(Path("none"), np.zeros(1, np.int64), np.zeros(2, np.int64))

    def __len__(self) -> int:
        return self.size

    def spans(self, indices: np.ndarray) -> list[tuple[int, int]]:
        return [(0, 0)] * len(indices)

    def read(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([np.full_like(indices, self.source), indices], axis=1)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros((len(indices), 2), np.int32)


def changing(start: int, seed: int = 0) -> Mixture:
    return Mixture((Stage(0, (0.5, 0.3, 0.2)), Stage(start, (0.1, 0.1, 0.8))), seed)


def numbers(start: int, sizes: Sequence[int] = (97, 40, 11), seed: int = 3) -> MixedRows:
    order = Order(tuple(sizes), changing(start, seed), seed)
    return MixedRows([Numbers(i, size) for i, size in enumerate(sizes)], order)


def step(
    rows: MixedRows, batch: int, world: int, workers: int, start: int, number: int
) -> list[list[int]]:
    """What all ranks together read of batch `number`, whichever worker of each has it."""
    found: list[list[int]] = []
    for rank in range(world):
        share = Share(batch, rank, world, number % workers, workers)
        found += BatchReader(rows, share, start).read(number // workers).content.tolist()
    return found


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_division_and_any_restarts_give_the_same_sequence_once(data: st.DataObject) -> None:
    """Incarnation after incarnation of another world, other workers, another global batch."""
    rows = numbers(start=data.draw(st.integers(1, 400)), seed=data.draw(st.integers(0, 2**32)))
    seen: list[list[int]] = []
    state = rows.state(0)
    for _ in range(data.draw(st.integers(1, 4))):
        batch = data.draw(st.integers(1, 30))
        world, workers = data.draw(st.integers(1, min(batch, 9))), data.draw(st.integers(1, 4))
        start = rows.position_of(state)
        steps = data.draw(st.integers(0, 4))
        for number in range(steps):
            seen += step(rows, batch, world, workers, start, number)
        state = rows.state(start + steps * batch)
    assert seen == rows.read(np.arange(len(seen))).tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63), st.integers(64, 3000))
def test_each_epoch_of_each_source_has_every_sample_once(seed: int, change: int) -> None:
    sizes = (97, 40, 11)
    order, ks = numbers(change, sizes, seed).order, np.arange(64 * 100)
    place, found = order.mixture.draws(ks), order.at(ks)
    for source, size in enumerate(sizes):
        mine = found.source == source
        for epoch in range(2):
            inside = found.number[mine][place.number[mine] // size == epoch]
            assert np.array_equal(np.sort(inside), np.arange(size))


def test_one_source_is_the_order_of_the_trainer() -> None:
    """What `meshwright train` has always read of one source."""
    tokens = np.arange(10_001)
    windows = Windows(TokenStore(Path("none"), tokens, np.array([0, 10_001])), 10)
    ks = np.arange(3000)
    order = plain_order(len(windows), 7)
    ours = MixedRows([windows], order).read(ks)
    assert np.array_equal(ours, windows.read(sample_indices(7, ks, len(windows))))
    assert len(np.unique(ours[:1000, 0])) == 1000


def test_ranks_that_change_while_packed_and_mixed() -> None:
    """Two packed corpora, DP 2 -> 1 -> 3: the union of what was read is the sequence."""
    lengths = np.random.default_rng(0).integers(2, 60, 500)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    stores = [TokenStore(Path("none"), base + np.arange(starts[-1]), starts) for base in (0, 10**6)]
    packed = [PackedRows(store, 31) for store in stores]
    sizes = tuple(len(rows) for rows in packed)
    rows = MixedRows(packed, Order(sizes, Mixture((Stage(0, (2, 1)), Stage(96, (1, 3))), 1), 1))
    seen = []
    for world, begin in ((2, 0), (1, 60), (3, 120)):
        for number in range(6):
            seen += step(rows, 10, world, 1, begin, number)
    assert seen == rows.read(np.arange(180)).tolist()
    tokens = rows.read(np.arange(2 * sum(sizes)))
    for base in (0, 10**6):
        mine = tokens[(tokens >= base) & (tokens < base + starts[-1])]
        assert len(np.unique(mine)) == starts[-1]  # nothing of either is left out


def test_resuming_deep_in_an_epoch_takes_no_time() -> None:
    rows = numbers(start=10**8, sizes=(10**10, 10**9, 10**7))
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        reader = BatchReader(rows, Share(64))
        reader.load_state_dict(rows.state(10**9))
        next(reader)
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.05


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_takes_up_its_own_state(worker: int) -> None:
    rows = numbers(50)
    share = Share(6, 1, 2, worker, 3)
    first = BatchReader(rows, share)
    for _ in range(5):
        next(first)
    second = BatchReader(rows, share)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(next(first).content, next(second).content)


def test_batches_that_are_read_together_are_those_read_one_by_one() -> None:
    """Small ones are; a state is of what was given, not of what was read."""
    tokens = np.arange(10_001)
    windows = Windows(TokenStore(Path("none"), tokens, np.array([0, 10_001])), 10)
    rows = MixedRows([windows], plain_order(len(windows), 7))
    assert rows.at_once > 500
    share = Share(7, 1, 3, 1, 2)
    reader, other = BatchReader(rows, share), BatchReader(rows, share)
    for index in range(3000):
        batch, alone = next(reader), other.read(index)
        assert batch.next_sample == alone.next_sample
        assert np.array_equal(batch.content, alone.content)
        if index == 1234:
            state = reader.state_dict()
            reader = BatchReader(rows, share)
            reader.load_state_dict(state)
    assert numbers(50).at_once == 1  # rows that say nothing of where they are


def test_a_state_of_other_data_is_refused() -> None:
    state = numbers(50).state(10)
    with pytest.raises(DataError, match=r"data state at sample 10: is of data .*same sources"):
        numbers(51).position_of(state)
    with pytest.raises(DataError, match="has no 'sample'"):
        numbers(51).position_of({"epoch": 1})


def test_manifests_are_part_of_the_state() -> None:
    order = plain_order(5, 0)
    old = MixedRows([Numbers(0, 5)], order, ("manifest a",))
    with pytest.raises(DataError, match="is of data"):
        MixedRows([Numbers(0, 5)], order, ("manifest b",)).position_of(old.state(3))


def test_wrong_orders() -> None:
    with pytest.raises(ConfigError, match="give each its weight"):
        Order((1, 2, 3), even(2, 0), 0)
    with pytest.raises(DataError, match="number 2: has no samples"):
        Order((1, 0), even(2, 0), 0)
    with pytest.raises(ConfigError, match="all sources have the same"):
        MixedRows([Numbers(0, 3, 1), Numbers(1, 3, 2)], Order((3, 3), even(2, 0), 0))
    with pytest.raises(ConfigError, match="3 ranks need a sample each"):
        Share(batch=2, world=3)


def test_shuffle_is_as_good_as_a_true_permutation() -> None:
    """Four statistics over 200 orders each, of ours and of numpy's, by their means' distance in
    standard errors: serial correlation, displacement, longest rise, cycles."""
    n, orders = 997, 200
    generator = np.random.default_rng(1)
    ours = [plain_order(n, seed).at(np.arange(n)).number for seed in range(orders)]
    true = [generator.permutation(n) for _ in range(orders)]
    for statistic in (serial_correlation, displacement, rises, cycles):
        a, b = (np.array([statistic(p) for p in some]) for some in (ours, true))
        error = np.sqrt(a.var() / orders + b.var() / orders)
        assert abs(a.mean() - b.mean()) < 4 * error, statistic.__name__


def serial_correlation(p: np.ndarray) -> float:
    return float(np.corrcoef(p[:-1], p[1:])[0, 1])


def displacement(p: np.ndarray) -> float:
    return float(np.abs(p - np.arange(p.size)).mean())


def rises(p: np.ndarray) -> float:
    return float((np.diff(p) > 0).mean())


def cycles(p: np.ndarray) -> float:
    left, count = set(range(p.size)), 0
    while left:
        count, at = count + 1, left.pop()
        while (at := int(p[at])) in left:
            left.discard(at)
    return float(count)
