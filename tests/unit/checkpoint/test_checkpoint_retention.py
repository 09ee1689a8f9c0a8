"""What stays, what goes, and that nothing goes too early."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import (
    ONE,
    TWO,
    adam_state,
    as_bytes,
    files_in,
    fresh,
    read_all,
    relative,
    save,
    shares,
    steps,
    write,
)

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import Entry
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.marks import Marks
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.retention import Policy, doomed
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

LEAST = Policy(newest=1, verified=2, spaced=False)
FULL = Encoding(chunk_bytes=32, durable=False)


def line_of(depths: list[int]) -> list[Commit]:
    """Commits of steps 1, 2, ...; `depths` are brought down to what a chain can be."""
    found: list[Commit] = []
    for step, wanted in enumerate(depths, 1):
        depth = min(wanted, found[-1].depth + 1 if found else 0)
        depth = depth if depth in (0, found[-1].depth + 1 if found else 0) else 0
        parent = found[-1].id if found else None
        found.append(Commit(f"{step:016x}", step, "main", step, parent, "here", "a", depth))
    return found


commits = st.lists(st.integers(0, 9), min_size=1, max_size=30).map(line_of)
policies = st.builds(Policy, st.integers(1, 4), st.integers(0, 4), st.booleans())


@settings(max_examples=200, deadline=None)
@given(commits, st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), policies)
def test_what_stays_is_enough(
    line: list[Commit], verified: set[int], tagged: set[int], policy: Policy
) -> None:
    marks = Marks({c.id: 1 for c in line if c.step in verified})
    tags = [c.id for c in line if c.step in tagged]
    gone = doomed([line], line, marks, tags, policy)
    left = [commit for commit in line if commit not in gone]
    good = [commit for commit in line if commit.id in marks.verified]
    assert line[-1] in left
    assert set(good[-2:]) <= set(left)
    assert {commit.id for commit in left} >= set(tags)
    for commit in gone:  # a newer one is verified
        assert any(other.step > commit.step for other in good)
    ids = {commit.id for commit in left}
    assert all(not commit.depth or commit.parent in ids for commit in left)
    here = {commit.id for commit in line}
    for commit in gone:  # and so it is after each single removal
        here.remove(commit.id)
        assert all(not c.depth or c.parent in here for c in line if c.id in here)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 200))
def test_verified_commits_stay_at_growing_distance(length: int) -> None:
    """marin#5386: the newest were corrupt, the next older one 8,000 steps away. Applied at each
    commit, distances never grow by more than a factor."""
    line: list[Commit] = []
    for step in range(1, length + 1):
        line.append(Commit(f"{step:016x}", step, "main", step, None, "here", "a"))
        marks = Marks({commit.id: 1 for commit in line})
        gone = doomed([line], line, marks, [], Policy(newest=1))
        line = [commit for commit in line if commit not in gone]
    back = [length - commit.step for commit in line][::-1]
    assert back[0] == 0
    assert len(back) <= 2 * length.bit_length() + 3
    assert all(far <= 4 * max(near, 1) for near, far in pairwise(back))
    assert back[-1] >= length // 4


def test_nothing_goes_until_a_newer_one_is_verified(tmp_path: Path) -> None:
    """KempnerForge#102: with a limit of one, the last whole checkpoint is removed while the next is
    still being written."""
    store = fresh(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
        assert store.retain(LEAST) == []
    first, second, _ = store.commits()
    store.verify(second)
    assert store.retain(LEAST) == [first]
    fourth = save(store, 4)
    assert store.retain(LEAST) == []
    store.verify(fourth)
    assert [commit.step for commit in store.retain(LEAST)] == [3]  # 2 and 4 are verified
    assert steps(store) == steps(Store.open(tmp_path)) == [2, 4]


def test_bad_ones_do_not_count(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    made = [save(store, step) for step in (1, 2, 3, 4)]
    for commit in made:
        store.verify(commit)
    store.mark_bad(made[3], "flipped")
    store.mark_bad(made[1], "flipped")
    gone = store.retain(LEAST)
    assert gone == [made[1]]
    assert steps(store) == [1, 3]


def test_heads_tags_and_what_they_need_stay(tmp_path: Path) -> None:
    store, states = fresh(tmp_path), [adam_state(step) for step in range(6)]
    made = [save(store, 0, states[0], encoding=FULL)]
    for step in range(1, 4):
        made.append(save(store, step, states[step], encoding=relative(step), base=states[step - 1]))
    made += [save(store, step, states[step], encoding=FULL) for step in (4, 5)]
    store.tag("best", made[2])
    store.start_branch("trial", made[1])
    for commit in made[4:]:
        store.verify(commit)
    assert store.retain(LEAST) == [made[3]]
    store.gc(0)
    for step in (0, 1, 2, 4, 5):
        assert read_all(store.reader(made[step])) == as_bytes(states[step])
    store.untag("best")
    assert store.retain(LEAST) == [made[2]]
    with pytest.raises(CheckpointError, match="not here any more"):
        store.reader(made[2])


def test_a_branch_keeps_what_it_has_nothing_verified_after(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    made = [save(store, step) for step in (1, 2, 3, 4, 5)]
    store.start_branch("trial", made[2])
    for commit in made[3:]:
        store.verify(commit)
    assert store.retain(LEAST) == []
    store.verify(made[2])
    assert store.retain(LEAST) == made[:2]


def test_what_a_rollback_left_goes_once_something_newer_is_verified(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second, third = (save(store, step) for step in (1, 2, 3))
    store.verify(first)
    store.rollback(first)
    assert store.retain(LEAST) == []
    again = save(store, 2, adam_state(20))
    store.verify(again)
    assert store.retain(LEAST) == [second, third]
    assert store.commits() == [first, again]


def test_a_run_prunes_its_own_branch(tmp_path: Path) -> None:
    """Of a store that runs share, each with its own policy."""
    store, made = fresh(tmp_path), {}
    for branch in ("main", "other"):
        made[branch] = [save(store, step, branch=branch) for step in (1, 2, 3, 4)]
        for commit in made[branch]:
            store.verify(commit)
    assert store.retain(LEAST, "other") == made["other"][:2]
    assert (steps(store), steps(store, "other")) == ([1, 2, 3, 4], [3, 4])
    assert store.retain(LEAST) == made["main"][:2], "all branches, if none is named"


def test_what_a_branch_of_another_run_is_relative_to_stays(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    made = [save(store, step, encoding=FULL) for step in (1, 2, 3, 4)]
    store.start_branch("trial", made[0])
    child = save(store, 2, adam_state(9), ONE, relative(2), adam_state(1), branch="trial")
    save(store, 3, adam_state(8), branch="trial", encoding=FULL)
    for commit in [*made, *store.commits("trial")]:
        store.verify(commit)
    assert child.depth == 1
    assert store.retain(LEAST, "main") == [made[1]]
    assert read_all(store.reader(child)) == as_bytes(adam_state(9))


def test_pruning_looks_at_each_commit_a_few_times() -> None:
    class Counted(list[Commit]):
        looked = 0

        def __iter__(self) -> Iterator[Commit]:
            for commit in super().__iter__():
                self.looked += 1
                yield commit

    line = Counted(line_of([0] * 500))
    marks = Marks({commit.id: 1 for commit in list(line)[::2]})
    assert doomed([line], list(line), marks, [], LEAST)
    assert line.looked <= 8 * len(line)


def test_a_mark_that_is_made_while_garbage_is_collected_stays(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = save(store, 1)

    class Busy(LocalFiles):
        def names(self, prefix: str) -> list[Entry]:
            if prefix == "parts/" and len(store.commits()) == 1:  # commits have been listed
                store.mark_bad(save(store, 2), "flipped")
            return super().names(prefix)

    Store.over(Busy(tmp_path), "there").gc(0)
    assert len(store.log()) == 2
    assert store.commits() == [first]


def age(folder: Path, seconds: float) -> None:
    """Make all files look that old."""
    then = time.time() - seconds
    for path in files_in(folder):
        os.utime(path, (then, then))


def test_garbage_is_what_no_commit_needs_once_it_is_old(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    frozen = {"frozen": np.arange(1000, dtype=np.float32)}
    for step in (1, 2, 3):
        encoding = Encoding(pack_bytes=64, durable=False)  # what is frozen has packs of its own
        save(store, step, {**adam_state(step), **frozen}, TWO, encoding)
    for commit in store.commits()[1:]:
        store.verify(commit)
    dead = write(store, 4, adam_state(4), TWO, ranks=(0,))
    draft = tmp_path / ".drafts" / "left"
    draft.parent.mkdir(exist_ok=True)
    draft.write_bytes(b"half")
    LocalFiles(tmp_path).create("packs/ab/abcd", [b"its part will come"])
    assert [commit.step for commit in store.retain(LEAST)] == [1]
    before = len(files_in(tmp_path, "packs"))
    young = store.gc(60)
    assert (young.packs, young.parts, young.drafts) == (0, 4, 0)  # parts of what is committed
    assert len(files_in(tmp_path, "packs")) == before
    age(tmp_path, 100)
    old = store.gc(60)
    assert (old.parts, old.drafts) == (3, 1)
    assert old.packs >= 1
    assert len(files_in(tmp_path, "packs")) == before - old.packs
    assert old.bytes > 0
    for commit in store.commits():
        expected = {**adam_state(commit.step), **frozen}
        assert read_all(store.reader(commit)) == as_bytes(expected)
    with pytest.raises(CheckpointError, match="wrote nothing"):
        store.commit(dead, {})
    assert store.gc(60) == replace(old, packs=0, parts=0, drafts=0, bytes=0, marks=0)


def test_what_an_attempt_in_progress_needs_is_no_garbage(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(2)
    save(store, 1)
    lost = write(store, 2, state)  # never committed; another try finds its packs there
    age(tmp_path, 100)
    for path in files_in(tmp_path, f"parts/{lost.name}"):
        path.unlink()
    attempt = write(store, 2, state)
    store.gc(60)
    commit = store.commit(attempt, {})
    assert read_all(store.reader(commit)) == as_bytes(state)


def test_a_pack_that_was_collected_too_early_is_noticed(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(2)
    write(store, 2, state)
    attempt = write(store, 2, state)  # finds the first one's pack
    for path in files_in(tmp_path, "packs"):
        if path.stat().st_size > 200:
            path.unlink()
    with pytest.raises(CheckpointError, match=r"packs/.*(removed while|absent)"):
        store.commit(attempt, {})
    assert steps(store) == []


def test_a_pack_of_the_parent_that_is_gone_is_noticed(tmp_path: Path) -> None:
    store, frozen = fresh(tmp_path), {"frozen": np.arange(100)}
    first = save(store, 1, frozen)
    attempt = write(store, 2, {**frozen, "w": np.zeros(1)}, parent=first)
    used = store.reader(first).stored("frozen")[0].chunks[0].pack
    (tmp_path / "packs" / used[:2] / used).unlink()
    with pytest.raises(CheckpointError, match=rf"packs/{used[:2]}/{used}: was removed while"):
        store.commit(attempt, {})


def test_nothing_is_collected_while_a_record_is_damaged(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    save(store, 1)
    save(store, 2)
    age(tmp_path, 100)
    record = files_in(tmp_path, "branches")[0]
    record.write_bytes(record.read_bytes()[:-1])
    packs = files_in(tmp_path, "packs")
    with pytest.raises(CheckpointError, match=r"000000001.json: is damaged"):
        Store.open(tmp_path).gc(0)
    assert files_in(tmp_path, "packs") == packs


def test_folders_that_become_empty_do_not_stop_who_writes(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    for number in range(50):
        assert files.create(f"parts/a/{number}", [b"x"])
        files.remove(f"parts/a/{number}")
    assert not (tmp_path / "parts" / "a").exists()
    store = fresh(tmp_path)
    store.write_part(Attempt(1, "a", 1), 0, shares(adam_state(1), TWO)[0])
