"""Publishing, listing and refusing commits."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import (
    ONE,
    TWO,
    Split,
    adam_state,
    as_bytes,
    files_in,
    fresh,
    read_all,
    save,
    shares,
    steps,
    write,
)

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.committer import LateError
from meshwright.checkpoint.files import Body, Entry
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.record import Index
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding


def test_round_trip_with_meta(tmp_path: Path) -> None:
    state, meta = adam_state(100), {"seed": 7, "data": {"sample": 800}, "lr": 1e-05, "π": [None]}
    commit = save(fresh(tmp_path), 100, state, TWO, meta=meta)
    assert str(commit) == f"main@100 ({commit.id[:8]})"
    reader = Store.open(tmp_path).reader(commit)
    assert (reader.step, reader.meta, reader.names) == (100, meta, sorted(state))
    assert read_all(reader) == as_bytes(state)
    assert reader.shape("param/w0") == (7, 3)
    assert reader.dtype("param/w0") == np.float32


def test_head_and_order_are_derived(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    assert (store.commits(), store.head(), store.commits("none")) == ([], None, [])
    for step in (5, 30, 1_000_000):
        save(store, step)
    again = Store.open(tmp_path)
    assert steps(again) == [5, 30, 1_000_000]
    assert again.head() == again.commits()[-1]
    assert [c.parent for c in again.commits()] == [None, *(c.id for c in again.commits()[:-1])]


def test_a_place_without_a_store_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoints here"):
        Store.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file.*cannot be written"):
        fresh(tmp_path / "file")


def test_what_is_not_committed_is_invisible(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    save(store, 1)
    write(store, 2, adam_state(2))
    assert steps(store) == [1]


def test_a_second_commit_of_an_attempt_gives_the_first(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    attempt = write(store, 1, adam_state(1))
    first = store.commit(attempt, {})
    save(store, 2)
    assert store.commit(attempt, {"other": 1}) == first
    assert Store.open(tmp_path).commit(attempt, {}) == first
    store.gc(0)  # its parts are not needed any more
    assert Store.open(tmp_path).commit(attempt, {}) == first
    assert steps(store) == [1, 2]


@pytest.mark.parametrize(
    ("ranks", "missing"), [(128, (4, 17, 31, 99, 127)), (2, (0,)), (20, tuple(range(20)))]
)
def test_missing_ranks_are_named_and_the_commit_before_stays(
    tmp_path: Path, ranks: int, missing: tuple[int, ...]
) -> None:
    """Megatron-LM#1154, #2422: a save waits forever with 123 of 128 shards written."""
    store, split = fresh(tmp_path), Split(shards=ranks)
    before, state = save(store, 1), {"w": np.arange(256, dtype=np.float32)}
    there = tuple(rank for rank in range(ranks) if rank not in missing)
    attempt = write(store, 2, state, split, Encoding(durable=False), ranks=there)
    said = rf"{len(missing)} of {ranks} ranks \(rank {missing[0]}"
    with pytest.raises(LateError, match=said) as told:
        store.commit(attempt, {}, deadline_s=0.01)
    assert told.value.missing == missing
    assert store.head() == before
    for rank in missing:  # they were only slow
        store.write_part(attempt, rank, shares(state, split)[rank], Encoding(durable=False))
    assert read_all(store.reader(store.commit(attempt, {}))) == as_bytes(state)


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(1)
    attempt = write(store, 1, state, TWO, ranks=(0,))
    slow = threading.Timer(0.05, lambda: store.write_part(attempt, 1, shares(state, TWO)[1]))
    slow.start()
    assert store.commit(attempt, {}, deadline_s=60).step == 1
    slow.join()


def test_ranks_of_two_attempts_are_never_mixed(tmp_path: Path) -> None:
    """transformers#35782 and DCP's overwriting in place: rank 1 of the second save dies before it
    writes, and what is loaded is half of each."""
    store = fresh(tmp_path)
    first = save(store, 1, {"w": np.full(8, 1, np.float32)}, TWO)
    torn = write(store, 2, {"w": np.full(8, 2, np.float32)}, TWO, ranks=(0,))
    with pytest.raises(LateError):
        store.commit(torn, {})
    assert store.head() == first
    assert store.reader(first).read("w").tolist() == [1] * 8


def test_what_a_larger_world_left_is_never_taken(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(1)
    attempt = write(store, 1, state, TWO)
    smaller = Attempt(1, attempt.name, 1)
    store.write_part(smaller, 0, shares(state, ONE)[0])
    with pytest.raises(CheckpointError, match="does not belong to 1 ranks"):
        store.commit(smaller, {})
    assert steps(store) == []


def test_ranks_that_mean_different_steps_are_refused(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(1)
    for rank, step in ((0, 1), (1, 2)):
        store.write_part(Attempt(step, "a", 2), rank, shares(state, TWO)[rank])
    with pytest.raises(CheckpointError, match="same attempt"):
        store.commit(Attempt(1, "a", 2), {})


def test_pieces_that_do_not_cover_are_not_committed(tmp_path: Path) -> None:
    store, held = fresh(tmp_path), shares({"w": np.zeros(8, np.float32)}, TWO)
    for parts, why in (((0, 0), "hold the same elements"), ((0,), "4 of 8 elements")):
        attempt = Attempt(1, f"a{len(parts)}", len(parts))
        for rank, part in enumerate(parts):
            store.write_part(attempt, rank, held[part])
        with pytest.raises(CheckpointError, match=rf"w: .*{why}"):
            store.commit(attempt, {})
    assert steps(store) == []


def test_ranks_that_disagree_on_a_dtype_are_refused(tmp_path: Path) -> None:
    store, attempt = fresh(tmp_path), Attempt(1, "a", 2)
    for rank, dtype in enumerate(("float32", "float16")):
        held = shares({"w": np.zeros(8, dtype)}, TWO)[rank]
        store.write_part(attempt, rank, held)
    with pytest.raises(CheckpointError, match="float32, another float16"):
        store.commit(attempt, {})


def test_another_run_on_the_same_branch_is_fenced(tmp_path: Path) -> None:
    """A run that was taken for dead and goes on must not write behind the one that replaced it."""
    store = fresh(tmp_path)
    first = save(store, 1)
    zombie = write(store, 2, adam_state(2), parent=first)
    second = save(store, 2, adam_state(20))
    with pytest.raises(CheckpointError, match=r"branch main is at main@2 .* another run writes"):
        store.commit(zombie, {})
    assert store.commits() == [first, second]


def test_steps_of_a_run_are_committed_in_order(tmp_path: Path) -> None:
    store, held = fresh(tmp_path), shares(adam_state(1), ONE)[0]

    def attempt(step: int, run: str) -> Attempt:
        made = Attempt(step, f"{step:09d}-{run}-1", 1)
        store.write_part(made, 0, held)
        return made

    first, second = attempt(1, "run"), attempt(2, "run")
    head = store.commit(second, {})
    with pytest.raises(CheckpointError, match=r"step 1 is not committed: its run has brought"):
        store.commit(first, {})
    assert store.commit(second, {}) == store.head() == head
    store.commit(attempt(1, "run-again"), {})  # one that goes on from before counts anew
    assert steps(store) == [2, 1]


def test_one_of_many_that_commit_at_once_wins(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    head = save(store, 1)
    attempts = [write(store, 2, adam_state(n), parent=head) for n in range(8)]
    made: list[Any] = []

    def race(attempt: Attempt) -> None:
        try:
            made.append(Store.open(tmp_path).commit(attempt, {}))
        except CheckpointError as error:
            assert "another run writes" in str(error)

    threads = [threading.Thread(target=race, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert store.commits() == [head, *made]


class Interrupted(LocalFiles):
    """A folder in which another does something just before request number `at` to branches."""

    def __init__(self, root: Path, at: int, other: Callable[[], object]) -> None:
        super().__init__(root)
        self.__dict__.update(left=at, other=other)

    def names(self, prefix: str) -> list[Entry]:
        self._tell(prefix)
        return super().names(prefix)

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        self._tell(name)
        return super().create(name, parts)

    def _tell(self, name: str) -> None:
        if name.startswith("branches/"):
            self.__dict__["left"] -= 1
            if self.__dict__["left"] == -1:
                self.__dict__["other"]()


@pytest.mark.parametrize("at", range(9))
def test_what_another_commits_meanwhile_is_never_passed_over(tmp_path: Path, at: int) -> None:
    store = fresh(tmp_path)
    head = save(store, 1)
    ours, theirs, free = (write(store, 2, adam_state(n), parent=head) for n in range(3))
    free = replace(free, parent=None)
    store.write_part(replace(free, name="free"), 0, shares(adam_state(2), ONE)[0])
    for attempt, other in (
        (ours, lambda: store.commit(theirs, {})),
        (ours, lambda: store.rollback(head)),
        (replace(free, name="free"), lambda: store.commit(write(store, 9, {}), {})),
    ):
        slow = Store.over(Interrupted(tmp_path, at, other), str(tmp_path))
        before = store.head()
        try:
            made = slow.commit(attempt, {})
        except CheckpointError as error:
            assert "another run writes" in str(error)
            continue
        line = store.commits()
        if made in line:
            assert before is not None
            assert [c.id for c in line[: line.index(made)]][-1] == made.parent
        assert len({c.seq for c in line}) == len(line)
        assert [c.parent for c in line[1:]] == [c.id for c in line[:-1]]


def _commit_into(store: Store, attempt: Attempt, made: list[Commit]) -> None:
    made.append(store.commit(attempt, {}))


@pytest.mark.parametrize("at", range(9))
def test_two_that_commit_the_same_attempt_make_one_commit(tmp_path: Path, at: int) -> None:
    """Of a committer that was taken for dead, and of the one in its place."""
    store = fresh(tmp_path)
    head = save(store, 1)
    for parent in (head, None):
        attempt = write(store, 2, adam_state(2), parent=parent)
        made: list[Commit] = []
        other = Interrupted(tmp_path, at, partial(_commit_into, store, attempt, made))
        made.append(Store.over(other, str(tmp_path)).commit(attempt, {}))
        assert len({commit.id for commit in made}) == 1
        store.rollback(head)


@pytest.mark.parametrize(
    "data", [np.zeros(11, "f4"), np.zeros((3, 4), "f4"), np.zeros(12, object), np.zeros(12, ">f4")]
)
def test_data_that_does_not_fit_its_piece_is_refused(tmp_path: Path, data: Any) -> None:
    store = fresh(tmp_path)
    with pytest.raises(CheckpointError, match=r"numbers of shape \(12,\)"):
        store.write_part(Attempt(1, "a", 1), 0, {Piece.whole("w", (12,)): data})
    assert files_in(tmp_path) == [tmp_path / "store.json"]


@pytest.mark.parametrize("name", ["", "../out", "a/b", ".hidden", "x" * 101])
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    store = fresh(tmp_path)
    with pytest.raises(CheckpointError, match="attempt"):
        store.write_part(Attempt(1, name, 1), 0, {})
    with pytest.raises(CheckpointError, match="branch"):
        store.commits(name)


class Failing(LocalFiles):
    """Storage on which every write to packs or branches fails after some bytes."""

    def __init__(self, root: Path, error: int, where: str) -> None:
        super().__init__(root)
        self.__dict__.update(error=error, where=where)

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        if not name.startswith(self.__dict__["where"]):
            return super().create(name, parts)

        def some() -> Iterable[Body]:
            yield bytes(next(iter(parts)))[:5]
            raise OSError(self.__dict__["error"], os.strerror(self.__dict__["error"]))

        return super().create(name, some())

    def hasty(self) -> LocalFiles:
        return self


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("where", ["packs/", "parts/", "branches/"])
def test_storage_that_fails_says_so_once_and_leaves_nothing_half(
    tmp_path: Path, error: int, where: str
) -> None:
    before = save(fresh(tmp_path), 1)
    store = Store.over(Failing(tmp_path, error, where), "there")
    with pytest.raises(CheckpointError, match=rf"there/{where}.*{os.strerror(error)}.*free space"):
        save(store, 2, adam_state(2), TWO)
    assert Store.open(tmp_path).commits() == [before]
    assert files_in(tmp_path, ".drafts") == []
    assert save(fresh(tmp_path), 2).parent == before.id


def test_a_folder_that_is_not_ours_to_write_is_told(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    before = save(store, 1)
    (tmp_path / "packs").rename(tmp_path / "kept")
    (tmp_path / "packs").touch()  # as root, permissions would not hold us
    with pytest.raises(CheckpointError, match=r"cannot be .*see whether"):
        save(store, 2)
    (tmp_path / "packs").unlink()
    (tmp_path / "kept").rename(tmp_path / "packs")
    assert read_all(store.reader(before)) == as_bytes(adam_state(1))


def test_what_the_parent_holds_is_not_written_again(tmp_path: Path) -> None:
    store, rng = fresh(tmp_path), np.random.default_rng(0)
    frozen = rng.integers(0, 256, 100_000, dtype=np.uint8)
    first = save(store, 1, {"frozen": frozen, "w": np.zeros(8, np.float32)}, TWO)
    size = sum(path.stat().st_size for path in files_in(tmp_path, "packs"))
    second = save(store, 2, {"frozen": frozen, "w": np.ones(8, np.float32)}, TWO)
    assert sum(path.stat().st_size for path in files_in(tmp_path, "packs")) - size < 2_000
    assert store.reader(second).read("frozen").tobytes() == frozen.tobytes()
    assert store.reader(first).read("w").tolist() == [0] * 8


def test_small_tensors_share_packs_and_their_index_is_small(tmp_path: Path) -> None:
    store, split = fresh(tmp_path), Split(shards=8)
    state = adam_state(1, (16, 8), names=100)
    encoding = Encoding(durable=False)
    save(store, 1, state, split, encoding)
    assert len(files_in(tmp_path, "packs")) == 8
    elements = sum(array.nbytes for array in state.values())
    stored = sum(path.stat().st_size for path in files_in(tmp_path, "packs"))
    pieces = 8 * len(state)
    assert (stored - elements) / pieces < 60  # bytes of index for a piece
    assert files_in(tmp_path, "branches")[0].stat().st_size < 3_000


def test_a_pack_is_synced_once_and_not_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: Counter[str] = Counter()
    real = os.fsync

    def count(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        synced["file" if ".drafts" in path else "folder"] += 1
        real(descriptor)

    store, state = fresh(tmp_path), {"w": np.arange(4096, dtype=np.float32)}
    monkeypatch.setattr(os, "fsync", count)
    attempt = write(store, 1, state, encoding=Encoding(chunk_bytes=64))
    assert synced["file"] == 2  # the pack and the part
    synced.clear()
    write(store, 1, {"w": state["w"] + 1}, encoding=Encoding(chunk_bytes=64, durable=False))
    assert not synced
    store.commit(attempt, {})
    assert synced["file"] == 1


def test_any_size_of_chunks_and_packs_reads_the_same(tmp_path: Path) -> None:
    state = adam_state(1)
    for chunk_bytes, pack_bytes in ((1, 1), (4, 100), (60, 64), (64, 60), (1000, 1)):
        store = fresh(tmp_path / f"{chunk_bytes}-{pack_bytes}")
        encoding = Encoding(chunk_bytes=chunk_bytes, pack_bytes=pack_bytes, durable=False)
        assert read_all(store.reader(save(store, 1, state, TWO, encoding))) == as_bytes(state)


def test_an_index_names_its_packs(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    reader = store.reader(save(store, 1, split=TWO))
    assert all(isinstance(index, Index) for index in reader.indices)
    named = {digest for index in reader.indices for digest in index.packs}
    assert named == {path.name for path in files_in(tmp_path, "packs")}
