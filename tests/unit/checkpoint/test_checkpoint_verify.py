"""`meshwright checkpoint verify`: what is damaged is repaired, or told, and the rest looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from states import adam_state, fresh, relative, save

from meshwright.base.errors import InputError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import open_files
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.replicas import mirror
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding
from meshwright.cli import checkpoint


def tear(store: Store, commit: Commit) -> Path:
    """Damage the first chunk of a commit."""
    pack = store.reader(commit).stored("param/w0")[0].chunks[0].pack
    path = Path(store.address) / "packs" / pack[:2] / pack
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return path


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreAt:
    """Where a run is that has a replica."""
    found = StoreAt(str(tmp_path / "store"), replica=str(tmp_path / "replica"))
    found.open(create=True)
    monkeypatch.setattr(checkpoint, "store_at", lambda *_: found)
    return found


def test_verify_repairs_from_the_replica_of_the_run(
    at: StoreAt, capsys: pytest.CaptureFixture[str]
) -> None:
    store = at.open()
    commit = save(store, 1)
    mirror(store.holding.files, open_files(at.replica))
    whole = tear(store, commit).read_bytes()
    assert checkpoint.verify("run", every=True, as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["error"] is None and found["bytes"] > 0
    assert "param/w0 is damaged" in found["repaired"][0]
    assert tear(store, commit).read_bytes() == whole, "it was whole again"
    assert set(store.marks().verified) == {commit.id}


def test_verify_of_all_goes_on_after_what_is_damaged(
    at: StoreAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = fresh(at.address)
    save(store, 1)
    second = save(store, 2, encoding=Encoding("raw", 32, durable=False))
    save(store, 3, encoding=relative(3), base=adam_state(2))
    fourth = save(store, 4)
    tear(store, fourth)
    record = tmp_path / "store" / "branches" / "main" / f"{second.seq:09d}.json"
    record.write_bytes(record.read_bytes()[:-1])
    assert checkpoint.verify("run", every=True) == 1
    first, third, last = capsys.readouterr().out.splitlines()
    assert "are as they were saved" in first
    assert "000000002.json: is damaged" in third
    assert "param/w0 is damaged" in last


def test_a_replica_that_does_not_answer_is_wrong_input(
    at: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(at.open(), 1)

    def names(*_: object) -> list[object]:
        raise OSError("no route to host")

    monkeypatch.setattr(type(open_files(at.replica)), "names", names)
    store = at.open()
    monkeypatch.setattr(checkpoint, "branch_of", lambda _: store)
    monkeypatch.setattr(Store, "commits", lambda *_: [])
    with pytest.raises(InputError, match=r"replica.*no route to host"):
        checkpoint.verify("run", every=True)
