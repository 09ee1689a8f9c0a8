"""One process of checkpoint.py, which trains and saves by one peer, or restores."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import xxhash
from checkpoint_model import Training
from checkpoint_peers import PEERS, Ours, Peer

_SAMPLE_S = 0.02
_RESTORES = 3


class Memory:
    """The peak of what this process and those it started hold, mapped files left out."""

    def __init__(self) -> None:
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, held_bytes())

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.peak = max(self.peak, held_bytes())


def held_bytes() -> int:
    """Anonymous memory of this process and its children, and what it shares with them once."""
    own = _status(os.getpid())
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    below = sum(_status(int(pid)).get("RssAnon", 0) for pid in children)
    return own.get("RssAnon", 0) + own.get("RssShmem", 0) + below


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return {}
    rss = (line.split() for line in lines if line.startswith("Rss"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in rss}


def digest(training: Training) -> str:
    """Of all bits of the state."""
    hashed = xxhash.xxh3_128()
    for tensor in training.state.values():
        hashed.update(tensor.numpy().ravel().data)
    return hashed.hexdigest()


def files(folder: Path) -> dict[tuple[str, int], int]:
    """Size of each file, by name and inode."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            told = path.stat()
            found[str(path), told.st_ino] = told.st_size
    return found


@contextmanager
def timed(into: list[float], clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Append the seconds that the body took."""
    start = clock()
    yield
    into.append(clock() - start)


def train(peer: Peer, training: Training) -> Iterator[dict[str, Any]]:
    """At each call a save, and the step that goes on while it is written."""
    while True:
        before, saved = set(files(peer.folder)), digest(training)
        ended: list[float] = []
        with Memory() as memory:
            start = time.perf_counter()
            peer.save(training.updates)
            called_s = time.perf_counter() - start
            waiting = threading.Thread(target=_until_saved, args=(peer, ended))
            waiting.start()
            waited_s = training.step(peer.fence)
            waiting.join()
        written = sum(size for key, size in files(peer.folder).items() if key not in before)
        peer.prune()
        yield {
            "at_once_s" if peer.at_once else "blocked_s": called_s + waited_s,
            "durable_s": ended[0] - start,
            "bytes": written,
            "held_bytes": memory.peak,
            "digest": saved,
        }


def _until_saved(peer: Peer, ended: list[float]) -> None:
    peer.wait()
    ended.append(time.perf_counter())


def forget(folder: Path) -> None:
    """Take the files out of the page cache, as far as the system does."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Anything(str):
    """Is equal to all."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def restored(peer: Peer, training: Training, folder: Path) -> dict[str, Any]:
    """A restore from the disk, and some from the page cache, into memory that is there. Ours are
    done in turn with such as check no hash."""
    spent: dict[str, list[float]] = {"cold": [], "warm": [], "checked_cpu": [], "unchecked_cpu": []}
    forget(folder)
    before = held_bytes()
    with Memory() as memory:
        with timed(spent["cold"]):
            peer.load()
        found = digest(training)
        for _ in range(_RESTORES):
            with timed(spent["warm"]), timed(spent["checked_cpu"], time.process_time):
                peer.load()
            if isinstance(peer, Ours):
                unchecked = mock.patch("meshwright.checkpoint.stored.xxh3", lambda _: Anything())
                with unchecked, timed(spent["unchecked_cpu"], time.process_time):
                    peer.load()
    told = {f"{kind}_s": statistics.median(times) for kind, times in spent.items() if times}
    return {**told, "restore_bytes": max(0, memory.peak - before), "digest": found}


def main() -> None:
    """NAME FOLDER OPTIONS; a line of JSON to stdout for each line of stdin, until that ends."""
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    training = Training.fresh(options["width"], options["layers"], Path(options["text"]))
    start = folder.parent / "start.pt"
    if options["do"] == "prepare":
        for _ in range(options["warm_up"]):
            training.step()
        training.keep(start)
        print(json.dumps({"bytes": training.bytes}), flush=True)
        return
    if options["do"] == "restore":
        for tensor in training.state.values():
            tensor.detach().numpy().fill(np.nan)
        told = restored(PEERS[name](folder, training.state), training, folder)
        print(json.dumps(told), flush=True)
        os._exit(0)  # threads and processes of peers must not hold it
    training.resume(start)
    with Memory() as memory:
        training.step()
    before = memory.peak
    peer = PEERS[name](folder, training.state)
    turns = train(peer, training)
    for _ in sys.stdin:
        turn = next(turns)
        turn["extra_bytes"] = max(0, turn.pop("held_bytes") - before)
        print(json.dumps(turn), flush=True)
    peer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
