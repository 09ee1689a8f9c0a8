"""Upkeep beside training, and what of a line need not be read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import (
    Split,
    adam_state,
    flip,
    fresh,
    relative,
    save,
    shares,
)

from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.rehearsal import newest_good, rehearse
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.upkeep import Upkeep
from meshwright.checkpoint.writing import Encoding

FULL = Encoding("planes", chunk_bytes=64, durable=False)
WIDE = Split(dim=1, tp=2, shards=2)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(home: Path) -> Store:
    return fresh(home)


class OutOfReach(LocalFiles):
    """A place that answers nothing."""

    def read(self, *_: Any, **__: Any) -> bytes:
        raise OSError("no route to host")


def test_upkeep_rehearses(store: Store, home: Path) -> None:
    commit = save(store, 1)
    upkeep = Upkeep(store, Policy())
    upkeep.note(commit)
    wait_until_idle(upkeep)
    assert set(store.marks().verified) == {commit.id} and not upkeep.take_troubles()
    assert upkeep.verified == commit
    second = save(store, 2)
    words = flip(home, store, second)
    upkeep.note(second)
    wait_until_idle(upkeep)
    ((step, trouble),) = upkeep.take_troubles()
    assert step == 2 and words in trouble


def test_a_replica_out_of_reach_holds_up_nothing_else(store: Store, tmp_path: Path) -> None:
    made = [save(store, step) for step in (1, 2, 3)]
    for commit in made[:2]:
        rehearse(store, commit)

    def fail() -> None:
        raise OSError("no route to host")

    least = Policy(newest=1, verified=2, spaced=False)
    upkeep = Upkeep(store, least, OutOfReach(tmp_path / "replica"), fail, "main")
    upkeep.note(made[2])
    wait_until_idle(upkeep)
    assert upkeep.take_troubles() == [(3, "OSError: no route to host")]
    assert store.commits() == made[1:]


def test_damage_counts_though_the_replica_is_out_of_reach(
    store: Store, home: Path, tmp_path: Path
) -> None:
    first, second = save(store, 1), save(store, 2)
    flip(home, store, second)
    with pytest.raises(DamagedCommitError):
        rehearse(store, second, OutOfReach(tmp_path / "replica"))
    assert store.head() == first


def test_each_trouble_of_upkeep_is_told(store: Store, home: Path) -> None:
    commit = save(store, 1)
    words = flip(home, store, commit)

    def fail() -> None:
        raise OSError("no route to host")

    upkeep = Upkeep(store, Policy(), also=fail)
    upkeep.note(commit)
    wait_until_idle(upkeep)
    first, second = upkeep.take_troubles()
    assert words in first[1] and second == (1, "OSError: no route to host")


def test_the_replica_of_a_run_is_opened_once_and_pruned_of_its_branch(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = StoreAt(str(home), "run", replica=str(tmp_path / "replica"))
    store, opened = at.open(create=True), list[str]()
    others = [save(store, step) for step in (1, 2, 3, 4)]
    for commit in others:
        store.verify(commit)
    whole = StoreAt.open

    def noted(at: StoreAt) -> Store:
        opened.append(at.address)
        return whole(at)

    monkeypatch.setattr(StoreAt, "open", noted)
    upkeep = at.upkeep(store, Policy(newest=1, verified=2, spaced=False))
    for step in (1, 2, 3):
        upkeep.note(save(store, step, adam_state(10 + step), branch="run"))
        wait_until_idle(upkeep)
    assert upkeep.take_troubles() == []
    assert opened == [at.replica]
    for one in (store, Store.open(at.replica)):
        assert [commit.step for commit in one.commits("run")] == [2, 3]
        assert [commit.id for commit in one.commits()] == [commit.id for commit in others]


def wait_until_idle(upkeep: Upkeep) -> None:
    for _ in range(2000):
        if not upkeep.is_busy:
            return
        time.sleep(0.005)
    raise AssertionError("upkeep does not come to an end")


class Counted(LocalFiles):
    """A folder that counts what is read of packs."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.__dict__["reads"] = self.__dict__.get("reads", 0) + name.startswith("packs/")
        return super().read(name, start, stop)


def chained(store: Store, depth: int) -> list[Commit]:
    """A whole commit, and changes that follow on one another."""
    made = [save(store, 0, encoding=Encoding("raw", 32, durable=False))]
    for step in range(1, depth + 1):
        made.append(save(store, step, encoding=relative(step), base=adam_state(step - 1)))
    assert made[-1].depth == depth
    return made


def test_what_is_relative_to_damage_is_passed_by_without_reading_it(
    store: Store, home: Path
) -> None:
    """Each was read down its chain before: as many times as there are commits, and squared."""
    first = save(store, 0, adam_state(99))
    reads = {}
    for depth in (4, 16):
        made = chained(store, depth)
        words = flip(home, store, made[0], chunk=1)
        files = Counted(home)
        found = newest_good(Store.over(files, str(home)))
        reads[depth] = files.__dict__["reads"]
        assert found.commit == first
        assert [commit for commit, _ in found.bad] == made[::-1]
        assert all(words in why for _, why in found.bad)
        store.rollback(first)
    assert reads[16] < 5 * reads[4]


def test_what_does_without_the_damage_is_not_passed_by(store: Store, home: Path) -> None:
    """A change may hold a tensor whole: of another type, or of another layout."""
    state = adam_state(1)
    base = save(store, 1, state, encoding=Encoding("raw", 32, durable=False))
    wide = {**adam_state(2), "router/load": np.full(5, 2, np.float64)}
    rest = {name: x for name, x in state.items() if name != "router/load"}
    second = save(store, 2, wide, encoding=relative(2), base=rest)
    attempt = Attempt(3, "whole", 1)
    held = shares({**adam_state(3), "router/load": state["router/load"]}, Split())[0]
    store.write_part(attempt, 0, held, Encoding("raw", 32, durable=False), like=base)
    third = store.commit(attempt, {})
    assert (second.depth, third.depth) == (1, 0)
    flip(home, store, base, "router/load")
    found = newest_good(store)
    assert found.commit == second and [commit for commit, _ in found.bad] == [third]
