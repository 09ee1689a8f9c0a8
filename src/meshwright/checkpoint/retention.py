"""Which commits stay, and removing the others and what nobody needs any more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.branches import Branches
from meshwright.checkpoint.commits import Commit, CommitRecord
from meshwright.checkpoint.files import Entry, sweep
from meshwright.checkpoint.history import tags
from meshwright.checkpoint.holding import DamagedRecordError, Holding
from meshwright.checkpoint.marks import FOLDER as MARKS
from meshwright.checkpoint.marks import Marks, read_marks
from meshwright.checkpoint.packs import pack_name
from meshwright.checkpoint.parts import read_part
from meshwright.checkpoint.stored import read_index, read_indices

Needs = dict[str, frozenset[str]]
"""The packs that a commit needs, by its id."""
_PART = re.compile(r"parts/([^/]+)/[^/]+\.json")


@dataclass(frozen=True)
class Policy:
    """What stays of each branch: the `newest` commits, the newest `verified` ones of those that
    were verified, and if `spaced` the oldest verified one of those 1, 2 to 3, 4 to 7, ... steps
    behind the head. Heads and commits with a tag stay always, and so does what they need.

    Nothing goes before a newer commit of its branch is there and was verified.
    """

    newest: int = 2
    verified: int = 2
    spaced: bool = True


def doomed(
    lines: Sequence[Sequence[Commit]],
    published: Sequence[Commit],
    marks: Marks,
    tagged: Iterable[str],
    policy: Policy,
    branch: str | None = None,
) -> list[Commit]:
    """What the policy removes, in an order that never leaves a commit without what it needs.

    `lines`: of each branch; `published`: all commits of all branches. Only those that `branch` has
    made go, if it is given: what others keep is not for it to say.
    """
    by_id = {commit.id: commit for commit in published}
    kept = set(tagged) | {c.id for c in published if branch not in (None, c.branch)}
    for line in lines:
        kept |= _kept_of(line, marks, policy)
        newest = max((n for n, c in enumerate(line) if c.id in marks.verified), default=-1)
        kept |= {commit.id for commit in line[max(newest, 0) :]}
    verified = _newest_verified(lines, marks)
    kept |= {c.id for c in published if c.seq >= verified.get(c.branch, 0)}
    for commit_id in list(kept):  # what a relative one needs, up to the full one
        one = by_id.get(commit_id)
        while one and one.depth and one.parent is not None and one.parent not in kept:
            kept.add(one.parent)
            one = by_id.get(one.parent)
    gone = [commit for commit in published if commit.id not in kept]
    return sorted(gone, key=lambda commit: -commit.depth)


def _kept_of(line: Sequence[Commit], marks: Marks, policy: Policy) -> set[str]:
    good = [commit for commit in line if commit.id not in marks.bad]
    verified = [commit for commit in good if commit.id in marks.verified]
    kept = {commit.id for commit in good[-max(policy.newest, 1) :]}
    kept |= {commit.id for commit in verified[-max(policy.verified, 2) :]}
    if policy.spaced and good:
        oldest: dict[int, Commit] = {}
        for commit in verified:
            oldest.setdefault((good[-1].step - commit.step).bit_length(), commit)
        kept |= {commit.id for commit in oldest.values()}
    return kept


def _newest_verified(lines: Sequence[Sequence[Commit]], marks: Marks) -> dict[str, int]:
    """Of each branch the number of its newest commit that was verified; older ones may go."""
    found: dict[str, int] = {}
    for commit in (commit for line in lines for commit in line):
        if commit.id in marks.verified:
            found[commit.branch] = max(commit.seq, found.get(commit.branch, 0))
    return found


def retain(
    holding: Holding, branches: Branches, policy: Policy, branch: str | None = None
) -> list[Commit]:
    """Remove the commits that the policy does not keep, of one branch or of all: those. Raises
    CheckpointError."""
    names = branches.names()
    published = [commit for name in names for commit in branches.published(name)]
    lines = [branches.line(name) for name in names]
    marks, tagged = read_marks(holding), tags(holding).values()
    gone = doomed(lines, published, marks, tagged, policy, branch)
    for commit in gone:
        branches.remove(commit)
    return gone


@dataclass(frozen=True)
class Collected:
    """What garbage collection removed: files of each kind, and bytes of packs."""

    packs: int
    parts: int
    marks: int
    drafts: int
    bytes: int


def collect(
    holding: Holding, branches: Branches, grace_s: float, now_s: float, needs: Needs
) -> Collected:
    """Remove files that are older than `grace_s` seconds and that no commit needs, nor an attempt
    that may still be committed. A save must take less than that time. `needs` remembers what was
    read for it before.

    Raises CheckpointError, and removes nothing, if a commit is damaged: nobody knows what it needs.
    """
    before_s, files = now_s - grace_s, holding.files
    # Packs and marks are listed first: of one that is made later nobody knows yet who needs it.
    packs = [entry for entry in files.names("packs/") if entry.modified_s < before_s]
    marks = files.names(MARKS)
    commits = _commits(branches)
    live, attempts = _needed(holding, commits, needs), {one.commit.attempt for one in commits}
    parts = [
        entry
        for entry in files.names("parts/")
        if not _waits(holding, entry, before_s, attempts, live)
    ]
    marks = [entry for entry in marks if entry.name.split("/")[1] not in needs]
    garbage = [entry for entry in packs if entry.name not in live]
    for entry in [*parts, *garbage, *marks]:
        files.remove(entry.name)
    drafts = sweep(files, before_s)
    size = sum(entry.size for entry in garbage)
    return Collected(len(garbage), len(parts), len(marks), drafts, size)


def _commits(branches: Branches) -> list[CommitRecord]:
    """Those of all branches. Raises DamagedRecordError if there could be one more."""
    found = []
    for record in (r for name in branches.names() for r in branches.records(name).values()):
        if isinstance(record, DamagedRecordError):
            raise record
        if isinstance(record, CommitRecord):
            found.append(record)
    return found


def _needed(holding: Holding, commits: Sequence[CommitRecord], needs: Needs) -> set[str]:
    """Names of the packs that commits need; `needs` is brought up to date."""
    for record in commits:
        if record.commit.id not in needs:
            indices = read_indices(holding, record.commit.attempt, record.indices)
            digests = {digest for index in indices for digest in index.packs}
            digests |= {ref.pack for ref in record.indices}
            needs[record.commit.id] = frozenset(map(pack_name, digests))
    for gone in needs.keys() - {record.commit.id for record in commits}:
        del needs[gone]
    return {pack for packs in needs.values() for pack in packs}


def _waits(
    holding: Holding, entry: Entry, before_s: float, attempts: set[str], live: set[str]
) -> bool:
    """Whether a part may still be committed; if so, its packs become `live`."""
    match = _PART.fullmatch(entry.name)
    if match and match[1] in attempts:
        return False
    if entry.modified_s < before_s:
        return False
    try:
        part = read_part(holding, entry.name)
        index = read_index(holding, part.attempt.name, part.rank, part.index)
    except (FileNotFoundError, CheckpointError):
        return True  # it will not be committed as it is, but it is young
    live |= {pack_name(digest) for digest in (*index.packs, part.index.pack)}
    return True
