"""Kills a save with SIGKILL at file event 0, 1, 2, ... of `begin` to `retain`, each in a new root.

Usage: kill_at_every_event.py FOLDER. Prepares FOLDER/00000, FOLDER/00001, ... with a commit of step
1, then saves step 2 there and dies at the event of that number. Ends with the first save that runs
through, and writes to standard output how many died. A process of its own, since it forks and
since audit hooks cannot be removed.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import begin, commit, retain, write_rank

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
MOST_EVENTS = 200


def save(root: Path, step: int) -> None:
    tmp = begin(root, step)
    for rank in (0, 1):
        piece = Piece("w", (4, 2), (2 * rank, 0), (2, 2), 0, 4)
        write_rank(tmp, rank, {piece: np.full(4, step, np.float32)})
    commit(root, step, {"step": step}, 2)
    retain(root, 1)


def die_at(fatal: int) -> None:
    seen = 0

    def count(event: str, _arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)


def main(folder: Path) -> None:
    for fatal in range(MOST_EVENTS):
        root = folder / f"{fatal:05d}"
        save(root, 1)
        child = os.fork()
        if child == 0:
            die_at(fatal)
            save(root, 2)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            sys.stdout.write(f"{fatal}\n")
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit(f"still dying after {MOST_EVENTS} events")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
