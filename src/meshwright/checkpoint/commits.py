"""Commits, and the records of branches that hold them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.holding import Json
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.record import IndexRef

ID_LENGTH = 16


@dataclass(frozen=True)
class Commit:
    """A published state. `seq` numbers the records of a branch; `depth` is how many commits must
    be replayed to read it, 0 if it is full."""

    id: str
    step: int
    branch: str
    seq: int
    parent: str | None
    address: str
    attempt: str = field(repr=False)
    depth: int = 0
    time_s: float = 0.0
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.branch}@{self.step} ({self.id[:8]})"


@dataclass(frozen=True)
class Place:
    """Where a commit is: its id, and the record of the branch that holds it."""

    id: str
    branch: str
    seq: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in records."""
        return {"id": self.id, "branch": self.branch, "seq": self.seq, "step": self.step}


@dataclass(frozen=True)
class CommitRecord:
    """All of a commit but its tensors."""

    commit: Commit
    parent: Place | None
    meta: Mapping[str, Any]
    indices: tuple[IndexRef, ...]


def place_of(commit: Commit) -> Place:
    """Where `commit` is."""
    return Place(commit.id, commit.branch, commit.seq, commit.step)


def commit_record(
    attempt: Attempt,
    parent: Commit | None,
    meta: Mapping[str, Any],
    depth: int,
    indices: Sequence[IndexRef],
) -> dict[str, Any]:
    """The record of a commit, which lacks only its place in the branch."""
    return {
        "kind": "commit",
        "step": attempt.step,
        "attempt": attempt.name,
        "parent": place_of(parent).to_json() if parent else None,
        "time_s": time.time(),
        "meta": meta,
        "depth": depth,
        "indices": [index.to_json() for index in indices],
    }


def parse_commit(address: str, content: Json, root: str) -> CommitRecord:
    """Inverse of `commit_record`. Raises CheckpointError."""
    try:
        parent = Place(**content["parent"]) if content["parent"] else None
        indices = tuple(IndexRef(*raw) for raw in content["indices"])
        commit = Commit(
            root[:ID_LENGTH],
            content["step"],
            content["branch"],
            content["seq"],
            parent.id if parent else None,
            address,
            content["attempt"],
            content["depth"],
            content["time_s"],
            len(indices),
        )
        return CommitRecord(commit, parent, content["meta"], indices)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{address}: a commit lacks {error}; it is not one of ours"
        ) from error
