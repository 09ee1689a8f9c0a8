"""What is saved while training goes on: what was there at the call, under a cap, by every rank."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from background_saves import Gate, Live, Obedient, Ranks, await_true
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import MemoryFiles
from states import ONE, TWO, Split, adam_state, as_bytes, read_all, steps

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import background as module
from meshwright.checkpoint.background import Background
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.writing import Encoding


@pytest.mark.parametrize("cap", [0, 16, 200])
@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_commit_holds_what_was_there_at_the_call(tmp_path: Path, cap: int, codec: str) -> None:
    """pytorch/pytorch#144657: an update in place during a save changed what was stored."""
    gate = Gate()
    ranks = Ranks(Obedient(LocalFiles(tmp_path), gate), TWO, cap)
    if cap:  # a copy by turns goes on as what was copied before has been written
        gate.opened.set()
    wanted = []
    for step in (1, 2):
        state = adam_state(step)
        live = ranks.save(step, state, codec=codec)
        for values in (one.values for rank in live for one in rank.values()):
            values.fill(-1)
        wanted.append(as_bytes(state))
        gate.opened.set()
        ranks.wait()
    assert ranks.outcomes() == {1: None, 2: None}
    assert [read_all(ranks.store.reader(one)) for one in ranks.store.commits()] == wanted


def test_a_change_holds_what_was_there_and_so_does_its_base(tmp_path: Path) -> None:
    gate, states = Gate(), [adam_state(step) for step in range(5)]
    ranks = Ranks(Obedient(LocalFiles(tmp_path), gate), TWO)
    gate.opened.set()
    for step in range(1, 5):
        live = ranks.save(step, states[step], change=step > 1, keep_base=True)
        for values in (one.values for rank in live for one in rank.values()):
            values.fill(-1)
        ranks.wait()
    assert ranks.outcomes() == dict.fromkeys(range(1, 5))
    commits = ranks.store.commits()
    assert [commit.depth for commit in commits] == [0, 1, 2, 3]
    for commit in commits:
        assert read_all(ranks.store.reader(commit)) == as_bytes(states[commit.step])


def test_nothing_blocks_but_the_copy(tmp_path: Path) -> None:
    gate = Gate()
    ranks = Ranks(Obedient(LocalFiles(tmp_path), gate), TWO)
    ranks.save(1)
    assert gate.reached.wait(60)
    assert all(rank.is_writing for rank in ranks.ranks)
    assert ranks.ranks[0].writing == Attempt(1, "step-1", 2)
    assert ranks.store.head() is None
    gate.opened.set()
    assert ranks.outcomes() == {1: None}
    assert ranks.ranks[0].writing is None
    assert steps(ranks.store) == [1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.lists(st.integers(0, 300), min_size=1, max_size=4), st.booleans())
def test_turns_of_any_size_bring_all(cap: int, sizes: list[int], wide: bool) -> None:
    dtype = np.float64 if wide else np.float32
    state = {f"w{n}": np.arange(size).astype(dtype) for n, size in enumerate(sizes)}
    ranks = Ranks(MemoryFiles(), Split(shards=2), cap)
    ranks.save(1, state)
    assert ranks.outcomes() == {1: None}
    found = ranks.store.reader(ranks.store.commits()[0])
    assert read_all(found) == as_bytes(state)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_copy_by_turns_keeps_to_its_cap(tmp_path: Path, codec: str) -> None:
    """radixark/Megatron-LM#61: the whole shard was staged. Packs are counted apart."""
    cap, size = 2 << 20, 1 << 21
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    sources = {Piece.whole(f"w{n}", (size,)): Live(values) for n in range(4)}
    background = Background(Store.open(tmp_path, create=True), MAIN, 0, cap)
    encoding = Encoding(codec, 1 << 16, durable=False, pack_bytes=1 << 18)
    background.save(Attempt(0, "warm", 1), sources, encoding)  # what is imported is no copy
    background.wait()
    tracemalloc.start()
    try:
        background.save(Attempt(1, "one", 1), sources, encoding)
        background.wait()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 16 * cap == sum(piece.size * 4 for piece in sources)
    assert cap / 4 < peak < cap + 3 * encoding.pack_bytes, peak / cap


def test_a_cap_too_small_for_changes_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(LocalFiles(tmp_path), ONE, cap=100)
    with pytest.raises(CheckpointError, match=r"checkpoint\.copy_bytes = 100.* needs 544 bytes"):
        ranks.save(1, keep_base=True)


class Broken(Live):
    """Memory that can be read no more, as of a chip that is lost."""

    def copy_to(self, _out: Array, _start: int) -> None:
        raise RuntimeError("chip lost")


@pytest.mark.parametrize("cap", [0, 64])
def test_a_state_that_cannot_be_copied_is_told_and_nothing_waits_for_it(
    tmp_path: Path, cap: int
) -> None:
    ranks = Ranks(LocalFiles(tmp_path), ONE, cap)
    sources = {Piece.whole("a", (40,)): Live(np.zeros(40, np.float32))}
    broken = {**sources, Piece.whole("b", (40,)): Broken(np.zeros(40, np.float32))}
    with pytest.raises(RuntimeError, match="chip lost"):
        ranks.ranks[0].save(Attempt(1, "one", 1), broken, Encoding(durable=False))
    ranks.wait()
    ranks.ranks[0].save(Attempt(2, "two", 1), sources, Encoding(durable=False))
    told = ranks.outcomes()
    assert told.pop(2) is None
    assert all("could not be copied (chip lost)" in str(error) for error in told.values())
    assert steps(ranks.store) == [2]


def test_a_copy_that_is_made_late_and_fails_is_told_too(tmp_path: Path) -> None:
    ranks = Ranks(LocalFiles(tmp_path), ONE)
    broken = {Piece.whole("b", (40,)): Broken(np.zeros(40, np.float32))}
    ranks.ranks[0].save(Attempt(1, "one", 1), broken, Encoding(durable=False), overlap=True)
    ranks.ranks[0].fence()  # training goes on
    ranks.wait()
    assert "chip lost" in str(ranks.outcomes()[1])
    assert steps(ranks.store) == []


def test_what_others_have_written_is_committed_when_the_last_has(tmp_path: Path) -> None:
    ranks = Ranks(LocalFiles(tmp_path), TWO)
    ranks.save(1, only=(0,))
    ranks.ranks[0].wait_written()
    assert ranks.ranks[0].is_busy
    assert ranks.store.head() is None
    ranks.save(1, only=(1,))
    assert ranks.outcomes() == {1: None}
    assert steps(ranks.store) == [1]


def test_a_newer_save_ends_the_wait_for_an_older_one(tmp_path: Path) -> None:
    ranks = Ranks(LocalFiles(tmp_path), Split(shards=3))
    ranks.save(1)
    ranks.save(2, only=(0, 2))
    ranks.save(3)
    told = ranks.outcomes()
    assert (told[1], told[3]) == (None, None)
    assert "1 of 3 ranks (rank 1) wrote nothing within" in str(told[2])
    ranks.save(2, only=(1,))  # it has come too late to be of use
    ranks.wait()
    assert steps(ranks.store) == [1, 3]


def test_changes_begin_anew_with_the_next_whole_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PARENT_WITHIN_S", 0.05)
    ranks, states = Ranks(LocalFiles(tmp_path), TWO), [adam_state(step) for step in range(8)]
    ranks.save(1, states[1], keep_base=True)
    ranks.wait()
    ranks.save(2, states[2], change=True, keep_base=True, only=(0,))  # a part is missing
    for rank in ranks.ranks:
        rank.wait_written()
    ranks.save(3, states[3], change=True, keep_base=True)
    for step in (4, 5, 6):
        for rank in ranks.ranks:
            rank.wait_written()
        ranks.save(step, states[step], change=step > 4, keep_base=True)
        await_true(lambda step=step: steps(ranks.store)[-1] == step)  # type: ignore[misc]
    told = ranks.outcomes()
    assert [told[step] for step in (1, 4, 5, 6)] == [None] * 4
    assert "(rank 1) wrote nothing" in str(told[2])
    assert "begin again with the next whole checkpoint" in str(told[3])
    commits = ranks.store.commits()
    assert [(commit.step, commit.depth) for commit in commits] == [(1, 0), (4, 0), (5, 1), (6, 2)]
    for commit in commits:
        assert read_all(ranks.store.reader(commit)) == as_bytes(states[commit.step])
