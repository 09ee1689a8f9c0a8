"""Storage that is full, forbidden, silent or strange: a line a save, and the last commit stays."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_saves import Gate, Obedient, Ranks, await_true
from memory_files import MemoryFiles
from states import LIMIT_S, ONE, TWO, adam_state, as_bytes, files_in, read_all, steps

from meshwright.checkpoint import committing
from meshwright.checkpoint.committing import Committing
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.upkeep import Upkeep

FAULTS: dict[str, Callable[[], Exception]] = {
    "No space left on device": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "Permission denied": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "KeyError: 'ETag'": lambda: KeyError("ETag"),  # of a library that nobody foresaw
    "MemoryError": MemoryError,
}


@pytest.mark.parametrize("where", ["packs/", "parts/", "branches/"])
@pytest.mark.parametrize("told", FAULTS)
def test_a_save_that_fails_is_told_once_and_the_next_succeeds(where: str, told: str) -> None:
    failing = False

    def before(name: str) -> None:
        if failing and name.startswith(where):
            raise FAULTS[told]()

    ranks = Ranks(Obedient(MemoryFiles(), before), ONE)
    for step in (1, 2, 3, 4):
        failing = step in (2, 3)
        ranks.save(step)
        ranks.wait()
        assert steps(ranks.store) == [1] if failing else [*range(1, step + 1, 3)]
    found = ranks.outcomes()
    assert len(ranks.told) == 4
    assert (found[1], found[4]) == (None, None)
    for line in (str(found[2]), str(found[3])):
        assert told in line and "\n" not in line
    assert read_all(ranks.store.reader(ranks.store.commits()[-1])) == as_bytes(adam_state(4))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder = tmp_path / "disk"
    folder.mkdir()
    options = [str(mount), "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if not (mount and umount) or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run([umount, str(folder)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    ranks = Ranks(LocalFiles(small_disk), TWO, chunk_bytes=1 << 14)
    small, large = adam_state(1), adam_state(2, (200, 300))
    ranks.save(1, small)
    ranks.wait()
    ranks.save(2, large)
    ranks.wait()
    assert steps(ranks.store) == [1]
    assert not files_in(small_disk, ".drafts")  # what was half written is gone, and so is room
    ranks.save(3, small)
    told = ranks.outcomes()
    assert (told[1], told[3]) == (None, None)
    assert "No space left on device" in str(told[2]) and "free space" in str(told[2])
    assert steps(ranks.store) == [1, 3]


def test_a_rank_whose_storage_hangs_is_named_after_the_deadline(tmp_path: Path) -> None:
    gate, files = Gate(), LocalFiles(tmp_path)
    ranks = Ranks([files, Obedient(files, gate)], TWO)
    gate.opened.set()
    ranks.save(1)
    assert ranks.outcomes() == {1: None}
    gate.opened.clear()
    ranks.committing._deadline_s = 0.05
    ranks.save(2)
    ranks.ranks[0].wait_written()
    await_true(lambda: not ranks.committing.is_busy)
    (told,) = ranks.committing.take_outcomes()
    assert told.step == 2 and told.commit is None
    assert "1 of 2 ranks (rank 1) wrote nothing within 0." in str(told.error)
    assert ranks.ranks[1].writing is not None
    assert steps(ranks.store) == [1]
    gate.opened.set()
    ranks.committing._deadline_s = LIMIT_S
    ranks.save(3)
    assert ranks.outcomes() == {1: None, 3: None}
    assert steps(ranks.store) == [1, 3]


def test_a_commit_that_hangs_is_given_up_and_told_again_if_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "_ANSWER_S", 0.0)
    gate = Gate(("branches/",))
    ranks = Ranks(Obedient(LocalFiles(tmp_path), gate), ONE, deadline_s=0.05)
    ranks.save(1)
    assert gate.reached.wait(60)
    ranks.save(2)
    ranks.ranks[0].wait_written()
    await_true(lambda: not ranks.ranks[0].is_busy)
    told = ranks.ranks[0].take_outcomes()
    assert [saved.step for saved in told] == [1, 2]
    assert all("storage has not answered within 0.05 s" in str(saved.error) for saved in told)
    assert ranks.ranks[0].take_outcomes() == []  # once
    gate.opened.set()
    ranks.wait()
    told = ranks.ranks[0].take_outcomes()
    assert [(saved.step, saved.error) for saved in told] == [(1, None), (2, None)]
    assert steps(ranks.store) == [1, 2]


def saved_and_kept(folder: Path, upto: int, policy: Policy) -> tuple[Ranks, Upkeep]:
    """A run whose commits are verified, and pruned, as they come."""
    ranks = Ranks(LocalFiles(folder), ONE)
    upkeep = Upkeep(ranks.store, policy)
    ranks.committing = Committing(ranks.store, "main", 60.0, upkeep.note)
    ranks.ranks[0]._committing = ranks.committing
    for step in range(1, upto + 1):
        ranks.save(step)
        ranks.wait()
        await_true(lambda: not upkeep.is_busy)
    return ranks, upkeep


def test_each_commit_is_verified_and_old_ones_go(tmp_path: Path) -> None:
    ranks, upkeep = saved_and_kept(tmp_path, 6, Policy(newest=2, verified=2, spaced=False))
    assert steps(ranks.store) == [5, 6]
    assert set(ranks.store.marks().verified) >= {one.id for one in ranks.store.commits()}
    assert upkeep.take_troubles() == []


def test_damage_is_told_and_what_is_good_stays_the_head(tmp_path: Path) -> None:
    ranks, upkeep = saved_and_kept(tmp_path, 2, Policy(newest=1, verified=2, spaced=False))
    before = set(files_in(tmp_path, "packs"))

    def tear(name: str) -> None:
        if name.startswith("branches/"):
            for path in set(files_in(tmp_path, "packs")) - before:
                path.write_bytes(path.read_bytes()[:-1] + b"?")

    torn = Store.over(Obedient(LocalFiles(tmp_path), tear), "here")
    ranks.ranks[0]._store = ranks.committing._store = torn
    ranks.save(3)
    ranks.wait()
    await_true(lambda: not upkeep.is_busy)
    ((step, trouble),) = upkeep.take_troubles()
    assert step == 3 and "damaged" in trouble and "packs/" in trouble
    assert steps(ranks.store) == [1, 2]
    assert [bool(one.bad) for one in ranks.store.log() if one.commit] == [True, False, False]


def test_upkeep_that_fails_in_whatever_way_is_told_and_goes_on(tmp_path: Path) -> None:
    failing = True

    def before(name: str) -> None:
        if failing and name.startswith("marks/"):
            raise KeyError("ETag")

    ranks = Ranks(Obedient(LocalFiles(tmp_path), before), ONE)
    upkeep = Upkeep(ranks.store, Policy())
    ranks.save(1)
    ranks.wait()
    commit = ranks.store.commits()[0]
    upkeep.note(commit)
    await_true(lambda: not upkeep.is_busy)
    assert upkeep.take_troubles() == [(1, "KeyError: 'ETag'")]
    failing = False
    upkeep.note(commit)
    await_true(lambda: not upkeep.is_busy)
    assert upkeep.take_troubles() == []
    assert commit.id in ranks.store.marks().verified
