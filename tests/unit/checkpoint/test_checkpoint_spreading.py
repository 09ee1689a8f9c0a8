"""Damage stays where it is: what goes on from a commit that was found bad takes nothing of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from states import (
    ONE,
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
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.writing import Encoding

FULL = Encoding(chunk_bytes=64, durable=False)
FROZEN = np.arange(64, dtype=np.float32)


def state_at(step: int) -> dict[str, np.ndarray]:
    """One tensor that never changes, and one that does."""
    return {"frozen": FROZEN, "w": np.full(3, step, np.float32)}


def whole(store: Store, step: int, like: Commit | None = None) -> Commit:
    """A commit that is no change, and takes what is equal from `like`."""
    attempt = Attempt(step, f"a{step}", 1)
    store.write_part(attempt, 0, shares(state_at(step), ONE)[0], FULL, like=like)
    return store.commit(attempt, {})


def flip(store: Store, commit: Commit) -> None:
    """One bit of the tensor that never changes."""
    pack = store.reader(commit).stored("frozen")[0].chunks[0].pack
    path = Path(store.address) / "packs" / pack[:2] / pack
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_a_save_takes_nothing_of_what_was_found_damaged(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = whole(store, 1)
    second = whole(store, 2, first)
    assert store.reader(first).stored("frozen") == store.reader(second).stored("frozen")
    flip(store, first)
    with pytest.raises(DamagedCommitError):
        store.verify(second)
    third = whole(store, 3, second)
    store.verify(third)
    assert read_all(store.reader(third)) == as_bytes(state_at(3))


def test_what_was_saved_while_damage_was_found_is_not_trusted_either(tmp_path: Path) -> None:
    """The third took it before the second was read, and is not read yet."""
    store = fresh(tmp_path)
    second = whole(store, 2, whole(store, 1))
    flip(store, second)
    third = whole(store, 3, second)
    with pytest.raises(DamagedCommitError):
        store.verify(second)
    fourth = whole(store, 4, third)
    store.verify(fourth)
    packs = len(files_in(tmp_path, "packs"))
    fifth = whole(store, 5, fourth)  # that was verified since, so it is used again
    assert store.reader(fifth).stored("frozen") == store.reader(fourth).stored("frozen")
    assert len(files_in(tmp_path, "packs")) == packs + 1


def test_no_change_follows_on_what_is_bad(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = save(store, 1, encoding=FULL)
    second = save(store, 2, encoding=relative(2, 64), base=adam_state(1))
    assert second.depth == 1
    store.mark_bad(first, "flipped")
    with pytest.raises(CheckpointError, match=rf"{first.id[:8]}.*no change can follow"):
        write(store, 3, adam_state(3), ONE, relative(3, 64), adam_state(2), parent=second)
    taken = write(store, 3, adam_state(3), ONE, FULL, parent=second)
    assert store.commit(taken, {}).depth == 0


def test_what_is_no_change_of_a_bad_parent_takes_nothing_of_it(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = whole(store, 1)
    flip(store, first)
    with pytest.raises(DamagedCommitError):
        store.verify(first)
    attempt = write(store, 2, state_at(2), ONE, FULL, parent=first)
    part = next(iter(files_in(tmp_path, f"parts/{attempt.name}"))).read_text()
    assert '"found":[]' in part


def test_a_part_may_be_written_again_though_less_is_taken_from_elsewhere(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, held = whole(store, 1), shares(state_at(2), ONE)[0]
    attempt = Attempt(2, "a2", 1)
    store.write_part(attempt, 0, held, FULL, like=first)
    store.write_part(attempt, 0, held, FULL)
    assert read_all(store.reader(store.commit(attempt, {}))) == as_bytes(state_at(2))
    with pytest.raises(CheckpointError, match=r"rank 0 has written step 2.*name of its own"):
        store.write_part(Attempt(3, "a2", 1), 0, held, FULL)


@pytest.mark.parametrize("where", ["parts", "packs"])
def test_a_part_that_cannot_be_read_is_written_again(tmp_path: Path, where: str) -> None:
    store, held = fresh(tmp_path), shares(state_at(1), ONE)[0]
    attempt, like = Attempt(1, "a", 1), whole(store, 9)
    before = set(files_in(tmp_path))
    store.write_part(attempt, 0, held, FULL)
    for path in set(files_in(tmp_path, where)) - before:
        path.write_bytes(path.read_bytes()[:-9])
    store.write_part(attempt, 0, held, FULL, like=like)
    commit = store.commit(attempt, {})
    assert read_all(store.reader(commit)) == as_bytes(state_at(1))
