"""What a branch of many records costs: they are listed once, and read once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from states import fresh, save, write

from meshwright.checkpoint import branches
from meshwright.checkpoint.files import Entry
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.spread import spread
from meshwright.checkpoint.store import Store


class Counted(LocalFiles):
    """A folder that counts what is asked of its branches."""

    asked: Counter[str]

    def names(self, prefix: str) -> list[Entry]:
        if prefix.startswith("branches/"):
            self.asked["listed"] += 1
        return super().names(prefix)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name.startswith("branches/"):
            self.asked["read"] += 1
        return super().read(name, start, stop)


def counted(folder: Path) -> tuple[Store, Counter[str]]:
    files = Counted(folder)
    files.__dict__["asked"] = Counter()
    return Store.over(files, str(folder)), files.__dict__["asked"]


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "_LIST_S", 1e9)


def test_asking_for_a_commit_that_is_to_come_looks_at_new_records_only(tmp_path: Path) -> None:
    writer, (store, asked) = fresh(tmp_path), counted(tmp_path)
    for step in range(1, 21):
        save(writer, step, {})
    assert store.committed("none") is None
    assert asked == {"listed": 1, "read": 20}
    for _ in range(50):
        assert store.committed("none") is None
    assert asked == {"listed": 1, "read": 70}, "one that is not there yet, each time"
    attempt = write(writer, 21, {})
    made = writer.commit(attempt, {})
    save(writer, 22, {})
    assert store.committed(attempt.name) == made
    assert asked["listed"] == 1


def test_a_commit_after_a_gap_is_found_by_the_next_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, (store, _) = fresh(tmp_path), counted(tmp_path)
    save(writer, 1, {})
    assert store.committed("none") is None
    save(writer, 2, {})
    attempt = write(writer, 3, {})
    made = writer.commit(attempt, {})
    (tmp_path / "branches" / "main" / "000000002.json").unlink()
    assert store.committed(attempt.name) is None
    monkeypatch.setattr(branches, "_LIST_S", 0.0)
    assert store.committed(attempt.name) == made


def test_a_commit_lists_its_branch_once(tmp_path: Path) -> None:
    fresh(tmp_path)
    store, asked = counted(tmp_path)
    for step in range(1, 11):
        save(store, step, {})
    attempt = write(store, 11, {})
    asked.clear()
    made = store.commit(attempt, {})
    assert asked["listed"] == 1
    assert asked["read"] <= 4, "no record is read twice"
    assert store.head() == made


def test_records_that_were_read_are_not_handed_to_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, handed = fresh(tmp_path), list[int]()

    def noted(do, items, at_once):  # type: ignore[no-untyped-def]
        handed.append(len(items))
        return spread(do, items, at_once)

    monkeypatch.setattr(branches, "spread", noted)
    for step in range(1, 11):
        save(store, step, {})
    handed.clear()
    assert len(store.commits()) == 10
    assert handed == [0]
