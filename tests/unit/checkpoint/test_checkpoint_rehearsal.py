"""Commits are tried before they are needed, repaired from a replica, or passed over."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from states import (
    Split,
    adam_state,
    as_bytes,
    files_in,
    flip,
    fresh,
    pack_path,
    read_all,
    relative,
    save,
)

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import codec, keys, rehearsal
from meshwright.checkpoint.files import open_files
from meshwright.checkpoint.holding import DamagedRecordError
from meshwright.checkpoint.keys.base import versions
from meshwright.checkpoint.keys.local import KeyFile, make_key_file
from meshwright.checkpoint.keys.rotation import rotate
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.rehearsal import newest_good, rehearse, verified_age_s, yield_to_others
from meshwright.checkpoint.replicas import mirror
from meshwright.checkpoint.seal import SealError
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.verifying import check
from meshwright.checkpoint.writing import Encoding

FULL = Encoding("planes", chunk_bytes=64, durable=False)
WIDE = Split(dim=1, tp=2, shards=2)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(home: Path) -> Store:
    return fresh(home)


@pytest.fixture
def replica(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path / "replica")


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_whole_commit_is_checked_to_its_last_element(store: Store, at_once: int) -> None:
    commit = save(store, 1, split=WIDE, encoding=FULL)
    told: list[tuple[int, int]] = []
    size = sum(array.nbytes for array in adam_state(1).values())
    found = check(store.reader(commit), lambda done, of: told.append((done, of)), at_once)
    assert (found.bytes, found.damages) == (size, ())
    assert told[-1] == (size, size) and told == sorted(told) and len(told) > 8
    assert sum(b for b, _ in told[:1]) < size


def test_all_that_is_damaged_is_found_and_named(store: Store, home: Path) -> None:
    commit = save(store, 1, encoding=FULL)
    places = {("param/w0", 1), ("adamw.v/w0", 0), ("router/load", 0)}
    expected = {flip(home, store, commit, *place) for place in places}
    found = check(store.reader(commit))
    assert {(one.tensor, one.chunk) for one in found.damages} == places
    for words in expected:
        assert any(words in str(one) for one in found.damages), words
    size = sum(array.nbytes for array in adam_state(1).values())
    assert 0 < found.bytes < size


def test_damage_of_what_a_delta_is_relative_to_is_found_once(store: Store, home: Path) -> None:
    first = save(store, 1, encoding=Encoding("raw", 32, durable=False))
    save(store, 2, encoding=relative(2), base=adam_state(1))
    third = save(store, 3, encoding=relative(3), base=adam_state(2))
    assert third.depth == 2 and not check(store.reader(third)).damages
    words = flip(home, store, first, "param/w0", 1)
    (damage,) = check(store.reader(third)).damages
    assert words in str(damage)
    with pytest.raises(DamagedCommitError):
        rehearse(store, third)


def test_a_damaged_index_is_damage(store: Store, home: Path) -> None:
    commit = save(store, 1)
    reader = store.reader(commit)
    (path,) = files_in(home, "packs")
    path.write_bytes(path.read_bytes()[:-9])
    (damage,) = check(reader).damages
    assert "index of rank 0 is damaged" in str(damage)


@pytest.mark.parametrize("split", [Split(), WIDE])
def test_a_rehearsal_reads_restores_and_marks(store: Store, split: Split) -> None:
    commit = save(store, 1, adam_state(1, (9, 8), names=3), split, FULL)
    assert verified_age_s(store) is None
    found = rehearse(store, commit)
    size = sum(array.nbytes for array in adam_state(1, (9, 8), names=3).values())
    assert (found.commit, found.read_bytes, found.restored_bytes) == (commit, size, size)
    assert set(store.marks().verified) == {commit.id}
    some = rehearse(store, commit, restore_bytes=3 * 288)
    assert 288 <= some.restored_bytes <= 3 * 288
    assert rehearse(store, commit, restore_bytes=0).restored_bytes > 0, "one at least"


def test_a_rehearsal_restores_what_is_relative(store: Store) -> None:
    save(store, 1, encoding=Encoding("raw", 32, durable=False))
    second = save(store, 2, encoding=relative(2), base=adam_state(1))
    size = sum(array.nbytes for array in adam_state(2).values())
    assert rehearse(store, second).restored_bytes == size


def test_a_load_that_goes_wrong_fails_the_rehearsal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks are right, and still the tensor is put together wrong."""
    first, commit = save(store, 1, split=WIDE), save(store, 2, split=WIDE)
    whole = type(store.reader(commit)).read
    monkeypatch.setattr("meshwright.checkpoint.reader.Reader.read", lambda s, n: whole(s, n)[::-1])
    with pytest.raises(DamagedCommitError, match="restored otherwise than saved"):
        rehearse(store, commit)
    assert set(store.marks().bad) == {commit.id} and store.head() == first


def test_a_damaged_commit_is_marked_bad(store: Store, home: Path) -> None:
    first, second = save(store, 1), save(store, 2)
    flip(home, store, second)
    with pytest.raises(DamagedCommitError, match=r"param/w0 is damaged: chunk 0, bytes \[0, 84\)"):
        rehearse(store, second)
    assert store.head() == first and not store.marks().verified


def test_the_age_is_that_of_the_newest_commit_that_passed(store: Store) -> None:
    first, second = save(store, 1), save(store, 2)
    third = save(store, 3)
    rehearse(store, second)
    rehearse(store, first)
    assert verified_age_s(store, now_s=second.time_s + 40) == pytest.approx(40)
    assert verified_age_s(store, now_s=second.time_s - 5) == 0, "clocks differ"
    store.mark_bad(second, "")
    assert verified_age_s(store, now_s=first.time_s + 7) == pytest.approx(7)
    rehearse(store, third)
    assert verified_age_s(store, now_s=third.time_s + 1) == pytest.approx(1)


def test_a_wrong_key_or_storage_that_is_down_says_nothing_about_a_commit(tmp_path: Path) -> None:
    make_key_file(tmp_path / "key")
    home = tmp_path / "store"
    sealed = keys.open_seal(open_files(home), f"file:{tmp_path / 'key'}")
    store = Store.open(home, sealed, create=True)
    commit = save(store, 1)
    rehearse(store, commit)
    for path in files_in(home, "keys"):
        path.unlink()
    again = Store(store.holding)
    sealed._opened.clear()
    with pytest.raises(SealError, match="is lost"):
        rehearse(again, commit)
    assert not store.marks().bad

    class Down(LocalFiles):
        def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if name.startswith("packs/"):
                raise OSError("down")
            return super().read(name, start, stop)

    plain = fresh(tmp_path / "plain")
    commit = save(plain, 1)
    down = Store.over(Down(tmp_path / "plain"), "there")
    with pytest.raises(CheckpointError, match="cannot be read"):
        newest_good(down)
    assert not plain.marks().bad and plain.head() == commit


class Broken:
    """A codec that gives another last element, and is asked so often at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self._decode, self._left = codec.decode, most
        monkeypatch.setattr(codec, "decode", self)

    def __call__(self, *asked: Any) -> Any:
        assert self._left, "it does not come to an end"
        self._left -= 1
        found = self._decode(*asked).copy()
        found[-1] += 1
        return found


def test_elements_that_a_codec_gives_wrong_are_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = store.reader(save(store, 1))
    Broken(monkeypatch, 4)
    found = check(reader)
    assert found.bytes == 0 and len(found.damages) == 4
    assert "other elements than were saved" in str(found.damages[0])


def test_what_a_replica_cannot_mend_is_not_mended_forever(
    store: Store, replica: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = save(store, 1)
    mirror(store.holding.files, replica)
    Broken(monkeypatch, 8)
    found = newest_good(store, replica)
    assert found.commit is None and [one for one, _ in found.bad] == [commit]


# Replicas


def test_a_replica_is_the_same_store(store: Store, replica: LocalFiles, tmp_path: Path) -> None:
    commits = [save(store, 1), save(store, 2)]
    store.tag("good", commits[0])
    first = mirror(store.holding.files, replica)
    assert first.files == len(files_in(tmp_path / "replica")) and first.bytes > 500
    assert mirror(store.holding.files, replica).files == 0
    commits.append(save(store, 3))
    assert mirror(store.holding.files, replica).files > 0
    copy = Store.open(tmp_path / "replica")
    assert [one.id for one in copy.commits()] == [one.id for one in commits]
    assert read_all(copy.reader(copy.find("good"))) == as_bytes(adam_state(1))
    with pytest.raises(CheckpointError, match="name the replica of this one"):
        mirror(fresh(tmp_path / "another").holding.files, replica)


def test_a_commit_is_in_the_replica_only_after_what_it_holds(
    store: Store, replica: LocalFiles
) -> None:
    save(store, 1, split=WIDE)
    written: list[str] = []

    class Noted(LocalFiles):
        def create(self, name, parts):  # type: ignore[no-untyped-def]
            written.append(name)
            return super().create(name, parts)

    mirror(store.holding.files, Noted(replica.root))
    kinds = [name.split("/")[0] for name in written]
    assert kinds.count("packs") == 4
    assert kinds.index("branches") > max(i for i, kind in enumerate(kinds) if kind == "packs")


def test_a_commit_made_during_mirroring_is_left_for_the_next_time(
    store: Store, replica: LocalFiles, tmp_path: Path
) -> None:
    save(store, 1)

    class Busy(LocalFiles):
        def names(self, prefix: str):  # type: ignore[no-untyped-def]
            found = super().names(prefix)
            if prefix == "packs/":
                save(store, 2)  # after the packs were listed
            return found

    mirror(Busy(Path(store.address)), replica)
    copy = Store.open(tmp_path / "replica")
    assert [one.step for one in copy.commits()] == [1]
    assert read_all(copy.reader(copy.commits()[0])) == as_bytes(adam_state(1))


def test_damage_is_not_mirrored(store: Store, home: Path, replica: LocalFiles) -> None:
    commit = save(store, 1)
    path = pack_path(home, store, commit)
    flip(home, store, commit)
    found = mirror(store.holding.files, replica)
    assert found.damaged == (str(path.relative_to(home)),)
    assert not list(replica.names("packs/"))


def test_the_replica_forgets_wrappings_that_were_rotated_away(
    tmp_path: Path, replica: LocalFiles
) -> None:
    home = tmp_path / "store"
    for name in ("old", "new"):
        make_key_file(tmp_path / name)
    old, new = (keys.provider(f"file:{tmp_path / name}") for name in ("old", "new"))
    seal = keys.open_seal(open_files(home), f"file:{tmp_path / 'old'}")
    store = Store.open(home, seal, create=True)
    save(store, 1)
    mirror(store.holding.files, replica)
    rotate(store.holding.files, old, new)
    assert list(versions(replica).values()) == [[1]]
    mirror(store.holding.files, replica)
    assert list(versions(replica).values()) == [[2]]
    copy = keys.open_seal(replica, f"file:{tmp_path / 'new'}")
    opened = Store.open(tmp_path / "replica", copy)
    assert read_all(opened.reader(opened.commits()[0])) == as_bytes(adam_state(1))
    assert isinstance(new, KeyFile)


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_damage_is_repaired_from_the_replica(
    store: Store, home: Path, replica: LocalFiles, harm: str
) -> None:
    save(store, 1)
    commit = save(store, 2, split=WIDE, encoding=FULL)
    mirror(store.holding.files, replica)
    words = "param/w0 is damaged"
    path = pack_path(home, store, commit)
    if harm == "flip":
        words = flip(home, store, commit)
        flip(home, store, commit, "adamw.m/w0")
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:3])
        words = "index of rank 0 is damaged"
    else:
        path.unlink()
        words = "the file is absent"
    found = newest_good(store, replica)
    assert found.commit == commit and not found.bad
    assert words in " ".join(found.repaired)
    assert read_all(Store.open(home).reader(commit)) == as_bytes(adam_state(2))
    assert set(store.marks().verified) == {commit.id}
    assert not newest_good(store, replica).repaired, "nothing is left to repair"


def test_a_commit_found_bad_before_is_repaired(
    store: Store, home: Path, replica: LocalFiles
) -> None:
    first, second = save(store, 1), save(store, 2)
    mirror(store.holding.files, replica)
    flip(home, store, second)
    with pytest.raises(DamagedCommitError):
        rehearse(store, second)
    assert store.head() == first
    assert newest_good(store, replica).commit == second
    assert store.head() == second


def test_a_rehearsal_repairs_too(store: Store, home: Path, replica: LocalFiles) -> None:
    commit = save(store, 1)
    mirror(store.holding.files, replica)
    words = flip(home, store, commit)
    assert words in rehearse(store, commit, replica).repaired[0]
    assert not rehearse(store, commit, replica).repaired


def test_without_a_replica_the_commit_before_is_taken(store: Store, home: Path) -> None:
    first, second, third = (save(store, step) for step in (1, 2, 3))
    words = [flip(home, store, second), flip(home, store, third)]
    found = newest_good(store)
    assert found.commit == first and not found.repaired
    assert [commit for commit, _ in found.bad] == [third, second]
    assert words[1] in found.bad[0][1] and words[0] in found.bad[1][1]
    assert store.head() == first
    assert newest_good(store).bad == ()
    flip(home, store, first)
    assert newest_good(store).commit is None


def test_reading_stops_at_damage_that_nothing_repairs(store: Store, home: Path) -> None:
    commit = save(store, 1, adam_state(1, (40, 30)), encoding=FULL)
    flip(home, store, commit)
    told = [0, 0]
    for number, to_the_end in enumerate((True, False)):

        def note(done: int, _: int, number: int = number) -> None:
            told[number] = done

        found = check(store.reader(commit), note, to_the_end=to_the_end)
        assert found.damages
    assert told[1] < told[0] / 4


def test_a_replica_that_is_damaged_as_well_does_not_help(
    store: Store, home: Path, replica: LocalFiles, tmp_path: Path
) -> None:
    first, second = save(store, 1), save(store, 2)
    mirror(store.holding.files, replica)
    damaged = pack_path(home, store, second)
    flip(home, store, second)
    copy = Store.open(tmp_path / "replica")
    flip(tmp_path / "replica", copy, copy.commits()[-1])
    before = damaged.read_bytes()
    found = newest_good(store, replica)
    assert found.commit == first and [one for one, _ in found.bad] == [second]
    assert damaged.read_bytes() == before, "nothing is replaced by what is no better"


def test_a_damaged_record_is_mended(store: Store, home: Path, replica: LocalFiles) -> None:
    save(store, 1)
    second = save(store, 2)
    mirror(store.holding.files, replica)
    record = files_in(home, "branches")[-1]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"step":2', b'"step":3'))
    opened = Store.open(home)
    assert opened.head() != second
    found = newest_good(opened, replica)
    assert found.commit == second and found.repaired == ("branches/main/000000002.json",)
    assert record.read_bytes() == whole


def test_a_record_that_is_gone_stays_gone(store: Store, home: Path, replica: LocalFiles) -> None:
    """Retention may have removed it."""
    first = save(store, 1)
    save(store, 2)
    mirror(store.holding.files, replica)
    files_in(home, "branches")[-1].unlink()
    assert newest_good(Store.open(home), replica).commit == first


def test_a_delta_whose_parents_record_is_damaged_is_bad(store: Store, home: Path) -> None:
    first = save(store, 1)
    second = save(store, 2, encoding=Encoding("raw", 32, durable=False))
    third = save(store, 3, encoding=relative(3), base=adam_state(2))
    record = files_in(home, "branches")[1]
    record.write_bytes(record.read_bytes().replace(b'"step":2', b'"step":4'))
    opened = Store.open(home)
    with pytest.raises(DamagedRecordError):
        rehearse(opened, third)
    found = newest_good(Store.open(home))
    assert found.commit == first and second.id not in opened.marks().bad


def test_the_replica_of_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    save(store, 1)
    with pytest.raises(CheckpointError, match="not of"):
        newest_good(store, fresh(tmp_path / "another").holding.files)
    with pytest.raises(CheckpointError, match="holds no store"):
        newest_good(store, LocalFiles(tmp_path / "nowhere"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_others_go_first() -> None:

    found = {}

    def note() -> None:
        yield_to_others()
        found["nice"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert found["nice"] == rehearsal._NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the other threads keep theirs"
