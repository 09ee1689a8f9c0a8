"""Branches: files numbered without end, of which the line of commits and its head are derived.

A record is a commit, or a turn: "start" (the branch begins at a commit of another) or "rollback"
(it goes on from an earlier commit). The line of a branch are the commits that its head came from.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit, CommitRecord, Place, parse_commit
from meshwright.checkpoint.holding import DamagedRecordError, Holding, root
from meshwright.checkpoint.marks import read_marks
from meshwright.checkpoint.parts import check_name
from meshwright.checkpoint.spread import spread

FOLDER = "branches/"
_AT_ONCE = 8
_LIST_S = 1.0  # between listings for who asks again and again
_RECORD = re.compile(r"branches/([^/]+)/(\d{9})\.json")


@dataclass(frozen=True)
class Turn:
    """A record that leads a branch to a commit there is: "start" or "rollback"."""

    kind: str
    to: Place
    time_s: float = 0.0


Record = CommitRecord | Turn | DamagedRecordError
"""One of a branch; the error if its file is damaged."""


@dataclass(frozen=True)
class Listed:
    """The records of a branch by number, in order, and the number of the next one: from one
    listing, so if that number is still free, nothing has changed meanwhile."""

    records: Mapping[int, Record]
    next: int


@dataclass
class Branches:
    """The branches of a store. Records never change, so each is read once."""

    holding: Holding
    _read: dict[str, Record] = field(default_factory=dict)
    _made: dict[tuple[str, str], Commit] = field(default_factory=dict)  # by branch and attempt
    _upto: dict[str, tuple[int, float]] = field(default_factory=dict)  # last number, when listed

    def names(self) -> list[str]:
        """All branches, sorted."""
        found = (_RECORD.fullmatch(entry.name) for entry in self.holding.files.names(FOLDER))
        return sorted({match[1] for match in found if match})

    def records(self, branch: str) -> dict[int, Record]:
        """The records of a branch by number, in order; empty if there is no such branch."""
        return dict(self.listed(branch).records)

    def listed(self, branch: str) -> Listed:
        """What a branch holds now. Only records that were not read before are."""
        check_name("branch", branch)
        asked_s = time.monotonic()
        names = self._names(branch)
        self._forget(f"{FOLDER}{branch}/", names.keys())
        new = [number for name, number in names.items() if name not in self._read]
        read = dict(zip(new, spread(lambda n: self.record(branch, n), new, _AT_ONCE), strict=True))
        found = {n: self._read.get(name) or read.get(n) for name, n in names.items()}
        last = max(names.values(), default=0)
        self._upto[branch] = last, asked_s
        return Listed({n: record for n, record in found.items() if record is not None}, last + 1)

    def made(self, branch: str, attempt: str) -> Commit | None:
        """The commit of a branch that an attempt has made, if there is one. To ask again and again
        costs little: records that have come since are looked for by number, and listed seldom."""
        if (found := self._made.get((branch, attempt))) is not None:
            return found
        last, listed_s = self._upto.get(branch, (0, -math.inf))
        if time.monotonic() - listed_s > _LIST_S:  # retention may have left a gap after the last
            self.listed(branch)
        else:
            while self.record(branch, last + 1) is not None:
                last += 1
            self._upto[branch] = last, listed_s
        return self._made.get((branch, attempt))

    def _names(self, branch: str) -> dict[str, int]:
        """The files of a branch's records, with their numbers."""
        listed = self.holding.files.names(f"{FOLDER}{branch}/")
        matches = (_RECORD.fullmatch(entry.name) for entry in listed)
        return {match[0]: int(match[2]) for match in matches if match}

    def _forget(self, prefix: str, listed: Container[str]) -> None:
        for name in [n for n in list(self._read) if n.startswith(prefix) and n not in listed]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if isinstance(record := self._read.pop(name, None), CommitRecord):
            self._made.pop((record.commit.branch, record.commit.attempt), None)

    def record(self, branch: str, seq: int) -> Record | None:
        """One record, None if it is gone."""
        name = record_name(branch, seq)
        if name not in self._read:
            try:
                content = self.holding.read_json(name, branch, seq)
                record = _parse(self.holding.address, content, branch, seq)
            except FileNotFoundError:
                return None
            except DamagedRecordError as error:
                return error  # it may be mended
            self._read[name] = record
            if isinstance(record, CommitRecord):
                self._made[branch, record.commit.attempt] = record.commit
        return self._read[name]

    def find(self, commit_id: str) -> Commit | None:
        """The commit of that id, of whatever branch."""
        for record in list(self._read.values()):
            if isinstance(record, CommitRecord) and record.commit.id == commit_id:
                return record.commit
        found = (c for name in self.names() for c in self.published(name) if c.id == commit_id)
        return next(found, None)

    def published(self, branch: str) -> list[Commit]:
        """All commits of a branch, also those that it has left by a rollback."""
        records = self.records(branch).values()
        return [record.commit for record in records if isinstance(record, CommitRecord)]

    def line(self, branch: str, upto: int | None = None) -> list[Commit]:
        """The commits that the head of a branch (or its state at number `upto`) came from, oldest
        first, and the head itself. Damaged records are left out."""
        return self._line(self.records(branch), upto)

    def _line(self, records: Mapping[int, Record], upto: int | None = None) -> list[Commit]:
        found: list[Commit] = []
        for number, record in records.items():
            if upto is not None and number > upto:
                break
            match record:
                case CommitRecord(commit=commit):
                    found.append(commit)
                case Turn(to=to):
                    found = self.line(to.branch, to.seq)
        return found

    def good_line(self, branch: str) -> list[Commit]:
        """The line without the commits that are marked as bad."""
        return self._good(self.line(branch))

    def _good(self, line: Sequence[Commit]) -> list[Commit]:
        bad = read_marks(self.holding).bad
        return [commit for commit in line if commit.id not in bad]

    def head(self, branch: str, listed: Listed | None = None) -> Commit | None:
        """The newest commit of the line that is not marked as bad, now or when it was `listed`."""
        line = self.line(branch) if listed is None else self._line(listed.records)
        return next(reversed(self._good(line)), None)

    def next(self, branch: str) -> int:
        """The number of the next record of a branch."""
        check_name("branch", branch)
        return max(self._names(branch).values(), default=0) + 1

    def append(self, branch: str, seq: int, record: Mapping[str, Any]) -> Commit | None:
        """Publish a commit as number `seq` of a branch. None if another was faster."""
        if not self.create(branch, seq, record):
            return None
        made = self.record(branch, seq)
        if not isinstance(made, CommitRecord):
            raise CheckpointError(
                f"{self.holding.address}: {record_name(branch, seq)} was not kept"
            )
        return made.commit

    def remove(self, commit: Commit) -> None:
        """Take a commit off its branch. Raises CheckpointError."""
        name = record_name(commit.branch, commit.seq)
        self.holding.files.remove(name)
        self._drop(name)

    def create(self, branch: str, seq: int, content: Mapping[str, Any]) -> bool:
        """Write record `seq` of a branch. False if another was faster."""
        check_name("branch", branch)
        full = {**content, "branch": branch, "seq": seq}
        name = record_name(branch, seq)
        if self.holding.create_json(name, full, branch, seq):
            return True
        # Storage far away may have done what it said that it had not.
        return root(self.holding.read_json(name, branch, seq)) == root(full)


def record_name(branch: str, seq: int) -> str:
    """Where that record of a branch lies."""
    return f"{FOLDER}{branch}/{seq:09d}.json"


def _parse(address: str, content: Mapping[str, Any], branch: str, seq: int) -> Record:
    if (content["branch"], content["seq"]) != (branch, seq):
        raise DamagedRecordError(
            f"{address}/{record_name(branch, seq)}: is damaged: it is another record's; remove it"
        )
    if content["kind"] == "commit":
        return parse_commit(address, content, root(content))
    return Turn(content["kind"], Place(**content["to"]), content["time_s"])
