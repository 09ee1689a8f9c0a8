"""A store under a seal: nothing of it can be read or passed off without the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_storage import serving
from states import Split, adam_state, as_bytes, files_in, fresh, read_all, relative, save, shares

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import keys
from meshwright.checkpoint.files import Files, open_files
from meshwright.checkpoint.keys.local import make_key_file
from meshwright.checkpoint.keys.rotation import rotate
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.rehearsal import newest_good, rehearse
from meshwright.checkpoint.replicas import mirror
from meshwright.checkpoint.seal import SealError
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.writing import Encoding

FULL = Encoding("planes", chunk_bytes=64, durable=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return made(tmp_path / "key")


def made(path: Path) -> str:
    make_key_file(path)
    return f"file:{path}"


def sealed(files: Files, key: str, create: bool = False) -> Store:
    return Store.over(files, "there", keys.open_seal(files, key), create)


@pytest.fixture
def store(home: Path, key: str) -> Store:
    return sealed(open_files(home), key, create=True)


def test_all_of_a_store_works_under_a_seal(store: Store, home: Path, key: str) -> None:
    save(store, 1, split=Split(dim=1, tp=2, shards=2), encoding=FULL)
    second = save(store, 2, encoding=Encoding("raw", 32, durable=False))
    third = save(store, 3, encoding=relative(3), base=adam_state(2))
    again = sealed(open_files(home), key)
    for commit in again.commits():
        assert read_all(again.reader(commit)) == as_bytes(adam_state(commit.step))
        assert rehearse(again, commit).restored_bytes > 0
    assert (third.depth, again.find("2")) == (1, second)
    again.gc(0.0)
    assert len(files_in(home, "keys")) == 1
    assert read_all(sealed(open_files(home), key).reader(third)) == as_bytes(adam_state(3))


def test_nothing_of_a_model_can_be_read_without_the_key(store: Store, home: Path) -> None:
    save(store, 1, meta={"secret": "sauce"})
    for path in files_in(home):
        content = path.read_bytes()
        for word in (b"param/w0", b"float32", b"sauce", b"secret", b"router"):
            assert word not in content, f"{word!r} stands in {path}"
        for array in adam_state(1).values():
            assert array.tobytes()[:12] not in content, path
    plain = fresh(home.with_name("plain"))
    save(plain, 1)
    packs = b"".join(path.read_bytes() for path in files_in(home.with_name("plain"), "packs"))
    assert adam_state(1)["param/w0"].tobytes()[:12] in packs, "else this shows nothing"


def test_a_store_says_whether_it_needs_a_key(store: Store, home: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is encrypted, and no key was given"):
        Store.open(home)
    other = sealed(open_files(home), made(tmp_path / "other"))
    commit = save(store, 1)
    with pytest.raises(SealError, match="wrong key"):
        other.commits()
    fresh(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="is not encrypted, and a key was given"):
        sealed(open_files(tmp_path / "plain"), f"file:{tmp_path / 'key'}")
    assert store.head() == commit


def test_a_record_in_the_place_of_another_is_refused(store: Store, home: Path, key: str) -> None:
    save(store, 1)
    save(store, 2)
    one, two = files_in(home, "branches")
    two.write_bytes(one.read_bytes())
    with pytest.raises(SealError, match="those of another tensor, place or store"):
        sealed(open_files(home), key).commits()


def test_a_record_of_another_store_is_refused(store: Store, home: Path, key: str) -> None:
    """Of the same run and the same keys, but another id."""
    save(store, 1)
    there = home.with_name("there")
    other = sealed(open_files(there), key, create=True)
    for path in (*files_in(home, "keys"), *files_in(home, "branches"), *files_in(home, "packs")):
        target = there / path.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    with pytest.raises(SealError, match="those of another tensor, place or store"):
        other.commits()


def test_a_flipped_bit_is_named_and_repaired_without_the_key(
    store: Store, home: Path, key: str
) -> None:
    commit = save(store, 1, encoding=FULL)
    replica = open_files(home.with_name("replica"))
    mirror(open_files(home), replica)  # whoever does it needs no key
    chunk = store.reader(commit).stored("adamw.m/w0")[0].chunks[1]
    path = home / "packs" / chunk.pack[:2] / chunk.pack
    content = bytearray(path.read_bytes())
    content[chunk.at + 50] ^= 1
    path.write_bytes(content)
    opened = sealed(open_files(home), key)
    with pytest.raises(DamagedCommitError, match=r"adamw\.m/w0 is damaged: chunk 1, bytes \["):
        opened.reader(commit).read("adamw.m/w0")
    assert newest_good(opened, replica).commit == commit
    assert read_all(opened.reader(commit)) == as_bytes(adam_state(1))


def test_a_store_is_rotated_to_another_key(store: Store, home: Path, tmp_path: Path) -> None:
    commit = save(store, 1)
    before = {path: path.read_bytes() for path in files_in(home, "packs")}
    new = made(tmp_path / "new")
    files = open_files(home)
    rotate(files, keys.provider(f"file:{tmp_path / 'key'}"), keys.provider(new))
    assert {path: path.read_bytes() for path in files_in(home, "packs")} == before
    again = sealed(files, new)
    assert read_all(again.reader(commit)) == as_bytes(adam_state(1))
    save(again, 2)
    with pytest.raises(SealError, match="wrong key"):
        sealed(files, f"file:{tmp_path / 'key'}").commits()
    save(store, 3)  # a run that goes on holds its data key, and what it writes can be read
    assert [one.step for one in sealed(files, new).commits()] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_sealed_store_on_object_storage_and_its_replica_in_a_folder(
    key: str, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving() as storage:
        files = storage.files()
        store = sealed(files, key, create=True)
        commit = save(store, 1, encoding=FULL)
        mirror(files, open_files(tmp_path / "replica"))
        pack = store.reader(commit).stored("param/w0")[0].chunks[0].pack
        files.remove(f"packs/{pack[:2]}/{pack}")
        with pytest.raises(DamagedCommitError, match="absent"):
            rehearse(store, commit)
        assert rehearse(store, commit, open_files(tmp_path / "replica")).repaired
        assert read_all(sealed(files, key).reader(commit)) == as_bytes(adam_state(1))


def test_a_part_may_be_written_again_though_it_is_sealed_anew(store: Store) -> None:
    """By a rank that took the place of one that died once it had written."""
    state, split = adam_state(1), Split(shards=2)
    attempt = Attempt(1, "run-1", 2)
    for rank in (0, 1, 1, 0):
        store.write_part(attempt, rank, shares(state, split)[rank], FULL)
    assert read_all(store.reader(store.commit(attempt, {}))) == as_bytes(state)
