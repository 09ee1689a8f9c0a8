"""Kills a save with SIGKILL at file event 0, 1, 2, ... of `save` below, each in a new folder.

Usage: kill_at_every_event.py FOLDER. Makes FOLDER/00000, FOLDER/00001, ..., each with commits of
steps 1 and 2, saves step 3 there and dies at the event of that number: before a file is opened,
linked, removed or renamed, before a folder is made or removed, and when half of a file is written.
Ends with the first save that runs through, and writes to standard output how many died. A process
of its own, since it forks and since audit hooks cannot be removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from states import TWO, adam_state, relative, write

from meshwright.checkpoint.files import Body
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.scandir"}
MOST_EVENTS = 600
LEAST = Policy(newest=1, spaced=False)


def save(store: Store, step: int) -> None:
    """What a run does: write, commit, verify, remove what is old. Even steps are relative."""
    parent, kept = store.head(), step % 2
    if kept or parent is None:
        attempt = write(store, step, adam_state(step), TWO, Encoding(chunk_bytes=64), parent=parent)
    else:
        encoding, base = relative(step, 64), adam_state(parent.step)
        attempt = write(store, step, adam_state(step), TWO, encoding, base, parent=parent)
    store.verify(store.commit(attempt, {"step": step}))
    store.retain(LEAST)
    store.gc(0)


@dataclass(frozen=True)
class HalfWay(LocalFiles):
    """Files that tell when half of one is written."""

    told: Callable[[], None] = lambda: None

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `LocalFiles.create`."""
        return super().create(name, self._halves(b"".join(parts)))

    def _halves(self, content: bytes) -> Iterator[Body]:
        yield content[: len(content) // 2]
        self.told()
        yield content[len(content) // 2 :]


def die_at(fatal: int) -> Callable[[], None]:
    """Die at that event; what is to be called for an event that Python does not tell of."""
    seen = 0

    def event() -> None:
        nonlocal seen
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def heard(name: str, _arguments: tuple[object, ...]) -> None:
        if name in FILE_EVENTS:
            event()

    sys.addaudithook(heard)
    return event


def main(folder: Path) -> None:
    """Die at each event in turn."""
    template = folder / "template"
    for step in (1, 2):
        save(Store.open(template, create=True), step)
    for fatal in range(MOST_EVENTS):
        root = folder / f"{fatal:05d}"
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            files = HalfWay(root, durable=False, told=die_at(fatal))
            save(Store.over(files, str(root)), 3)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            shutil.rmtree(template)
            sys.stdout.write(f"{fatal}\n")
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit(f"still dying after {MOST_EVENTS} events")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
