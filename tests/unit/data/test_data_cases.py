"""Reports of users of other loaders, as they would happen here."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import DataError
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.order import MixedRows, plain_order
from meshwright.data.packing import PackedRows, check_ends
from meshwright.data.reader import BatchReader
from meshwright.data.share import Share
from meshwright.data.store import TokenStore, open_store
from meshwright.data.windows import Windows


def numbered(samples: int, seed: int = 0) -> MixedRows:
    """Windows of one target whose first token is their number."""
    store = TokenStore(Path("none"), np.arange(samples + 1), np.array([0, samples + 1]))
    windows = Windows(store, 1)
    return MixedRows([windows], plain_order(len(windows), seed))


def read(data: MixedRows, share: Share, start: int, steps: int) -> list[int]:
    reader = BatchReader(data, share)
    reader.load_state_dict(data.state(start))
    return [int(n) for _ in range(steps) for n in next(reader).content[:, 0]]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (8, 6)])
def test_bridge_5637_a_shrink_drops_no_rank(before: int, after: int) -> None:
    """Ranks before and after the restart together read each sample of the epoch once."""
    data, batch = numbered(240), 24
    seen = [n for rank in range(before) for n in read(data, Share(batch, rank, before), 0, 4)]
    rest = [n for rank in range(after) for n in read(data, Share(batch, rank, after), 96, 6)]
    assert sorted(seen + rest) == list(range(240))


@pytest.mark.parametrize(
    ("before", "after"), [((2, 3), (3, 2)), ((4, 2), (1, 5)), ((1, 4), (6, 1)), ((8, 1), (5, 3))]
)
def test_energon_58_ranks_times_workers_may_change(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    """There each worker of each rank had a state of its own, so a run had to go on with as many of
    both. Here any one reader's state is that of all, though each had read another way ahead; and
    step by step the ranks together get the batch that an undisturbed run gets, so losses agree."""
    data, batch, steps = numbered(480), 24, 7
    whole = [read(data, Share(batch), batch * step, 1) for step in range(20)]
    world, workers = before
    states = []
    for rank in range(world):
        for worker in range(workers):
            reader = BatchReader(data, Share(batch, rank, world, worker, workers))
            for _ in range(steps // workers + 1 + (rank + worker) % 3):  # a loader's prefetch
                given = next(reader)
                if given.next_sample == batch * steps:  # what was trained on last
                    states.append(data.state(given.next_sample))
    assert all(state == states[0] for state in states) and len(states) == world
    start = data.position_of(states[0])
    found = whole[:steps] + [together(data, after, batch, start, step) for step in range(13)]
    assert found == whole
    assert sorted(n for step in found for n in step) == list(range(480))


def together(data: MixedRows, of: tuple[int, int], batch: int, start: int, step: int) -> list[int]:
    """What all of so many ranks read in a step, each by the worker whose turn it is."""
    world, workers = of
    shares = [Share(batch, rank, world, step % workers, workers) for rank in range(world)]
    parts = [BatchReader(data, share, start).read(step // workers).content for share in shares]
    return [int(n) for part in parts for n in part[:, 0]]


def test_datasets_7901_nothing_is_lost_of_a_shuffle_wherever_it_stops() -> None:
    """There: 7 of 12 lost after 5, and just the buffer of 100 of 2,000 after 300."""
    for size, stops in ((12, range(13)), (2000, [300])):
        data = numbered(size, seed=42)
        whole = read(data, Share(1), 0, size)
        for k in stops:
            seen, rest = read(data, Share(1), 0, k), read(data, Share(1), k, size - k)
            assert seen + rest == whole
            assert sorted(seen + rest) == list(range(size))


def test_webdataset_188_every_rank_takes_as_many_steps_though_samples_are_few() -> None:
    data = numbered(3)
    parts = [read(data, Share(16, rank, 16), 0, 5) for rank in range(16)]
    assert {len(part) for part in parts} == {5}


def test_megatron_907_no_node_needs_what_another_has_written(tmp_path: Path) -> None:
    """Reading writes nothing, so there is no index to be absent on a node."""
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    out = tmp_path / "out"
    build([str(tmp_path / "a.txt")], out, BuildOptions(), 1)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    rows = PackedRows(open_store(out / "train"), 31)
    next(BatchReader(MixedRows([rows], plain_order(len(rows), 0)), Share(4)))
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_datasets_7102_shuffling_and_a_state_each_step_cost_little() -> None:
    """There: about a thousand times. Best of five, against windows one after another."""
    store = TokenStore(Path("none"), np.zeros(2**21, np.uint16), np.array([0, 2**21]))
    windows = Windows(store, 1024)
    data = MixedRows([windows], plain_order(len(windows), 0))

    def in_order() -> None:
        for first in range(0, 4096, 8):
            windows.read(np.arange(first, first + 8) % len(windows))

    def shuffled() -> None:
        reader = BatchReader(data, Share(8))
        for _ in range(512):
            next(reader)
            reader.state_dict()

    def best(work: object) -> float:
        took = []
        for _ in range(5):
            begun = time.perf_counter()
            work()  # type: ignore[operator]
            took.append(time.perf_counter() - begun)
        return min(took)

    assert best(shuffled) < 10 * best(in_order)


def test_profam_495_a_store_without_ends_of_text_is_not_packed() -> None:
    store = TokenStore(Path("theirs"), np.array([5, 6, 0, 7, 8, 9]), np.array([0, 3, 6]))
    with pytest.raises(DataError, match="ends with token 9, not with the end of text 0"):
        check_ends(store, 0)
    check_ends(TokenStore(Path("ours"), np.array([5, 6, 0, 7, 0]), np.array([0, 3, 5])), 0)
