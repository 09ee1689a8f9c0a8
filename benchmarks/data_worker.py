"""Measurements of one peer: `data_worker.py PEER FOLDER OUT TASKS`.

The library is imported once; each task is done in a fork of its own, as if it were the only one.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_peers import ROW, Batches, Peer, peers

_SEED = 0
_VOCAB = 65_000


def samples_of(course: str, count: int, images: str) -> list[bytes]:
    """Rows of ids, or the PNGs of a zip file."""
    if course == "tokens":
        ids = np.random.default_rng(_SEED).integers(0, _VOCAB, (count, ROW), dtype=np.uint16)
        return [row.tobytes() for row in ids]
    with zipfile.ZipFile(images) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".png")]


def throughput(peer: Peer, folder: Path, told: dict[str, Any]) -> dict[str, float]:
    """Samples a second over at least `seconds` of epochs, from the first batch of each on; the time
    to the first batch, imports not counted; the memory that this added."""
    for _ in zip(range(2), peer.read(folder, told["shuffled"], 0), strict=False):
        pass  # imports, caches of pages
    before = _peak_bytes()
    epochs = [_drain(peer.read(folder, told["shuffled"], told["workers"]), told["seconds"])]
    while (left := told["seconds"] - sum(epoch[1] for epoch in epochs)) > 0:
        epochs.append(_drain(peer.read(folder, told["shuffled"], told["workers"]), left))
    seen, spent, first_s = (sum(column) for column in zip(*epochs, strict=True))
    return {
        "samples_s": seen / spent,
        "first_s": first_s / len(epochs),
        "bytes": _peak_bytes() - before,
    }


def _drain(batches: Batches, seconds: float) -> tuple[int, float, float]:
    """Samples after the first batch, the time that they took, and that of the first batch."""
    begun, seen, first_s, now = time.perf_counter(), 0, 0.0, 0.0
    for batch in batches:
        now = time.perf_counter() - begun
        if first_s:
            seen += len(batch)
        first_s = first_s or now
        if now - first_s > seconds:
            break
    return seen, now - first_s, first_s


def against(peer: Peer, other: Peer, folder: Path, told: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as `other` a peer is, shuffled: median of the ratios of pairs of turns
    in this process, so that a slow spell of the machine falls on both."""
    sides = [_for_ever(one, folder) for one in (peer, other)]
    ratios = []
    for turn in range(told["pairs"] + 1):
        took = [_time_of(side, told["batches"]) for side in (sides if turn % 2 else sides[::-1])]
        mine, theirs = took if turn % 2 else took[::-1]
        ratios.append(theirs / mine)
    return {"ratio": float(np.median(ratios[1:]))}


def _for_ever(peer: Peer, folder: Path) -> Batches:
    while True:
        yield from peer.read(folder, True, 0)


def _time_of(batches: Batches, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - begun


def resuming(peer: Peer, folder: Path, told: dict[str, Any]) -> dict[str, float]:
    """Seconds from a state to its first batch: median of five, the first not counted."""
    if peer.resume is None:
        return {}
    make = peer.resume(folder, told["at"])
    took = []
    for _ in range(6):
        begun = time.perf_counter()
        next(make())
        took.append(time.perf_counter() - begun)
    return {"resume_s": float(np.median(took[1:]))}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def do(peer: Peer, folder: Path, told: dict[str, Any]) -> dict[str, float]:
    """What a task finds."""
    folder = folder / told["course"]
    match told["do"]:
        case "prepare":
            folder.mkdir(parents=True, exist_ok=True)
            peer.prepare(folder, samples_of(told["course"], told["count"], told["images"]))
            return {}
        case "against":
            return against(peer, peers()[told["other"]], folder, told)
        case "resume":
            return resuming(peer, folder, told)
        case _:
            return throughput(peer, folder, told)


def apart(work: Callable[[], dict[str, float]], seconds: float) -> dict[str, Any]:
    """What `work` finds in a fork; as "failed", why it did not."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            told: dict[str, Any] = work()
        except BaseException as error:
            told = {"failed": f"{type(error).__name__}: {error}"[:200]}
        os.write(theirs, json.dumps(told).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        in_time = bool(select.select([pipe], [], [], seconds)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        found = pipe.read() if in_time else b""
    os.waitpid(pid, 0)
    late = f"not done after {seconds:g} s" if not in_time else "it was killed"
    return json.loads(found) if found else {"failed": late}


def main() -> None:
    """Do all tasks, and write what was found as JSON."""
    name, folder, out, tasks = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    peer = peers()[name]
    peer.load()
    found = []
    for told in json.loads(tasks):
        found.append(apart(partial(do, peer, folder, told), told["limit_s"]))
        print(f"{name}: {told}: {found[-1]}", file=sys.stderr, flush=True)
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
