"""Saving while training goes on: a copy in memory blocks, everything else is done by a thread.

Training waits for no other rank here, so one that is slow or dead holds nothing up; the thread
waits, for a while, where a change needs the commit that it follows on. On the rank that commits,
`committing.Committing` takes over what has been written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Event, Lock, Thread
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.committing import Committing, Pending, Saved, in_a_line
from meshwright.checkpoint.copies import Buffers, Source, Turns, fill, nbytes
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

_PARENT_WITHIN_S, _LOOK_S = 2.0, 0.01


@dataclass(frozen=True)
class _Base:
    """The copy that the next change is made against, and the attempt that it was saved by."""

    attempt: str
    copy: Mapping[Piece, Array]


@dataclass(frozen=True, eq=False)
class _Task:
    """One part to write. `like`: an attempt whose chunks may be used again. `sources`: what is to
    be copied to `tensors` first."""

    pending: Pending
    tensors: Mapping[Piece, Array]
    encoding: Encoding
    base: _Base | None
    like: str | None
    sources: Mapping[Piece, Source] | None = None


class Background:
    """Writes the parts of one rank for `branch`, one after another.

    `copy_bytes` caps what lies in memory between training and the store; 0: as much as the state,
    twice that where changes are saved.
    """

    def __init__(
        self,
        store: Store,
        branch: str,
        rank: int,
        copy_bytes: int = 0,
        committing: Committing | None = None,
    ) -> None:
        self._store, self._branch, self._rank, self._cap = store, branch, rank, copy_bytes
        self._committing = committing
        self._buffers = [Buffers(), Buffers()]
        self._base: _Base | None = None
        self._whole: str | None = None  # the newest attempt that was no change
        self._thread: Thread | None = None
        self._copied = Event()
        self._copied.set()
        self._attempt: Attempt | None = None
        self._failed: list[Saved] = []
        self._lock = Lock()

    def save(
        self,
        attempt: Attempt,
        sources: Mapping[Piece, Source],
        encoding: Encoding,
        meta: Mapping[str, Any] | None = None,
        keep_base: bool = False,
        overlap: bool = False,
    ) -> float:
        """Copy `sources`, and write them in the background; seconds that this has blocked.

        With `overlap` the copy is made in the background too, while training reads: `fence` must be
        called before anything changes the sources. A state above the cap is copied at once.

        A save under way is waited for first. With `encoding.update` it becomes a change to the save
        before, which must have been made with `keep_base`; else it is whole. `meta` goes into the
        commit.
        """
        begun_s = time.perf_counter()
        self.wait_written()
        pending = Pending(attempt, meta or {}, begun_s)
        base, self._base = self._base, None
        if encoding.update is None or base is None:
            base, encoding = None, replace(encoding, update=None)
        size = (1 + keep_base) * nbytes(sources)
        if keep_base and 0 < self._cap < size:
            raise CheckpointError(
                f"checkpoint.copy_bytes = {self._cap}: changes are made against a copy, and rank "
                f"{self._rank} needs {size} bytes; allow that, or set checkpoint.deltas = false"
            )
        task = _Task(pending, {}, encoding, base, self._whole)
        if 0 < self._cap < size:
            self._save_by_turns(task, sources)
        else:
            self._save_copy(task, sources, keep_base, overlap)
        if base is None:
            self._whole = attempt.name
        return time.perf_counter() - begun_s

    def _save_by_turns(self, task: _Task, sources: Mapping[Piece, Source]) -> None:
        turns = Turns(sources, self._cap)
        self._start(replace(task, tensors=turns))
        turns.fill()

    def _save_copy(
        self, task: _Task, sources: Mapping[Piece, Source], keep_base: bool, overlap: bool
    ) -> None:
        copy = self._buffers[0].reserve(sources)
        if overlap:
            self._copied.clear()
        else:
            fill(copy, sources)
        self._start(replace(task, tensors=copy, sources=sources if overlap else None))
        if keep_base:
            self._base = _Base(task.pending.attempt.name, copy)
            self._buffers.reverse()

    def fence(self) -> None:
        """Until what was handed over has been copied, and may change."""
        self._copied.wait()

    @property
    def has_base(self) -> bool:
        """Whether the next save can be a change."""
        return self._base is not None

    @property
    def is_writing(self) -> bool:
        """Whether something that was handed over is not on storage yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing(self) -> Attempt | None:
        """What is not on storage yet."""
        return self._attempt if self.is_writing else None

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or has not been committed where this rank does."""
        return self.is_writing or (self._committing is not None and self._committing.is_busy)

    def wait_written(self) -> None:
        """Until what was handed over is on storage, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until it has been committed too, where this rank commits."""
        self.wait_written()
        if self._committing is not None:
            self._committing.wait()

    def take_outcomes(self) -> list[Saved]:
        """What has been committed or has failed since this was last asked, by step."""
        with self._lock:
            failed, self._failed = self._failed, []
        done = [] if self._committing is None else self._committing.take_outcomes()
        return sorted([*failed, *done], key=lambda one: one.step)

    def _start(self, task: _Task) -> None:
        self._attempt = task.pending.attempt
        self._thread = Thread(target=self._write, args=(task,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, task: _Task) -> None:
        try:
            self._copy_late(task)
            pending = self._written(task)
        except Exception as error:  # whatever it is: it must be told, and training goes on
            with self._lock:
                self._failed.append(task.pending.outcome(error=in_a_line(error)))
            return
        finally:
            if isinstance(task.tensors, Turns):
                task.tensors.leave()
        if self._committing is not None:
            self._committing.add(pending)

    def _copy_late(self, task: _Task) -> None:
        """Make the copy that training has not waited for."""
        if task.sources is None:
            return
        try:
            fill(task.tensors, task.sources)
        finally:
            self._copied.set()

    def _written(self, task: _Task) -> Pending:
        pending, attempt, base, like = task.pending, task.pending.attempt, None, None
        if task.base is not None:
            # A change is written once what it follows on is committed, so that it can name it.
            attempt = replace(attempt, parent=self._await_commit(task.base.attempt))
            base = task.base.copy
        elif task.like is not None:
            like = self._store.committed(task.like, self._branch)
        part = self._store.write_part(attempt, self._rank, task.tensors, task.encoding, base, like)
        return replace(
            pending,
            attempt=attempt,
            raw_bytes=part.bytes_raw,
            stored_bytes=part.bytes_stored,
        )

    def _await_commit(self, attempt: str) -> str:
        end_s = time.monotonic() + _PARENT_WITHIN_S
        while (commit := self._store.committed(attempt, self._branch)) is None:
            if time.monotonic() > end_s:
                raise CheckpointError(
                    "the save before it is not committed, and changes follow one another; they "
                    "begin again with the next whole checkpoint"
                )
            time.sleep(_LOOK_S)
        return commit.id
