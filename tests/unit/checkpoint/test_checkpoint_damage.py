"""A bit that is wrong anywhere is found, named, and never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import (
    TWO,
    adam_state,
    as_bytes,
    files_in,
    fresh,
    read_all,
    relative,
    save,
    steps,
    write,
)

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import rehearsal, verifying
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import Body, Entry
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.rehearsal import newest_good
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.verifying import Checked
from meshwright.checkpoint.writing import Encoding

FLIPS = 1200
FULL = Encoding(chunk_bytes=64, durable=False)


class Flipped:
    """What a folder holds, in memory, with one bit of one file the other way."""

    def __init__(self, folder: Path) -> None:
        paths = [path for path in files_in(folder) if ".drafts" not in path.parts]
        self.content = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        self.name, self.bit, self.met = "", 0, False

    def flip(self, name: str, bit: int) -> None:
        """The one from now on; "" for none."""
        self.name, self.bit, self.met = name, bit, False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        if name not in self.content:
            raise FileNotFoundError(name)
        found = bytearray(self.content[name][start:stop])
        at = self.bit // 8 - start
        if name == self.name and 0 <= at < len(found):
            found[at] ^= 1 << self.bit % 8
            self.met = True
        return bytes(found)

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        return [
            Entry(n, len(c), 0.0)
            for n, c in sorted(self.content.items())
            if n[: len(prefix)] == prefix
        ]

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`."""
        if name in self.content:
            return False
        self.content[name] = b"".join(parts)
        return True

    def remove(self, name: str) -> None:
        """As `Files.remove`."""
        self.content.pop(name, None)


def sampled(files: Flipped, names: list[str], many: int) -> list[tuple[str, int]]:
    """Positions all over the files: the first and last byte of each, and others by chance."""
    rng = np.random.default_rng(0)
    found = [(name, bit) for name in names for bit in (0, 8 * len(files.content[name]) - 1)]
    sizes = np.array([8 * len(files.content[name]) for name in names])
    which = rng.choice(len(names), many - len(found), p=sizes / sizes.sum())
    return found + [(names[n], int(rng.integers(sizes[n]))) for n in which]


def two_commits(folder: Path) -> Store:
    """A full one of two ranks and one relative to it."""
    store = fresh(folder)
    save(store, 1, adam_state(1), TWO, FULL)
    save(store, 2, adam_state(2), TWO, relative(2, 64), adam_state(1))
    return store


def test_no_flipped_bit_of_a_commit_is_loaded(tmp_path: Path) -> None:
    """torchtitan#4011, pytorch#126952, safetensors#220, vllm#53537."""
    head, files = two_commits(tmp_path).commits()[-1], Flipped(tmp_path)
    assert head.depth == 1
    names = [name for name in files.content if name.startswith(("packs/", "branches/"))]
    assert len(names) == 6
    flips = sampled(files, names, FLIPS)
    for name, bit in flips:
        files.flip(name, bit)
        with pytest.raises(CheckpointError, match="damaged"):
            Store.over(files, "there").verify(head)
        assert files.met
    files.flip("", 0)
    assert read_all(Store.over(files, "there").reader(head)) == as_bytes(adam_state(2))
    assert len(set(flips)) > 1000


def test_no_bit_of_a_record_can_be_another(tmp_path: Path) -> None:
    """Not even one that leaves its meaning: an E for an e in a number."""
    store = fresh(tmp_path)
    commit = save(store, 1, {}, meta={"lr": 1e-05, "said": "é\n", "none": None})
    files = Flipped(tmp_path)
    name = next(name for name in files.content if name.startswith("branches/"))
    for bit in range(8 * len(files.content[name])):
        files.flip(name, bit)
        with pytest.raises(CheckpointError, match="damaged"):
            Store.over(files, "there").reader(commit)


def test_no_flipped_bit_of_a_part_is_committed(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    attempt = write(store, 1, adam_state(1), TWO, FULL)
    files = Flipped(tmp_path)
    names = [name for name in files.content if name.startswith("parts/")] + ["store.json"]
    for name, bit in sampled(files, names, 200):
        files.flip(name, bit)
        with pytest.raises(CheckpointError, match="damaged"):
            Store.over(files, "there").commit(attempt, {})
    assert files.names("branches/") == []


def test_no_flipped_bit_of_a_tag_is_believed(tmp_path: Path) -> None:
    store = two_commits(tmp_path)
    store.tag("best", store.commits()[0])
    files = Flipped(tmp_path)
    for bit in range(8 * len(files.content["tags/best.json"])):
        files.flip("tags/best.json", bit)
        with pytest.raises(CheckpointError, match="damaged"):
            Store.over(files, "there").find("best")


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda _: b"",
        lambda content: content[:40] + b"\0" * len(content[40:]),
        lambda content: content[::-1],
    ],
)
def test_no_harm_to_any_file_is_loaded(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    head, files = two_commits(tmp_path).commits()[-1], Flipped(tmp_path)
    for name in [name for name in files.content if name.startswith(("packs/", "branches/"))]:
        whole = files.content[name]
        files.content[name] = harm(whole)
        if name.startswith("packs/") and files.content[name].startswith(whole):
            continue  # what is more at the end of a pack, nobody reads
        with pytest.raises(CheckpointError, match="damaged"):
            Store.over(files, "there").verify(head)
        files.content[name] = whole


def test_files_that_change_places_are_found_out(tmp_path: Path) -> None:
    store = two_commits(tmp_path)
    head, files = store.commits()[-1], Flipped(tmp_path)
    for kind in ("packs/", "branches/"):
        names = [name for name in files.content if name.startswith(kind)]
        for a in names:
            for b in names:
                if a != b:
                    kept = files.content[a]
                    files.content[a] = files.content[b]
                    with pytest.raises(CheckpointError, match="damaged"):
                        Store.over(files, "there").verify(head)
                    files.content[a] = kept


def test_damage_is_named(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    state = {"w": np.arange(64, dtype=np.float32)}
    commit = save(store, 7, state, encoding=FULL)
    path = files_in(tmp_path, "packs")[0]
    content = bytearray(path.read_bytes())
    content[130] ^= 4  # in the third chunk of 64 bytes
    path.write_bytes(content)
    with pytest.raises(DamagedCommitError) as told:
        store.reader(commit).read("w")
    error = told.value
    assert (error.tensor, error.chunk, error.start, error.stop) == ("w", 2, 128, 192)
    assert f"bytes [128, 192) of packs/{path.name[:2]}/{path.name}: their hash differs" in str(
        error
    )
    piece = store.reader(commit).stored("w")[0].cut(1)
    assert store.reader(commit).read_piece(piece).tolist() == list(range(16, 32))  # others are fine
    path.unlink()
    with pytest.raises(DamagedCommitError, match=r"index of rank 0 is damaged.*absent"):
        store.reader(commit).read("w")


def test_a_bad_commit_is_marked_and_the_one_before_is_the_head(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    assert store.verify(first).bytes == sum(array.nbytes for array in adam_state(1).values())
    broken = store.reader(second).stored("param/w0")[0].chunks[0].pack
    path = tmp_path / "packs" / broken[:2] / broken
    whole = path.read_bytes()
    path.write_bytes(b"\0" * len(whole))
    with pytest.raises(DamagedCommitError):
        store.verify(second)
    assert Store.open(tmp_path).head() == first
    assert set(store.marks().bad) == {second.id}
    path.write_bytes(whole)
    store.verify(second)
    assert Store.open(tmp_path).head() == second


def test_a_damaged_record_is_passed_over_and_told(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    record = files_in(tmp_path, "branches")[-1]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"step":2', b'"step":3'))
    again = Store.open(tmp_path)
    assert again.commits() == [first]
    assert [(entry.kind, entry.seq) for entry in again.log()] == [("damaged", 2), ("commit", 1)]
    with pytest.raises(CheckpointError, match=r"000000002.json: is damaged"):
        again.reader(second)
    third = save(again, 3)
    assert (third.seq, third.parent) == (3, first.id)
    record.write_bytes(whole)
    assert steps(again) == [1, 2, 3]


def test_a_pack_that_went_bad_is_mended_by_who_writes_the_same(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), adam_state(1)
    commit = save(store, 1, state, TWO, FULL)
    path = files_in(tmp_path, "packs")[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCommitError):
        store.verify(commit)
    write(store, 1, state, TWO, FULL)
    assert read_all(store.reader(commit)) == as_bytes(state)


@pytest.mark.parametrize("harm", ["absent", "short", "empty", "index", "parent"])
def test_a_crash_of_the_machine_leads_to_the_newest_whole_commit(tmp_path: Path, harm: str) -> None:
    """What was not waited for to be on disk can be torn, though the record is there."""
    store = fresh(tmp_path)
    small = replace(FULL, pack_bytes=64)  # so that the index has a pack of its own
    first = save(store, 1, adam_state(1), TWO, small)
    second = save(store, 2, adam_state(2), TWO, small)
    encoding = replace(relative(3, 64), pack_bytes=64)
    third = save(store, 3, adam_state(3), TWO, encoding, adam_state(2))
    assert newest_good(store).commit == third
    of = store.reader(second if harm == "parent" else third)
    pack = of.stored("param/w0")[0].chunks[0].pack
    if harm == "index":
        record = json.loads((tmp_path / "branches" / "main" / "000000003.json").read_bytes())
        pack = record["indices"][0][0]
    path = tmp_path / "packs" / pack[:2] / pack
    content = path.read_bytes()
    match harm:
        case "absent":
            path.unlink()
        case "short":
            path.write_bytes(content[:-1])
        case "empty" | "parent":
            path.write_bytes(b"")
        case "index":
            path.write_bytes(content[:-3] + b"\0\0\0")
    again = Store.open(tmp_path)
    expected = first if harm == "parent" else second
    read: list[Commit] = []
    with pytest.MonkeyPatch.context() as patch:

        def check(reader: Reader, *asked: Any) -> Checked:
            read.append(reader.commit)
            return verifying.check(reader, *asked)

        patch.setattr(rehearsal, "check", check)
        assert newest_good(again).commit == again.head() == expected
    assert read == [expected] or harm == "index", "sizes tell"
    assert read_all(again.reader(expected)) == as_bytes(adam_state(expected.step))


def test_another_format_is_told(tmp_path: Path) -> None:
    from meshwright.checkpoint import holding

    patch = pytest.MonkeyPatch()
    with patch.context() as there:
        there.setattr(holding, "FORMAT", 3)
        fresh(tmp_path)
    with pytest.raises(CheckpointError, match="format 3, this version reads format 2"):
        Store.open(tmp_path)


def test_a_half_written_file_is_no_file(tmp_path: Path) -> None:
    def torn() -> Iterable[Body]:
        yield b"half"
        raise KeyboardInterrupt

    files = LocalFiles(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        files.create("branches/main/000000001.json", torn())
    assert files.names("") == []
    assert files.create("a/b", [b"one"])
    assert not files.create("a/b", [b"two"])
    assert files.read("a/b") == b"one"


def test_a_part_of_another_attempt_is_not_taken(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    attempt = write(store, 1, adam_state(1))
    (tmp_path / "parts" / attempt.name).rename(tmp_path / "parts" / "other")
    with pytest.raises(CheckpointError, match="same attempt"):
        store.commit(Attempt(1, "other", 1), {})
