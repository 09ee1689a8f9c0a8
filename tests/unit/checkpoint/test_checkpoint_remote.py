"""The same store on object storage, whose requests fail, get lost and race."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from object_storage import Storage, serving
from states import TWO, adam_state, as_bytes, read_all, relative, save, steps, write

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.committer import LateError
from meshwright.checkpoint.files import open_files
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.remote import Patience, RemoteFiles, open_remote
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server() -> Iterator[Storage]:
    """S3 storage."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving() as storage:
        yield storage


@pytest.fixture
def storage(server: Storage, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """A folder of it for this test, without faults."""
    server.folder, server.fault = request.node.name.replace("[", "-").rstrip("]"), lambda *_: None
    server.asked.clear()
    yield server
    server.fault = lambda *_: None


def store_of(storage: Storage) -> Store:
    return Store.over(storage.files(), storage.address, create=True)


def test_everything_works_as_in_a_folder(storage: Storage) -> None:
    store, states = store_of(storage), [adam_state(step) for step in range(5)]
    save(store, 0, states[0], TWO, Encoding(chunk_bytes=32))
    for step in (1, 2):
        save(store, step, states[step], TWO, relative(step), states[step - 1])
    assert [commit.depth for commit in store.commits()] == [0, 1, 2]
    for step in (3, 4):
        store.verify(save(store, step, states[step]))
    store.tag("best", store.find("3"))
    store.start_branch("trial", store.find("best"))
    assert [c.step for c in store.retain(Policy(newest=1, spaced=False))] == [2, 1, 0]
    assert store.gc(0).packs >= 3
    again = store_of(storage)
    assert steps(again) == [3, 4]
    assert steps(again, "trial") == [3]
    for commit in again.commits():
        assert read_all(again.reader(commit)) == as_bytes(states[commit.step])
    assert {entry.name.split("/")[0] for entry in storage.files().names("")} == {
        "store.json",
        "packs",
        "branches",
        "tags",
        "marks",
    }


def test_files_keep_their_contract(storage: Storage, tmp_path: Path) -> None:
    for files in (storage.files(), open_files(tmp_path), open_remote(f"memory://{tmp_path}")):
        assert files.names("") == files.names("a/") == []
        assert files.create("a/b", [b"on", memoryview(b"e")])
        assert not files.create("a/b", [b"two"])
        assert files.create("a/c/d", [])
        assert [(e.name, e.size) for e in files.names("a/")] == [("a/b", 3), ("a/c/d", 0)]
        assert [e.name for e in files.names("a/c")] == ["a/c/d"]
        assert all(entry.modified_s > 1.7e9 for entry in files.names("a/"))
        ranges = [(0, None), (1, 2), (1, 99), (3, 9), (50, 60), (2, 2)]
        found = [files.read("a/b", *stretch) for stretch in ranges]
        assert found == [b"one", b"n", b"ne", b"", b"", b""]
        with pytest.raises(FileNotFoundError):
            files.read("a/none")
        with pytest.raises(FileNotFoundError):
            files.read("a/none", 2, 4)
        files.remove("a/b")
        files.remove("a/b")
        assert [entry.name for entry in files.names("a/")] == ["a/c/d"]


def test_one_of_many_that_commit_at_once_wins(storage: Storage) -> None:
    store = store_of(storage)
    head = save(store, 1)
    attempts = [write(store, 2, adam_state(n), parent=head) for n in range(4)]
    made, refused = [], []

    def race(attempt: Attempt) -> None:
        try:
            made.append(store_of(storage).commit(attempt, {}))
        except CheckpointError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=race, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (1, 3)
    assert store.commits() == [head, *made]


def test_requests_that_fail_are_tried_again(storage: Storage) -> None:
    store, lock, seen = store_of(storage), threading.Lock(), set[tuple[str, str]]()

    def first_time(method: str, path: str) -> str | None:
        with lock:
            known = (method, path) in seen
            seen.add((method, path))
        return None if known else "down"

    storage.fault = first_time
    commit = save(store, 1)
    assert read_all(store.reader(commit)) == as_bytes(adam_state(1))
    assert len(seen) > 5


def test_an_answer_that_was_lost_does_not_lose_the_commit(storage: Storage) -> None:
    store, seen = store_of(storage), set[str]()

    def lost_once(method: str, path: str) -> str | None:
        if method != "PUT" or path in seen:
            return None
        seen.add(path)
        return "lost"

    storage.fault = lost_once
    first = save(store, 1)
    assert store.commits() == [first]
    assert len(seen) == 3  # pack, part and commit
    storage.fault = lambda *_: None
    assert save(store, 2).seq == 2


@pytest.mark.parametrize("what", ["packs", "parts", "branches", ""])
def test_storage_that_is_down_is_told_and_the_commit_before_stays(
    storage: Storage, what: str
) -> None:
    store = store_of(storage)
    before = save(store, 1)
    storage.fault = lambda _, path: "down" if what in path else None
    with pytest.raises(
        CheckpointError, match=r"run.*cannot be (written|read|listed).*storage is up"
    ):
        save(store_of(storage) if what else store, 2)
    storage.fault = lambda *_: None
    assert store_of(storage).commits() == [before]


def test_a_part_that_is_slow_names_its_rank(storage: Storage) -> None:
    store = store_of(storage)
    attempt = write(store, 1, adam_state(1), TWO, ranks=(1,))
    with pytest.raises(LateError, match=r"rank 0\) wrote nothing within 0.05 s"):
        store.commit(attempt, {}, deadline_s=0.05)


def test_a_bucket_that_is_not_there_is_told(storage: Storage) -> None:
    files = RemoteFiles(storage.files().files, "no-such-bucket/run", Patience(1))
    with pytest.raises(CheckpointError, match=r"there/store.json: cannot be written"):
        Store.over(files, "there", create=True)
    with pytest.raises(CheckpointError, match="no checkpoints here"):
        Store.over(files, "there")


def test_an_address_that_nobody_knows_is_told() -> None:
    with pytest.raises(CheckpointError, match="nonsense://x: cannot be opened"):
        Store.open("nonsense://x")


def test_small_chunks_are_read_in_few_requests(storage: Storage) -> None:
    store, state = store_of(storage), adam_state(1, (16, 8), names=20)
    commit = save(store, 1, state, encoding=Encoding(chunk_bytes=128))
    reader = store.reader(commit)
    pieces = {
        row.piece: np.empty(row.piece.size, np.float32)
        for index in reader.indices
        for row in index.stored
    }
    storage.asked.clear()
    reader.fill(pieces)
    assert len(storage.asked) <= 4
    for piece, found in pieces.items():
        assert found.tobytes() == state[piece.name].tobytes()
