"""Commits relative to their parent: chains are read back to what is full and replayed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import (
    ONE,
    TWO,
    Split,
    adam_state,
    as_bytes,
    files_in,
    fresh,
    read_all,
    relative,
    save,
    shares,
    write,
)

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.writing import Encoding

FULL = Encoding(chunk_bytes=32, durable=False)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["full", "relative", "same", "one"]), min_size=1, max_size=7),
    st.integers(1, 2),
    st.integers(0, 3),
)
def test_every_commit_of_a_chain_reads_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], shards: int, names: int
) -> None:
    store, split = fresh(tmp_path_factory.mktemp("store")), Split(shards=shards)
    state = adam_state(0, names=names)
    expected = [(save(store, 0, state, split, FULL), as_bytes(state))]
    depth = 0
    for step, kind in enumerate(kinds, 1):
        old, state = state, dict(state)
        match kind:
            case "full" | "relative":
                state = adam_state(step, names=names)
            case "one":
                state["router/load"] = state["router/load"] + 1
        if kind == "full":
            commit, depth = save(store, step, state, split, FULL), 0
        else:
            commit = save(store, step, state, split, relative(step), old)
            assert commit.depth in (depth + 1, 0)  # 0 if nothing had to be relative
            depth = commit.depth
        expected.append((commit, as_bytes(state)))
    for commit, content in expected:
        assert read_all(store.reader(commit)) == content
        store.verify(commit)


def test_an_update_is_stored_for_parameter_and_moments_together(tmp_path: Path) -> None:
    store, old, new = fresh(tmp_path), adam_state(1), adam_state(2)
    save(store, 1, old, TWO, FULL)
    reader = store.reader(save(store, 2, new, TWO, relative(2), old))
    codecs = {row.of: {chunk.codec for chunk in row.chunks} for row in reader.stored("param/w0")}
    assert codecs == {("param/w0", "adamw.m/w0", "adamw.v/w0"): {"adamw"}}
    assert {chunk.codec for row in reader.stored("router/load") for chunk in row.chunks} == {"xor"}


def test_a_chain_longer_than_the_stack_is_deep(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), {"w": np.zeros(2, np.float32)}
    save(store, 0, state, encoding=FULL)
    length = 60
    for step in range(1, length + 1):
        old, state = state, {"w": state["w"] + 1}
        save(store, step, state, encoding=relative(step), base=old)
    reader, limit = store.reader(store.commits()[-1]), sys.getrecursionlimit()
    assert reader.commit.depth == length
    assert reader.names == ["w"]
    frames = 0
    frame = sys._getframe()
    while frame is not None:
        frames, frame = frames + 1, frame.f_back  # type: ignore[assignment]
    try:
        sys.setrecursionlimit(frames + length)
        assert reader.elements(reader.stored("w")[0], 0, reader.stored("w")[0].cut(0))[0][0] == 60
    finally:
        sys.setrecursionlimit(limit)


def test_a_base_that_is_not_the_parent_is_refused(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    save(store, 1, adam_state(1), TWO, FULL)
    with pytest.raises(CheckpointError, match="base is not what the parent commit holds"):
        save(store, 2, adam_state(2), TWO, relative(2), adam_state(3))
    with pytest.raises(CheckpointError, match="its base float64"):
        wrong = {name: array.astype(np.float64) for name, array in adam_state(1).items()}
        save(store, 2, adam_state(2), TWO, relative(2), wrong)
    assert store.head() == store.commits()[0]


@pytest.mark.parametrize("encoding", [relative(2, 32), relative(2, 24)])
def test_another_layout_or_another_cut_is_written_in_full(
    tmp_path: Path, encoding: Encoding
) -> None:
    store, (old, new) = fresh(tmp_path), map(adam_state, (1, 2))
    del old["router/load"], new["router/load"]
    save(store, 1, old, TWO, FULL)
    split = ONE if encoding.chunk_bytes == 32 else TWO
    commit = save(store, 2, new, split, encoding, old)
    assert commit.depth == 0
    assert read_all(store.reader(commit)) == as_bytes(new)


def test_a_parent_that_is_gone_is_told(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    with pytest.raises(CheckpointError, match="commit 0123456789abcdef, which step 2 goes on from"):
        store.write_part(Attempt(2, "a", 1, "0123456789abcdef"), 0, {})


def test_ranks_with_other_parents_are_refused(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = save(store, 1, split=TWO)
    second = save(store, 2, split=TWO)
    attempt = write(store, 3, adam_state(3), TWO, ranks=(0,), parent=second)
    other = replace(attempt, parent=first.id)
    store.write_part(other, 1, shares(adam_state(3), TWO)[1])
    with pytest.raises(CheckpointError, match="same attempt"):
        store.commit(attempt, {})


def test_damage_anywhere_in_a_chain_is_found(tmp_path: Path) -> None:
    store, states = fresh(tmp_path), [adam_state(step) for step in range(4)]
    save(store, 0, states[0], encoding=FULL)
    for step in range(1, 4):
        save(store, step, states[step], encoding=relative(step), base=states[step - 1])
    head = store.commits()[-1]
    packs = files_in(tmp_path, "packs")
    assert len(packs) == 4
    for path in packs:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
        with pytest.raises(DamagedCommitError, match=path.name):
            store.verify(head)
        content[0] ^= 1
        path.write_bytes(content)
    assert read_all(store.reader(head)) == as_bytes(states[3])


def test_arithmetic_that_leads_elsewhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor could round otherwise: what is replayed has a hash too."""
    store, old, new = fresh(tmp_path), adam_state(1), adam_state(2)
    save(store, 1, old, encoding=FULL)
    commit = save(store, 2, new, encoding=relative(2), base=old)
    from meshwright.checkpoint.codec import adamw

    real = adamw._Predictor.v

    def off_by_a_bit(self: adamw._Predictor, *given: Any) -> Any:
        bits = real(self, *given).copy()
        bits[-1] ^= 1
        return bits

    monkeypatch.setattr(adamw._Predictor, "v", off_by_a_bit)
    with pytest.raises(DamagedCommitError, match="does not follow from the step before"):
        store.reader(commit).read("param/w0")
