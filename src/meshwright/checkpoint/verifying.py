"""Reading all of a commit to see that it is what was saved, and all that is damaged in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from meshwright.checkpoint.chunks import digest
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.record import Stored
from meshwright.checkpoint.spread import spread
from meshwright.checkpoint.stored import DamagedCommitError

Progress = Callable[[int, int], None]
"""Told bytes of elements that were checked, and all there are."""

_AT_ONCE = 4


@dataclass(frozen=True)
class Checked:
    """Bytes of elements that are as they were saved, and what is damaged."""

    bytes: int
    damages: tuple[DamagedCommitError, ...]


def check(
    reader: Reader,
    on_progress: Progress | None = None,
    at_once: int = 0,
    to_the_end: bool = True,
) -> Checked:
    """Read every chunk of a commit, and what it is relative to, down to its elements; if not
    `to_the_end`, no more than until something is found to be damaged.

    `at_once` chunks side by side (0: as the machine has cores); a chunk each is held. Raises
    SealError if a key is wrong, CheckpointError if the storage does not answer: that says nothing
    about the commit.
    """
    try:
        rows = [row for index in reader.indices for row in index.stored]
    except DamagedCommitError as error:
        return Checked(0, (error,))
    told = _Told(sum(_nbytes(reader, row, row.piece.size) for row in rows), on_progress)
    tasks = [(row, *cut) for row in rows for cut in row.cuts()]

    def look(task: tuple[Stored, int, Piece]) -> DamagedCommitError | None:
        row, number, cut = task
        if told.damaged and not to_the_end:
            return None
        size = _nbytes(reader, row, cut.size)
        try:
            held = reader.elements(row, number, cut)
        except DamagedCommitError as error:
            told.add(size, 0)
            told.damaged = True
            return error
        chunk = row.chunks[number]
        right = digest(held) == chunk.raw
        told.add(size, size if right else 0)
        if right:
            return None
        told.damaged = True
        where = (row.of[0], number, chunk.pack, chunk.at, chunk.at + chunk.bytes)
        return DamagedCommitError(str(reader.commit), *where, "other elements than were saved")

    found = spread(look, tasks, at_once or min(_AT_ONCE, os.cpu_count() or 1))
    return Checked(told.right, tuple(error for error in found if error))


class _Told:
    """Counts for all threads."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.right, self.damaged = 0, False
        self._done, self._total, self._on_progress = 0, total, on_progress
        self._lock = Lock()

    def add(self, size: int, right: int) -> None:
        with self._lock:
            self._done += size
            self.right += right
            if self._on_progress:
                self._on_progress(self._done, self._total)


def _nbytes(reader: Reader, row: Stored, elements: int) -> int:
    return elements * len(row.of) * reader.dtype(row.of[0]).itemsize
