"""Whether a commit can be had back, tried before it is needed; and if not, what else can be.

A commit that was never read is a hope. A rehearsal reads all of it, restores a part of it as a load
under another layout would, and marks what it found. The age of the newest commit that passed says
how much would be lost if only what was proved is counted on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import Array, digest
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import Files
from meshwright.checkpoint.holding import DamagedRecordError
from meshwright.checkpoint.marks import mark
from meshwright.checkpoint.pieces import Piece, transfers
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.record import Stored, renamed
from meshwright.checkpoint.replicas import check_same, mend_pack, mend_records
from meshwright.checkpoint.ruins import Ruins
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.verifying import Progress, check
from meshwright.checkpoint.whole import check_whole

RESTORE_BYTES = 256 << 20
_NICENESS = 10


@dataclass(frozen=True)
class Rehearsed:
    """A commit that was read whole; bytes of elements read, and restored besides; how long that
    took; what was repaired for it, from the replica."""

    commit: Commit
    read_bytes: int
    restored_bytes: int
    seconds: float
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True)
class Good:
    """The newest commit that is whole, None if there is none; what was repaired for it from the
    replica; and newer commits that are bad, with the reason."""

    commit: Commit | None
    repaired: tuple[str, ...]
    bad: tuple[tuple[Commit, str], ...]


def rehearse(
    store: Store,
    commit: Commit,
    replica: Files | None = None,
    restore_bytes: int = RESTORE_BYTES,
    on_progress: Progress | None = None,
    at_once: int = 0,
) -> Rehearsed:
    """Read a commit and restore `restore_bytes` of it, or a tensor at least; mark it as verified.

    What is damaged is repaired from `replica`, files that `replicas.mirror` made, where it is whole
    there. Raises DamagedCommitError (or DamagedRecordError, of a commit that this one is relative
    to) once the commit is marked as bad, CheckpointError if it could not be tried.
    """
    start = time.perf_counter()
    try:
        read, repaired = _healed(store, commit, replica, on_progress, at_once)
        reader = store.reader(commit)
        restored = sum(_restore(reader, rows) for rows in _sample(reader, restore_bytes))
    except (DamagedCommitError, DamagedRecordError) as error:
        store.mark_bad(commit, str(error))
        raise
    mark(store.holding, commit.id, "verified")
    return Rehearsed(commit, read, restored, time.perf_counter() - start, repaired)


def verified_age_s(store: Store, branch: str = MAIN, now_s: float | None = None) -> float | None:
    """Seconds since the newest commit of a branch that was verified was made; None if there is no
    such commit. Raises CheckpointError."""
    verified = store.marks().verified
    made_s = [commit.time_s for commit in store.commits(branch) if commit.id in verified]
    now_s = time.time() if now_s is None else now_s
    return max(0.0, now_s - made_s[-1]) if made_s else None


def newest_good(
    store: Store,
    replica: Files | None = None,
    branch: str = MAIN,
    on_progress: Progress | None = None,
) -> Good:
    """The newest commit of a branch that is whole, after reading it; it is marked as verified.

    What is damaged is repaired from `replica`, files that `replicas.mirror` made, if it has that
    whole; else the commit is marked as bad and the one before is tried, without reading those that
    need what is known to be damaged. Raises CheckpointError if
    the storage does not answer, a key is wrong, or the replica is of another store.
    """
    repaired: list[str] = []
    if replica is not None:
        check_same(store.holding.files, replica)
        repaired += mend_records(store.holding.files, replica)
    bad: list[tuple[Commit, str]] = []
    ruins = Ruins()
    # What was found bad before may be whole now, if there is something to repair it from.
    for commit in reversed(store.commits(branch, bad=replica is not None)):
        why, mended = _tried(store, commit, replica, ruins, on_progress)
        if why is None:
            mark(store.holding, commit.id, "verified")
            return Good(commit, (*repaired, *mended), tuple(bad))
        store.mark_bad(commit, why)
        bad.append((commit, why))
    return Good(None, tuple(repaired), tuple(bad))


def _tried(
    store: Store,
    commit: Commit,
    replica: Files | None,
    ruins: Ruins,
    on_progress: Progress | None,
) -> tuple[str | None, tuple[str, ...]]:
    """Why a commit is not whole, None if it is, and what was repaired for it. Damage that could not
    be repaired is added to `ruins`."""
    try:
        if why := ruins.why(store.reader(commit)):
            return why, ()
        if replica is None:  # what a crash of the machine has torn is seen without reading it
            check_whole(store.holding, store.reader(commit))
        return None, _healed(store, commit, replica, on_progress)[1]
    except DamagedCommitError as error:
        ruins.add(error)
        return str(error), ()
    except DamagedRecordError as error:
        return str(error), ()


def yield_to_others() -> None:
    """Let other threads of this machine run before the calling one, where the system can: a
    rehearsal must not slow the training beside it."""
    if sys.platform == "linux":  # elsewhere only whole processes have a priority
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _healed(
    store: Store,
    commit: Commit,
    replica: Files | None,
    on_progress: Progress | None = None,
    at_once: int = 0,
) -> tuple[int, tuple[str, ...]]:
    """Bytes read of a commit that is whole, and what was repaired for that. Raises
    DamagedCommitError if a pack is damaged that the replica cannot mend."""
    mended, repaired = set[str](), list[str]()
    while True:
        checked = check(store.reader(commit), on_progress, at_once, replica is not None)
        if not checked.damages:
            return checked.bytes, tuple(repaired)
        for pack, damage in {damage.pack: damage for damage in checked.damages}.items():
            # A pack that was mended once and still does not fit is not what the commit needs.
            if replica is None or pack in mended:
                raise damage
            try:
                better = mend_pack(store.holding.files, replica, pack)
            except (OSError, CheckpointError) as error:  # out of reach; the damage counts
                raise damage from error
            if not better:
                raise damage
            mended.add(pack)
        repaired += map(str, checked.damages)


def _sample(reader: Reader, most_bytes: int) -> Iterator[list[Stored]]:
    """The rows of some tensors, the same ones for the same commit: at most `most_bytes`, but a
    tensor at least. Tensors that are stored together come together."""
    names, left, seen = list(reader.names), most_bytes, set[str]()
    Random(reader.commit.id).shuffle(names)
    for number, name in enumerate(names):
        rows = reader.stored(name)
        of = {one for row in rows for one in row.of}
        size = sum(row.piece.size * len(row.of) for row in rows) * reader.dtype(name).itemsize
        if not of & seen and (not number or size <= left):
            seen |= of
            left -= size
            yield rows


def _restore(reader: Reader, rows: list[Stored]) -> int:
    """Read tensors whole, as one rank alone would, and compare them with what was saved chunk by
    chunk: bytes. Raises DamagedCommitError."""
    wholes: dict[str, Array] = {}
    for name in {name for row in rows for name in row.of}:
        wholes[name] = reader.read(name).reshape(-1)
    for row in rows:
        for number, cut in row.cuts():
            held = [_taken(wholes[name], renamed(cut, name)) for name in row.of]
            chunk = row.chunks[number]
            if digest(held) != chunk.raw:
                where = (row.of[0], number, chunk.pack, chunk.at, chunk.at + chunk.bytes)
                raise DamagedCommitError(
                    str(reader.commit), *where, "restored otherwise than saved"
                )
    return sum(whole.nbytes for whole in wholes.values())


def _taken(whole: Array, piece: Piece) -> Array:
    """The elements of a piece out of a whole tensor."""
    found = np.empty(piece.size, whole.dtype)
    for source, target in transfers(Piece.whole(piece.name, piece.global_shape), piece):
        view = source.of(whole[source.start : source.stop])
        target.of(found[target.start : target.stop])[...] = view
    return found
