"""A store of checkpoints: immutable packs of chunks, and branches of commits over them.

store.json                              its id, and whether it is encrypted
packs/<2 hex>/<digest>                  chunks one after another; named by its content
parts/<attempt>/<rank>-of-<ranks>.json  what one rank wrote for an attempt
branches/<branch>/<number>.json         a commit: creating this file publishes it
tags/<name>.json   marks/<commit id>/   names of commits, what verification found
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import committer, history, lineage, retention
from meshwright.checkpoint.ahead import read_ahead
from meshwright.checkpoint.branches import Branches
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.commits import Commit, CommitRecord, Place, place_of
from meshwright.checkpoint.files import Files, ToldFiles, open_files
from meshwright.checkpoint.history import Logged
from meshwright.checkpoint.holding import STORE_FILE, Holding, Json, rooted, unrooted
from meshwright.checkpoint.lineage import Stretch, TensorDiff
from meshwright.checkpoint.marks import Marks, mark, read_marks
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.retention import Collected, Policy
from meshwright.checkpoint.seal import Plain, Seal
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.verifying import check
from meshwright.checkpoint.writing import Encoding, PartWritten, write_part

MAIN = "main"
GRACE_S = 6 * 3600.0


@dataclass(frozen=True)
class Verified:
    """A commit that was read whole: bytes of elements, and the time it took."""

    commit: Commit
    bytes: int
    seconds: float


class Store:
    """A store that is open. Any number of processes may use one at the same time."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._branches = Branches(holding)
        self._needs: retention.Needs = {}

    @classmethod
    def open(cls, address: str | Path, seal: Seal | None = None, create: bool = False) -> Store:
        """The store at a path or at an address that fsspec knows. `create`: make one if there is
        none. Raises CheckpointError."""
        return cls.over(open_files(address), str(address), seal, create)

    @classmethod
    def over(
        cls, files: Files, address: str, seal: Seal | None = None, create: bool = False
    ) -> Store:
        """The store that `files` hold. Raises CheckpointError."""
        seal, told = seal or Plain(), ToldFiles(files, address.rstrip("/"))
        if create:
            made = {"id": uuid4().hex, "encrypted": not isinstance(seal, Plain)}
            told.create(STORE_FILE, [rooted(made)])
        try:
            found = unrooted(f"{told.address}/{STORE_FILE}", told.read(STORE_FILE))
        except FileNotFoundError:
            raise CheckpointError(
                f"{told.address}: no checkpoints here (no {STORE_FILE})"
            ) from None
        if found["encrypted"] == isinstance(seal, Plain):
            raise CheckpointError(
                f"{told.address}: is encrypted, and no key was given; set the key it was made with"
                if found["encrypted"]
                else f"{told.address}: is not encrypted, and a key was given; take another place"
            )
        return cls(Holding(told.address, found["id"], told, seal))

    @property
    def holding(self) -> Holding:
        """Its files and its seal."""
        return self._holding

    @property
    def address(self) -> str:
        """Where it is."""
        return self._holding.address

    def write_part(
        self,
        attempt: Attempt,
        rank: int,
        tensors: Mapping[Piece, Array],
        encoding: Encoding | None = None,
        base: Mapping[Piece, Array] | None = None,
        like: Commit | None = None,
    ) -> PartWritten:
        """Write what `rank` holds: 1-D arrays of `piece.size`, which must not change meanwhile.

        `base`: the state that the parent commit holds, if the encoding makes this one relative to
        it. `like`: a commit whose chunks are used again where they are equal; the parent's are, if
        there is one. None are of what was found damaged, or may share that. Raises CheckpointError,
        also if it would be relative to a bad commit; nothing of the part is seen then.
        """
        encoding, marks = encoding or Encoding(), self.marks()
        parent = self._parent(attempt)
        if parent is None and like is not None:
            parent, base = self.reader(like), None
        if parent is not None and base is not None and encoding.update is not None:
            lineage.refuse_bad(parent, marks.bad)
        elif parent is not None and not marks.trust(parent.commit.id):
            parent = None
        if parent is None:
            return write_part(self._holding, attempt, rank, tensors, encoding)
        depth = parent.commit.depth
        return write_part(
            self._holding, attempt, rank, tensors, encoding, base, parent.rows_for(rank), depth
        )

    def commit(
        self,
        attempt: Attempt,
        meta: Json,
        branch: str = MAIN,
        deadline_s: float = 0.0,
        follows: Callable[[Commit], bool] = lambda _: True,
    ) -> Commit:
        """Publish what all ranks wrote for an attempt; again gives the same commit. It goes on from
        the head of the branch, if that `follows`.

        `meta` is plain JSON that `Reader.meta` gives back. Raises LateError, which names the ranks
        that have not written after `deadline_s` seconds, and CheckpointError if the parts do not
        hold each element of each tensor exactly once, or if the branch is no longer at the parent.
        """
        return committer.commit(
            self._holding, self._branches, attempt, meta, branch, deadline_s, follows
        )

    def committed(self, attempt: str, branch: str = MAIN) -> Commit | None:
        """The commit of the attempt of that name, if there is one. May be asked often."""
        return self._branches.made(branch, attempt)

    def commits(self, branch: str = MAIN, bad: bool = False) -> list[Commit]:
        """The commits of a branch's line, oldest first; those marked as bad only if `bad`."""
        return self._branches.line(branch) if bad else self._branches.good_line(branch)

    def head(self, branch: str = MAIN) -> Commit | None:
        """The newest of `commits`, or None."""
        return self._branches.head(branch)

    def find(self, word: str) -> Commit:
        """The commit of a tag, the head of a branch, `branch@step`, a step, or the beginning of an
        id. Raises CheckpointError if there is none, or more than one."""
        return history.find(self._holding, self._branches, word)

    def log(self, branch: str = MAIN) -> list[Logged]:
        """Everything that a branch has recorded, newest first, also what is damaged or left."""
        return history.log(self._holding, self._branches, branch)

    def last(self, branch: str = MAIN) -> int:
        """The number of the newest record of a branch, 0 if there is none."""
        return self._branches.next(branch) - 1

    def branches(self) -> list[str]:
        """Names of all branches."""
        return self._branches.names()

    def start_branch(self, name: str, commit: Commit) -> None:
        """Begin a branch at a commit. Raises CheckpointError if there is one of that name."""
        history.start_branch(self._branches, name, commit)

    def rollback(self, commit: Commit, branch: str = MAIN) -> None:
        """Make `commit` the head of a branch again. An attempt that goes on from a later one is
        refused from now on. Raises CheckpointError if the branch is being written to."""
        history.rollback(self._branches, branch, commit)

    def tag(self, name: str, commit: Commit) -> None:
        """Name a commit, which keeps it. Raises CheckpointError if another has that name."""
        history.tag(self._holding, name, commit)

    def untag(self, name: str) -> None:
        """Remove a tag, if it is there."""
        history.untag(self._holding, name)

    def tags(self) -> dict[str, str]:
        """The commit's id of each tag."""
        return history.tags(self._holding)

    def diff(self, old: Commit, new: Commit) -> list[TensorDiff]:
        """Which tensors differ, and by how much."""
        return lineage.diff(self.reader(old), self.reader(new))

    def lineage(self, commit: Commit) -> list[Stretch]:
        """The samples that made a commit, oldest first."""
        line = self._branches.line(commit.branch, commit.seq)
        return lineage.lineage([self.reader(one) for one in line])

    def verify(self, commit: Commit) -> Verified:
        """Read all of a commit and mark it as verified, or as bad. Raises DamagedCommitError."""
        start = time.perf_counter()
        try:
            checked = check(self.reader(commit), to_the_end=False)
            for damage in checked.damages:
                raise damage
        except DamagedCommitError as error:
            mark(self._holding, commit.id, "bad", str(error))
            raise
        mark(self._holding, commit.id, "verified")
        return Verified(commit, checked.bytes, time.perf_counter() - start)

    def mark_bad(self, commit: Commit, why: str) -> None:
        """Leave a commit out of `commits` from now on, until it is verified."""
        mark(self._holding, commit.id, "bad", why)

    def marks(self) -> Marks:
        """Which commits were found verified and bad, and when."""
        return read_marks(self._holding)

    def retain(self, policy: Policy, branch: str | None = None) -> list[Commit]:
        """Remove the commits that the policy does not keep, of one branch or of all: those. `gc`
        frees their bytes.

        Nothing goes before a newer commit of its branch was verified. Raises CheckpointError."""
        return retention.retain(self._holding, self._branches, policy, branch)

    def gc(self, grace_s: float = GRACE_S) -> Collected:
        """Remove files that no commit needs and that are older than `grace_s` seconds, which a save
        must not take. Raises CheckpointError, and removes nothing, if a commit is damaged."""
        return retention.collect(self._holding, self._branches, grace_s, time.time(), self._needs)

    def reader(self, commit: Commit) -> Reader:
        """What a commit holds. Raises CheckpointError if it is not there any more."""
        return self._open(place_of(commit))

    def _open(self, place: Place) -> Reader:
        record = self._branches.record(place.branch, place.seq)
        if isinstance(record, CheckpointError):
            raise record
        if not isinstance(record, CommitRecord) or record.commit.id != place.id:
            raise CheckpointError(
                f"{self.address}: {place.branch}@{place.step} ({place.id[:8]}) is not here any more"
            )
        holding = replace(self._holding, files=read_ahead(self._holding.files))
        return Reader(holding, record, self._open)

    def _parent(self, attempt: Attempt) -> Reader | None:
        if attempt.parent is None:
            return None
        if commit := self._branches.find(attempt.parent):
            return self.reader(commit)
        raise CheckpointError(
            f"{self.address}: commit {attempt.parent}, which step {attempt.step} goes on from, "
            "is not here"
        )
