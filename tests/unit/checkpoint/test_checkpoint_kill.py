"""Whatever a save dies at, what loads is one whole commit, and the next save goes through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kill_at_every_event import save
from object_storage import Storage, serving
from states import adam_state, as_bytes, files_in, read_all

from meshwright.checkpoint.files import Body, Entry
from meshwright.checkpoint.remote import RemoteFiles
from meshwright.checkpoint.store import Store

SCRIPT = Path(__file__).with_name("kill_at_every_event.py")


def newest_of(store: Store) -> int:
    """The step of the head; everything that is listed is whole."""
    listed = store.commits()
    for commit in listed:
        reader = store.reader(commit)
        assert reader.meta == {"step": commit.step}
        assert read_all(reader) == as_bytes(adam_state(commit.step))
    assert listed
    return listed[-1].step


def test_a_kill_at_any_file_event_leaves_a_whole_commit(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    kills = int(run.stdout)
    newest = []
    for root in sorted(tmp_path.iterdir())[:kills]:
        store = Store.open(root)
        newest.append(newest_of(store))
        if len(newest) % 7:
            continue
        again = newest[-1] + 2
        save(store, again)
        assert newest_of(Store.open(root)) == again
        assert files_in(root, ".drafts") == files_in(root, "parts") == []
    assert kills >= 60
    # Once published, a step stays; kills before and after that must both have happened.
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}


class DeathError(BaseException):
    """The process ends here."""


@dataclass
class Mortal:
    """Storage whose user dies at request number `fatal` of those that change something: after it,
    or when half of it is sent, and before it then, if there is nothing to send."""

    files: RemoteFiles
    storage: Storage
    fatal: int
    when: str
    seen: int = 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        return self.files.read(name, start, stop)

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        return self.files.names(prefix)

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`."""
        fatal = self._begin()
        if fatal and self.when == "half":
            self.storage.tear(f"{self.files.root}/{name}", b"".join(parts))
            raise DeathError
        done = self.files.create(name, parts)
        if fatal:
            raise DeathError
        return done

    def remove(self, name: str) -> None:
        """As `Files.remove`."""
        fatal = self._begin()
        if fatal and self.when == "half":
            raise DeathError
        self.files.remove(name)
        if fatal:
            raise DeathError

    def _begin(self) -> bool:
        fatal = self.seen == self.fatal
        self.seen += 1
        return fatal


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["half", "after"])
def test_a_death_at_any_request_leaves_a_whole_commit(when: str) -> None:
    """On object storage, where a request is all that can be cut."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving() as storage:
        files = storage.files()
        for step in (1, 2):
            save(Store.over(files, storage.address, create=True), step)
        newest = 2
        for fatal in range(12):
            mortal = Mortal(files, storage, fatal, when)
            try:
                save(Store.over(mortal, storage.address), newest + 1)
            except DeathError:
                found = newest_of(Store.over(files, storage.address))
                assert found in (newest, newest + 1)
                newest = found
                continue
            newest += 1  # nothing was left to remove for it to die at
        assert newest > 3
        save(Store.over(files, storage.address), newest + 1)
        assert newest_of(Store.over(files, storage.address)) == newest + 1
