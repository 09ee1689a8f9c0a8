"""From the parts of all ranks to a commit: wait, check, publish it by creating one file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.branches import Branches
from meshwright.checkpoint.commits import Commit, commit_record
from meshwright.checkpoint.holding import Holding, Json
from meshwright.checkpoint.packs import pack_name
from meshwright.checkpoint.parts import Attempt, Part, part_name, parts_of, read_part, run_of
from meshwright.checkpoint.pieces import Piece, check_cover
from meshwright.checkpoint.record import Index, renamed
from meshwright.checkpoint.stored import read_indices

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.25
_TRIES = 100
_MANY = 16  # packs; more are listed all at once


class LateError(CheckpointError):
    """Ranks had not written their parts by the deadline. `missing`: those ranks."""

    def __init__(
        self, address: str, attempt: Attempt, missing: Sequence[int], waited_s: float
    ) -> None:
        self._of = address, attempt
        self.missing = tuple(missing)
        super().__init__(self.told(waited_s))

    def told(self, waited_s: float) -> str:
        """In one line, for somebody who has waited so long."""
        (address, attempt), missing = self._of, self.missing
        named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"{address}: step {attempt.step} is not committed: {len(missing)} of "
            f"{attempt.ranks} ranks (rank {named}) wrote nothing within {waited_s:.3g} s; "
            "the commit before stays"
        )


def commit(
    holding: Holding,
    branches: Branches,
    attempt: Attempt,
    meta: Json,
    branch: str,
    deadline_s: float,
    follows: Callable[[Commit], bool] = lambda _: True,
    sleep: Callable[[float], None] = time.sleep,
) -> Commit:
    """Publish what all ranks wrote for an attempt. If that has been done, what was published.
    `follows` says of a head whether the attempt may go on from it.

    Raises LateError after `deadline_s` seconds, and CheckpointError if the parts do not make a
    whole, or the branch has gone on without them, by another run or to a later step of the same;
    nothing is published then.
    """
    if done := _done(attempt, branches.made(branch, attempt.name)):
        return done
    parts = [read_part(holding, name) for name in _wait(holding, attempt, deadline_s, sleep)]
    _check_parts(attempt, parts)
    indices = read_indices(holding, attempt.name, [part.index for part in parts])
    _check_pieces(indices)
    depth = max(part.depth for part in parts)
    for _ in range(_TRIES):
        listed = branches.listed(branch)
        if done := _done(attempt, branches.made(branch, attempt.name)):
            return done
        parent = branches.head(branch, listed)
        _check_parent(holding, attempt, branch, parent, follows)
        _check_packs(holding, parts)
        record = commit_record(attempt, parent, meta, depth, [part.index for part in parts])
        if made := branches.append(branch, listed.next, record):
            return made
    raise CheckpointError(f"{holding.address}: branch {branch} grows faster than it can be written")


def _done(attempt: Attempt, made: Commit | None) -> Commit | None:
    """What the attempt has made before. Raises CheckpointError if that is another step."""
    if made is not None and made.step != attempt.step:
        raise CheckpointError(
            f"attempt {attempt.name!r}: has made {made}, so it cannot make step "
            f"{attempt.step}; give each try a name of its own"
        )
    return made


def _wait(
    holding: Holding, attempt: Attempt, deadline_s: float, sleep: Callable[[float], None]
) -> list[str]:
    """The names of all parts, by rank."""
    folder = parts_of(attempt.name)
    wanted = [part_name(attempt, rank) for rank in range(attempt.ranks)]
    end, pause_s = time.monotonic() + deadline_s, _FIRST_WAIT_S
    while True:
        found = {entry.name for entry in holding.files.names(folder)}
        missing = [rank for rank, name in enumerate(wanted) if name not in found]
        if not missing:
            break
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise LateError(holding.address, attempt, missing, deadline_s)
        sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
    if strange := sorted(found - set(wanted)):
        raise CheckpointError(
            f"{holding.address}: {', '.join(strange[:8])} does not belong to {attempt.ranks} "
            "ranks; give each try a name of its own"
        )
    return wanted


def _check_parts(attempt: Attempt, parts: Iterable[Part]) -> None:
    for part in parts:
        if part.attempt != attempt:
            raise CheckpointError(
                f"rank {part.rank} wrote {part.attempt}, to commit is {attempt}; "
                "all ranks must take part in the same attempt"
            )


def _check_pieces(indices: Sequence[Index]) -> None:
    """Every element of every tensor once, of one dtype."""
    held: dict[str, list[Piece]] = {}
    dtypes: dict[str, str] = {}
    for index in indices:
        for one in index.stored:
            for name in one.of:
                held.setdefault(name, []).append(renamed(one.piece, name))
                if dtypes.setdefault(name, one.dtype) != one.dtype:
                    raise CheckpointError(
                        f"{name}: one rank wrote {dtypes[name]}, another {one.dtype}; "
                        "all ranks must write the same model"
                    )
    for pieces in held.values():
        check_cover(pieces)


def _check_packs(holding: Holding, parts: Iterable[Part]) -> None:
    """Packs that ranks had found there could have been collected before the parts named them."""
    wanted = {pack_name(digest) for part in parts for digest in part.found}
    where = ["packs/"] if len(wanted) > _MANY else sorted(wanted)
    there = {entry.name for prefix in where for entry in holding.files.names(prefix)}
    for name in sorted(wanted - there):
        raise CheckpointError(
            f"{holding.address}/{name}: was removed while it was being used; "
            "save again, and give garbage collection a longer grace"
        )


def _check_parent(
    holding: Holding,
    attempt: Attempt,
    branch: str,
    head: Commit | None,
    follows: Callable[[Commit], bool],
) -> None:
    if attempt.parent is not None and (head is None or head.id != attempt.parent):
        raise CheckpointError(
            f"{holding.address}: step {attempt.step} goes on from {attempt.parent}, but "
            f"branch {branch} is at {head or 'nothing'}: another run writes to it, or it was "
            "rolled back; go on from there, or start a branch"
        )
    if head is not None and not follows(head):
        raise CheckpointError(
            f"{holding.address}: step {attempt.step} is not committed: another run has brought "
            f"branch {branch} to {head}, or a rollback; take another name by checkpoint.branch"
        )
    if head is not None and attempt.step <= head.step and _same_run(attempt, head):
        raise CheckpointError(
            f"{holding.address}: step {attempt.step} is not committed: its run has brought "
            f"branch {branch} to {head} meanwhile; that stays"
        )


def _same_run(attempt: Attempt, head: Commit) -> bool:
    run = run_of(attempt.name, attempt.step)
    return bool(run) and run == run_of(head.attempt, head.step)
