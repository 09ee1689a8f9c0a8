"""Where a run keeps its commits, as plain values that travel to its ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import Files, ToldFiles, open_files
from meshwright.checkpoint.holding import STORE_FILE
from meshwright.checkpoint.keys import open_seal
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.rehearsal import Good, newest_good
from meshwright.checkpoint.replicas import mirror
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.upkeep import Upkeep

_MARK = "#"
KEY = "checkpoint.encrypt"  # of a job file


@dataclass(frozen=True)
class StoreAt:
    """A store and the branch of it that a run writes to. `encrypt`: who wraps its keys, as in
    `[checkpoint]`; empty if it is not encrypted. `replica`: another place for the same commits,
    that damage is repaired from; empty for none."""

    address: str
    branch: str = MAIN
    encrypt: str = ""
    replica: str = ""

    def open(self, create: bool = False) -> Store:
        """Raises CheckpointError, and ConfigError if the keys cannot be used."""
        if not self.encrypt:
            return Store.open(self.address, create=create)
        files = open_files(self.address)
        return Store.over(files, self.address, open_seal(files, self.encrypt, KEY), create)

    def begin(self) -> None:
        """Make the store if there is none. If it is encrypted, what is written from now on has a
        data key of its own. Raises as `open`."""
        self.open(create=True)
        if self.encrypt:
            open_seal(open_files(self.address), self.encrypt, KEY).renew()

    def commits(self) -> list[Commit]:
        """Those of the branch, oldest first; empty if there is no store. Raises CheckpointError."""
        if not open_files(self.address).names(STORE_FILE):
            return []
        return self.open().commits(self.branch)

    def newest_good(self) -> Good:
        """The newest commit of the branch that is whole, all of it read and repaired if it can be;
        those that are not are marked as bad. Raises CheckpointError."""
        if not open_files(self.address).names(STORE_FILE):
            return Good(None, (), ())
        return newest_good(self.open(), self.replica_files(), self.branch)

    def upkeep(self, store: Store, policy: Policy) -> Upkeep:
        """What is to be done for `store`, which this is, beside training."""
        if not self.replica:
            return Upkeep(store, policy, branch=self.branch)
        files = self._told_replica()
        copy = cache(replace(self, address=self.replica, replica="").open)  # once it is there

        def replicate() -> None:
            mirror(store.holding.files, files)
            copy().retain(policy, self.branch)
            copy().gc()

        return Upkeep(store, policy, files, replicate, self.branch)

    def replica_files(self) -> Files | None:
        """Those of the replica, if there are any yet. Raises CheckpointError."""
        if not self.replica:
            return None
        files = self._told_replica()
        return files if files.names(STORE_FILE) else None

    def _told_replica(self) -> Files:
        return ToldFiles(open_files(self.replica), self.replica.rstrip("/"))

    def head(self) -> Commit | None:
        """The newest commit of the branch, or None. Raises CheckpointError."""
        return next(reversed(self.commits()), None)

    def where(self, commit: Commit) -> str:
        """A commit as text that `read` takes: `ADDRESS#ID`."""
        return f"{self.address}{_MARK}{commit.id}"


def read_commit(where: str, encrypt: str = "") -> Reader:
    """What a commit `ADDRESS#ID` holds. Raises CheckpointError."""
    address, mark, name = where.rpartition(_MARK)
    if not mark:
        raise CheckpointError(f"{where}: names no commit; write STORE{_MARK}ID")
    store = StoreAt(address, encrypt=encrypt).open()
    return store.reader(store.find(name))


def newest(root: Path | str) -> Reader:
    """What the newest commit in `root` holds. Raises CheckpointError if there is none."""
    at = StoreAt(str(root))
    commit = at.head()
    if commit is None:
        raise CheckpointError(f"{root}: nothing was saved here; the run did not get that far")
    return at.open().reader(commit)
