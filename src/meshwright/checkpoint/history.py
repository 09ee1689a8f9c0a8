"""Names of commits, what happened to branches, and turning a branch to another commit."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from meshwright.base.errors import CheckpointError, did_you_mean
from meshwright.checkpoint.branches import Branches, Turn
from meshwright.checkpoint.commits import Commit, CommitRecord, Place, place_of
from meshwright.checkpoint.holding import DamagedRecordError, Holding
from meshwright.checkpoint.marks import read_marks
from meshwright.checkpoint.parts import check_name

TAGS = "tags/"
_TAG = re.compile(r"tags/([^/]+)\.json")
_ID = re.compile(r"[0-9a-f]{4,16}")
_AT = re.compile(r"([^@]+)@(\d+)")


@dataclass(frozen=True)
class Logged:
    """A record of a branch. `kind`: "commit", "start", "rollback" or "damaged". `commit` is what
    was committed, `to` what a turn leads to, `why` what is wrong with a damaged record."""

    kind: str
    branch: str
    seq: int
    time_s: float
    commit: Commit | None = None
    to: Place | None = None
    why: str = ""
    on_line: bool = False  # the head comes from it
    verified_ns: int | None = None
    bad: bool = False
    tags: tuple[str, ...] = ()


def log(holding: Holding, branches: Branches, branch: str) -> list[Logged]:
    """Everything that a branch has recorded, newest first."""
    line, marks = {commit.id for commit in branches.line(branch)}, read_marks(holding)
    names: dict[str, tuple[str, ...]] = {}
    for name, commit_id in tags(holding).items():
        names[commit_id] = (*names.get(commit_id, ()), name)
    found = []
    for seq, record in branches.records(branch).items():
        match record:
            case CommitRecord(commit=commit):
                one = Logged(
                    "commit",
                    branch,
                    seq,
                    commit.time_s,
                    commit,
                    on_line=commit.id in line,
                    verified_ns=marks.verified.get(commit.id),
                    bad=commit.id in marks.bad,
                    tags=names.get(commit.id, ()),
                )
            case Turn(kind=kind, to=to, time_s=time_s):
                one = Logged(kind, branch, seq, time_s, to=to)
            case DamagedRecordError() as error:
                one = Logged("damaged", branch, seq, 0.0, why=str(error))
        found.append(one)
    return found[::-1]


def tags(holding: Holding) -> dict[str, str]:
    """The commit's id of each tag."""
    matches = (_TAG.fullmatch(entry.name) for entry in holding.files.names(TAGS))
    names = [match[1] for match in matches if match]
    return {name: str(holding.read_json(f"{TAGS}{name}.json")["commit"]) for name in names}


def tag(holding: Holding, name: str, commit: Commit) -> None:
    """Give a commit a name, which keeps it. Raises CheckpointError if another has that name."""
    check_name("tag", name)
    path = f"{TAGS}{name}.json"
    if holding.create_json(path, {"commit": commit.id}):
        return
    if (there := holding.read_json(path)["commit"]) != commit.id:
        raise CheckpointError(
            f"{holding.address}: tag {name} is of commit {there} and never moves; take another "
            "name, or remove the tag"
        )


def untag(holding: Holding, name: str) -> None:
    """Remove a tag, if it is there."""
    check_name("tag", name)
    holding.files.remove(f"{TAGS}{name}.json")


def start_branch(branches: Branches, name: str, commit: Commit) -> None:
    """Begin a branch at a commit. Raises CheckpointError if there is one of that name."""
    where = branches.holding.address
    if branches.records(name) or not _turn(branches, name, "start", commit, after=0):
        raise CheckpointError(f"{where}: branch {name} is there already; take another name")


def rollback(branches: Branches, branch: str, commit: Commit) -> None:
    """Go on from `commit`: it becomes the head of the branch. What came after it stays until
    retention removes it. Raises CheckpointError if the branch is being written to."""
    if not branches.records(branch):
        raise CheckpointError(_no_branch(branches, branch))
    if not _turn(branches, branch, "rollback", commit):
        raise CheckpointError(
            f"{branches.holding.address}: branch {branch} has just been written to; stop the run "
            "that does, and try again"
        )


def find(holding: Holding, branches: Branches, word: str) -> Commit:
    """The commit of a tag, the head of a branch, `branch@step`, a step, or the beginning of an id.

    Raises CheckpointError if there is none or more than one.
    """
    tagged = tags(holding).get(word)
    if tagged is not None:
        return _by_id(holding, branches, tagged, f"tag {word}")
    names = branches.names()
    if word in names:
        head = branches.head(word)
        if head is None:
            raise CheckpointError(f"{holding.address}: branch {word} has no commit that is good")
        return head
    if match := _AT.fullmatch(word):
        if match[1] not in names:
            raise CheckpointError(_no_branch(branches, match[1]))
        return _only(holding, word, _of_step(branches, [match[1]], int(match[2])))
    if word.isdecimal() and (found := _of_step(branches, names, int(word))):
        return _only(holding, word, found)
    if _ID.fullmatch(word):
        every = [c for name in names for c in branches.published(name)]
        return _only(holding, word, [c for c in every if c.id.startswith(word)])
    hint = did_you_mean(word, [*names, *tags(holding)])
    raise CheckpointError(
        f"{holding.address}: no commit {word!r}{hint or '; name a branch, a tag, a step or an id'}"
    )


def _turn(
    branches: Branches, branch: str, kind: str, commit: Commit, after: int | None = None
) -> bool:
    content = {"kind": kind, "to": place_of(commit).to_json(), "time_s": time.time()}
    return branches.create(branch, branches.next(branch) if after is None else after + 1, content)


def _by_id(holding: Holding, branches: Branches, commit_id: str, named: str) -> Commit:
    if commit := branches.find(commit_id):
        return commit
    raise CheckpointError(f"{holding.address}: commit {commit_id} of {named} is not here any more")


def _of_step(branches: Branches, names: list[str], step: int) -> list[Commit]:
    lines = (branches.good_line(name) for name in names)
    return [commit for line in lines for commit in line if commit.step == step]


def _only(holding: Holding, word: str, found: list[Commit]) -> Commit:
    """The newest of each line counts; lines of several branches may share one."""
    newest = {commit.branch: commit for commit in found}
    if len(newest) == 1:
        return next(iter(newest.values()))
    if not newest:
        raise CheckpointError(f"{holding.address}: no commit {word}; see the log for what is there")
    named = ", ".join(f"{commit} is {commit.id}" for commit in newest.values())
    raise CheckpointError(f"{holding.address}: {word} is more than one commit: {named}; name one")


def _no_branch(branches: Branches, name: str) -> str:
    hint = did_you_mean(name, branches.names()) or "; see the log for what is there"
    return f"{branches.holding.address}: no branch {name}{hint}"
