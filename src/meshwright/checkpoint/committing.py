"""The one rank that commits: it waits for the parts of all, with a deadline, beside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.committer import LateError
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.store import Store

_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_ANSWER_S = 5.0  # after a deadline, for the thread that looks at it


def in_a_line(error: BaseException) -> str:
    """What a person is told of an error; of those that nobody foresaw, the kind as well."""
    said = " ".join(str(error).split())
    return said if isinstance(error, CheckpointError) else f"{type(error).__name__}: {said}"


@dataclass(frozen=True)
class Saved:
    """How a save ended: with a commit, or an error in one line. `save_s` from the call to the
    commit, after `Background.save`; bytes are this rank's, before and after encoding."""

    step: int
    commit: Commit | None
    error: str | None
    save_s: float
    raw_bytes: int
    stored_bytes: int
    is_change: bool = False


@dataclass(frozen=True, eq=False)
class Pending:
    """A save that has not been committed."""

    attempt: Attempt
    meta: Mapping[str, Any]
    begun_s: float
    raw_bytes: int = 0
    stored_bytes: int = 0

    def outcome(self, commit: Commit | None = None, error: str | None = None) -> Saved:
        """How it ended, now."""
        save_s = time.perf_counter() - self.begun_s
        step = self.attempt.step
        sizes = (self.raw_bytes, self.stored_bytes)
        return Saved(step, commit, error, save_s, *sizes, is_change=self.attempt.parent is not None)


class Committing:
    """Commits what all ranks have written to `branch`.

    A part that is not there after `deadline_s` ends that save, and so does a newer whole commit.
    `after` is called with each commit, in the same thread: to verify, and to delete old ones.
    `follows` says of the head of the branch whether this run may go on from it.
    """

    def __init__(
        self,
        store: Store,
        branch: str,
        deadline_s: float,
        after: Callable[[Commit], None] = lambda _: None,
        follows: Callable[[Commit], bool] = lambda _: True,
    ) -> None:
        self._store, self._branch, self._deadline_s = store, branch, deadline_s
        self._after, self._follows = after, follows
        self._pending: list[Pending] = []
        self._done: list[Saved] = []
        self._told: set[Pending] = set()  # those that were given up
        self._changed = Condition()
        self._thread: Thread | None = None

    def add(self, pending: Pending) -> None:
        """This rank's own part has been written."""
        with self._changed:
            self._pending.append(pending)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="commit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether something is pending that has not been given up."""
        with self._changed:
            return not all(self._is_stuck(one) for one in self._pending)

    def wait(self) -> None:
        """Until nothing is pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def take_outcomes(self) -> list[Saved]:
        """Those that have ended since this was last asked. Storage that does not answer at all ends
        none; what waits for it is given up here, and told again if it is committed after all."""
        with self._changed:
            done, self._done = self._done, []
            stuck = [one for one in self._pending if self._is_stuck(one) and one not in self._told]
            self._told.update(stuck)
        silent = f"storage has not answered within {self._deadline_s:g} s; see whether it is up"
        return [*done, *(one.outcome(error=silent) for one in stuck)]

    def _is_stuck(self, pending: Pending) -> bool:
        return time.perf_counter() - pending.begun_s > self._deadline_s + _ANSWER_S

    def _run(self) -> None:
        poll_s = _FIRST_POLL_S
        while True:
            with self._changed:
                if not self._pending:
                    self._thread = None
                    return
                pending = list(self._pending)
            ended = self._look(pending)
            with self._changed:
                self._pending = [one for one in self._pending if one not in ended]
                self._done += (
                    saved for one, saved in ended.items() if saved.commit or one not in self._told
                )
                self._told.difference_update(ended)
                self._changed.notify_all()
                poll_s = _FIRST_POLL_S if ended else min(2 * poll_s, _LONGEST_POLL_S)
                if self._pending and not ended:
                    self._changed.wait(poll_s)

    def _look(self, pending: list[Pending]) -> dict[Pending, Saved]:
        """Which of them have ended, and how."""
        ended: dict[Pending, Saved] = {}
        late: dict[Pending, str] = {}
        for one in pending:
            try:
                commit = self._store.commit(
                    one.attempt, one.meta, self._branch, follows=self._follows
                )
            except LateError as error:
                late[one] = error.told(time.perf_counter() - one.begun_s)
            except Exception as error:  # whatever it is: it must be told, and training goes on
                ended[one] = one.outcome(error=in_a_line(error))
            else:
                # Nothing older can become of use, nor would its place on the branch be right.
                ended.update({old: old.outcome(error=why) for old, why in late.items()})
                late.clear()
                ended[one] = one.outcome(commit, self._follow(commit))
        for one, why in late.items():
            if time.perf_counter() - one.begun_s > self._deadline_s:
                ended[one] = one.outcome(error=why)
        return ended

    def _follow(self, commit: Commit) -> str | None:
        """What went wrong with what follows on a commit, which stays."""
        try:
            self._after(commit)
        except Exception as error:
            return in_a_line(error)
        return None
