"""When and how the state of a run is saved while it trains, and what is said about it.

Each rank copies what it answers for and goes on; a thread of its own writes it, and the first rank
commits once the parts of all are there (see `checkpoint.background`). No rank waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.base.errors import CheckpointError, MeshwrightError
from meshwright.base.events import Kind
from meshwright.checkpoint.background import Background
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.codec import Update
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.committing import Committing, Saved
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.upkeep import Upkeep
from meshwright.checkpoint.writing import Encoding
from meshwright.plan.job import Job
from meshwright.train.mesh import Mesh
from meshwright.train.optim import learning_rate
from meshwright.train.pace import Pace
from meshwright.train.state import decays, owned_tensors
from meshwright.train.trainer import Trainer

_LOOK_S = 0.002
_PATIENCE_S = 10.0  # for a save that is still being written when the next is due
_ANSWER_S = 10.0  # after the deadline, until storage is held to be dead
_MOST_CHANGES = 100  # that are replayed after one whole commit
_MOST_LATE = 8  # saves that wait for parts of others; more, and changes pause


class Due(IntEnum):
    """How a step is to be saved. What any rank asks for in the vote is done by all."""

    NOT = 0
    CHANGE = 1  # as its change from the step before
    WHOLE = 2

    @classmethod
    def agreed(cls, asked: int) -> Due:
        """What follows from the sum of what all have asked for."""
        return cls(min(asked, cls.WHOLE))


@dataclass(frozen=True)
class _Values:
    """A piece of the state as it is now, wherever it lives."""

    values: Tensor

    @property
    def dtype(self) -> np.dtype[Any]:
        """As numpy has it."""
        return np.dtype(np.float32)

    def copy_to(self, out: Array, start: int) -> None:
        """See `checkpoint.copies.Source`."""
        torch.from_numpy(out).copy_(self.values[start : start + len(out)])


class Saver:
    """Saves one rank's part of a run.

    `attempt` names this incarnation of the run: parts of another never mix with its own. What
    others commit after the record numbered `begun` of the branch ends its saving. `idle` is called
    while there is nothing to do but to wait; it may raise.
    """

    def __init__(
        self, job: Job, mesh: Mesh, at: StoreAt, attempt: str, begun: int | None = None
    ) -> None:
        self._job, self._mesh, self._at = job, mesh, at
        self._mark, self._begun = f"-{attempt}-", begun
        self._attempt = f"{attempt}-{mesh.layout.world}"
        self._opened: Background | None = None
        self._pace = Pace(job, job.cluster.nodes)
        self._copying: _Copying | None = None
        self._blocked_s: dict[int, float] = {}  # of whole saves that are on their way
        self._last: Commit | None = None  # made here
        self._failed: dict[int, str] = {}  # errors by step
        self._left_out: dict[int, str] = {}  # those of them that are still to be told
        self._stuck: Attempt | None = None  # what has been waited for in vain
        self._upkeep: Upkeep | None = None
        self._changes = _Changes(job.checkpoint.deltas)
        self.idle: Callable[[], object] = lambda: None

    def asks(self, step: int) -> Due:
        """What this rank asks for in the vote on `step`, counted from 1."""
        if self._changes.need_whole:
            return Due.WHOLE
        if self._mesh.rank:
            return Due.NOT
        if self._pace.is_due(step) or self._changes.too_many:
            return Due.WHOLE
        # Where storage is slower than steps, some of these go unsaved; none waits.
        busy = self._opened is not None and self._opened.is_writing
        return Due.CHANGE if self._changes.may_follow and not busy else Due.NOT

    def save(self, step: int, trainer: Trainer, meta: Mapping[str, Any], due: Due) -> None:
        """Copy the state after `step`, and have it written. What goes wrong is told by `report`,
        now or later."""
        try:
            self._save(step, trainer, meta, due)
        except MeshwrightError as error:
            self._left_out[step] = str(error)
            self._changes.left_out()

    def _save(self, step: int, trainer: Trainer, meta: Mapping[str, Any], due: Due) -> None:
        section, begun_s = self._job.checkpoint, time.perf_counter()
        background = self._ready(step)
        if background is None:
            self._changes.left_out()
            return
        if due is Due.CHANGE and not background.has_base:
            self._changes.begin_anew()  # this member took the rank over: it has no step before
            return
        update = self._updates(step, trainer) if due is Due.CHANGE else None
        encoding = Encoding("planes" if section.compress else "raw", update=update)
        attempt = Attempt(step, self._name(step), self._mesh.layout.world)
        sources = {piece: _Values(x) for piece, x in owned_tensors(trainer).items()}
        # The next step reads what is saved until it updates it; so the copy need not be waited for.
        trainer.before_change = self._fence
        background.save(attempt, sources, encoding, meta, keep_base=section.deltas, overlap=True)
        self._changes.handed_over(step, due, told_of=self._mesh.rank == 0)
        self._copying = _Copying(step, due, time.perf_counter() - begun_s)

    def _name(self, step: int) -> str:
        """Of the attempt to save `step`."""
        return f"{step:09d}-{self._attempt}"

    def _fence(self) -> None:
        """Before the state changes: until the last copy of it is made."""
        background, copying, self._copying = self._opened, self._copying, None
        if background is None or copying is None:
            return
        begun_s = time.perf_counter()
        background.fence()
        if copying.due is Due.WHOLE:
            blocked_s = copying.blocked_s + time.perf_counter() - begun_s
            self._pace.saved(blocked_s)
            if self._mesh.rank == 0:
                self._blocked_s[copying.step] = blocked_s

    def report(self, emit: Callable[..., None]) -> None:
        """Say what has been committed, and what has failed, since this was last called."""
        for step, error in self._left_out.items():
            self._failed[step] = error
            emit(Kind.CHECKPOINT_FAILED, step=step, error=error)
        self._left_out.clear()
        for saved in [] if self._opened is None else self._opened.take_outcomes():
            if self._changes.ended(saved):
                continue
            if saved.commit is not None:
                self._pace.committed(saved.save_s)
                emit(Kind.CHECKPOINT_COMMITTED, **self._words(saved))
            elif saved.error is not None:
                self._failed[saved.step] = saved.error
            if saved.error is not None:
                emit(Kind.CHECKPOINT_FAILED, step=saved.step, error=saved.error)
        for step, trouble in [] if self._upkeep is None else self._upkeep.take_troubles():
            emit(Kind.CHECKPOINT_FAILED, step=step, error=trouble)

    def finish(self, step: int, emit: Callable[..., None]) -> None:
        """Wait until all of `step`, the last, is safe. Raises CheckpointError if it is not."""
        self._fence()
        limit_s = self._job.checkpoint.deadline_s + _ANSWER_S
        if (background := self._opened) is not None:
            if not self._wait_while(lambda: background.is_busy, limit_s):
                self._left_out[step] = f"storage has not answered within {limit_s:g} s"
            elif (upkeep := self._upkeep) is not None:
                self._wait_while(lambda: upkeep.is_busy, limit_s)
            elif self._mesh.rank and self._job.resilience.survives:
                # Should the first rank be lost, whoever takes its place needs this one's state.
                self._wait_while(self._lacks(step), limit_s)
        self.report(emit)
        if (error := self._failed.get(step)) is not None:
            raise CheckpointError(f"step {step} was not saved: {error}; {self._left()}")

    def _lacks(self, step: int) -> Callable[[], bool]:
        """Whether `step` has not been committed yet; the store is asked now and then."""
        store, name = self._at.open(), self._name(step)
        pause_s, ask_s = _LOOK_S, 0.0

        def lacks() -> bool:
            nonlocal pause_s, ask_s
            if step in self._failed or step in self._left_out:
                return False
            if time.monotonic() < ask_s:
                return True
            pause_s = min(2 * pause_s, 1.0)
            ask_s = time.monotonic() + pause_s
            return store.committed(name, self._at.branch) is None

        return lacks

    def _left(self) -> str:
        try:
            before = self._at.head()
        except CheckpointError:
            return "see whether the storage is up"
        return "nothing was saved before" if before is None else f"{before} stays"

    def _ready(self, step: int) -> Background | None:
        """What writes, once it has nothing left to do; None if that takes too long."""
        background = self._background
        last = step == self._job.job.steps
        patience_s = self._job.checkpoint.deadline_s if last else _PATIENCE_S
        if not last and self._stuck == background.writing:
            patience_s = 0.0  # it has been waited for
        if self._wait_while(lambda: background.is_writing, patience_s):
            return background
        if (before := background.writing) is None:
            return background
        self._stuck = before
        self._left_out[step] = (
            f"step {before.step} is still being written; see whether the storage is up, or save "
            "less often by checkpoint.every"
        )
        return None

    @property
    def _background(self) -> Background:
        if self._opened is None:
            section, store, rank = self._job.checkpoint, self._at.open(), self._mesh.rank
            branch, committing = self._at.branch, None
            if rank == 0:
                self._upkeep = self._at.upkeep(store, Policy(newest=section.keep))
                committing = Committing(
                    store, branch, section.deadline_s, self._follow, self._is_ours
                )
            self._opened = Background(store, branch, rank, section.copy_bytes, committing)
        return self._opened

    def _is_ours(self, head: Commit) -> bool:
        """Whether the run may go on from it: what it committed last, or what was there when it
        began. Nobody else has written to the branch then, nor turned it back."""
        ours, last = self._mark in head.attempt, self._last
        if last is None or head.seq > last.seq:
            elsewhere = head.branch != self._at.branch
            return ours or self._begun is None or elsewhere or head.seq <= self._begun
        return head.id == last.id or last.id in self._at.open().marks().bad

    def _follow(self, commit: Commit) -> None:
        """A change is verified with the next whole commit, which does without it."""
        self._last = commit
        if self._upkeep is not None and not commit.depth:
            self._upkeep.note(commit)

    def _wait_while(self, busy: Callable[[], bool], limit_s: float) -> bool:
        """Whether it has ended within so many seconds."""
        end_s = time.monotonic() + limit_s
        while busy():
            if time.monotonic() > end_s:
                return False
            self.idle()
            time.sleep(_LOOK_S)
        return True

    def _updates(self, step: int, trainer: Trainer) -> Callable[[Piece], Update | None]:
        """How the optimizer has come from the state before `step` to that after it."""
        if not self._changes.is_next(step):  # what led from there to here was no single update
            return lambda _: None
        settings = self._job.optimizer
        lr = learning_rate(settings, step - 1, self._job.job.steps)
        (beta1, beta2), done = settings.betas, trainer.optimizer.updates_done
        with_decay = decays(trainer)

        def of(piece: Piece) -> Update | None:
            if piece.name not in with_decay:
                return None
            decay = settings.weight_decay if with_decay[piece.name] else 0.0
            return Update(lr, beta1, beta2, settings.eps, decay, done)

        return of

    def _words(self, saved: Saved) -> dict[str, Any]:
        assert saved.commit is not None
        verified = None if self._upkeep is None else self._upkeep.verified
        return {
            "step": saved.step,
            "path": self._at.where(saved.commit),
            "commit": saved.commit.id,
            "save_s": saved.save_s,
            "blocked_s": self._blocked_s.pop(saved.step, None),
            "bytes": saved.raw_bytes,
            "stored_bytes": saved.stored_bytes,
            "changes": self._changes.take_count(),
            "verified_step": None if verified is None else verified.step,
            "verified_age_s": None if verified is None else time.time() - verified.time_s,
        }


@dataclass(frozen=True)
class _Copying:
    """A save whose copy is being made, and how long training has waited for it so far."""

    step: int
    due: Due
    blocked_s: float


class _Changes:
    """Whether a step can be saved as a change of one before it, which is there or on its way."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._begun, self._newest = wanted, False, -1
        self._on_their_way: dict[int, Due] = {}
        self._broken = False
        self._since_whole = 0
        self._count = 0

    @property
    def need_whole(self) -> bool:
        """Whether there is nothing yet that a change could follow on."""
        return self._wanted and not self._begun

    @property
    def may_follow(self) -> bool:
        """Whether the next step can be saved as a change."""
        late = len(self._on_their_way) >= _MOST_LATE
        return self._wanted and self._begun and not self._broken and not late

    @property
    def too_many(self) -> bool:
        """Whether going back would take too many steps to replay."""
        return self._wanted and self._since_whole >= _MOST_CHANGES

    def is_next(self, step: int) -> bool:
        """Whether `step` is the one after the newest that was handed over."""
        return step == self._newest + 1

    def handed_over(self, step: int, due: Due, told_of: bool) -> None:
        """`step` is being saved. `told_of`: this rank will hear how it ended."""
        self._begun, self._newest = True, step
        self._since_whole += 1
        if told_of:
            self._on_their_way[step] = due
        if due is Due.WHOLE:
            self._broken, self._since_whole = False, 0

    def left_out(self) -> None:
        """A step cannot be saved: changes pause until the next whole save."""
        self._broken = True

    def begin_anew(self) -> None:
        """There is nothing to follow on here: a whole save is needed."""
        self._begun = False

    def ended(self, saved: Saved) -> bool:
        """Note how a save ended; whether there is nothing to say about it."""
        due = self._on_their_way.pop(saved.step, Due.CHANGE if saved.is_change else Due.WHOLE)
        if saved.commit is None:
            said, self._broken = self._broken, True
            return due is Due.CHANGE and said
        self._count += due is Due.CHANGE
        return due is Due.CHANGE

    def take_count(self) -> int:
        """Changes that were committed since the last whole commit."""
        count, self._count = self._count, 0
        return count
