"""What is done for a store beside training: each new commit is read again, and old ones go."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Thread

from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.committing import in_a_line
from meshwright.checkpoint.files import Files
from meshwright.checkpoint.rehearsal import rehearse, yield_to_others
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import Store


class Upkeep:
    """Verifies the newest commit it is told of, repairing it from `replica`; removes what `policy`
    does not keep of `branch`, or of all, and the bytes that nobody needs; then does what is to be
    done `also`. What goes wrong with one stops no other. In a thread of its own, since reading
    takes as long as writing."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        replica: Files | None = None,
        also: Callable[[], object] = lambda: None,
        branch: str | None = None,
    ) -> None:
        self._store, self._policy, self._branch = store, policy, branch
        self._replica, self._also = replica, also
        self._next: Commit | None = None
        self._busy = False
        self.verified: Commit | None = None  # the newest that was read whole
        self._troubles: list[tuple[int, str]] = []
        self._changed = Condition()
        self._thread: Thread | None = None

    def note(self, commit: Commit) -> None:
        """There is a new commit. One that waits already is passed over: the newest counts."""
        with self._changed:
            self._next, self._busy = commit, True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether there is something left to do."""
        return self._busy

    def take_troubles(self) -> list[tuple[int, str]]:
        """Steps, and what is wrong with them, since this was last asked."""
        with self._changed:
            found, self._troubles = self._troubles, []
        return found

    def _run(self) -> None:
        yield_to_others()
        while True:
            with self._changed:
                while self._next is None:
                    self._changed.wait()
                commit, self._next = self._next, None
            self._do(commit)
            with self._changed:
                self._busy = self._next is not None

    def _verify(self, commit: Commit) -> None:
        rehearse(self._store, commit, self._replica, at_once=1)
        self.verified = commit

    def _do(self, commit: Commit) -> None:
        doings: tuple[Callable[[], object], ...] = (
            lambda: self._verify(commit),
            lambda: self._store.retain(self._policy, self._branch),
            self._store.gc,
            self._also,
        )
        troubles: dict[str, None] = {}  # in order; the same damage may stop two of them
        for do in doings:
            try:
                do()
            except Exception as error:  # whatever it is: it must be told, and training goes on
                troubles[in_a_line(error)] = None
        with self._changed:
            self._troubles += [(commit.step, said) for said in troubles]
