"""One measurement of one peer in a process of its own: `data_worker.py PEER FOLDER OUT OPTIONS`."""

from __future__ import annotations

import json
import resource
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_peers import BATCH, ROW, Batches, Peer, peers

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
    """Samples a second over at least `seconds` of epochs, and the time to the first batch, imports
    not counted; the memory that this added."""
    for _ in zip(range(2), peer.read(folder, told["shuffled"], told["workers"]), strict=False):
        pass  # imports, caches of pages
    before = _peak_bytes()
    begun = time.perf_counter()
    seen, first_s = 0, 0.0
    while (spent := time.perf_counter() - begun) < told["seconds"]:
        left = told["seconds"] - spent
        seen_now, first_now = _drain(peer.read(folder, told["shuffled"], told["workers"]), left)
        seen, first_s = seen + seen_now, first_s or first_now
    rate = seen / (time.perf_counter() - begun)
    return {"samples_s": rate, "first_s": first_s, "bytes": _peak_bytes() - before}


def _drain(batches: Batches, seconds: float) -> tuple[int, float]:
    begun, seen, first_s = time.perf_counter(), 0, 0.0
    for batch in batches:
        seen += len(batch)
        now = time.perf_counter() - begun
        first_s = first_s or now
        if now > seconds:
            break
    return seen, first_s


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


def main() -> None:
    """Prepare or measure, and write what was found as JSON."""
    name, folder, out, told = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    options = json.loads(told)
    torch.set_num_threads(1)
    peer = peers()[name]
    found: dict[str, Any] = {"batch": BATCH}
    if options["do"] == "prepare":
        folder.mkdir(parents=True, exist_ok=True)
        samples = samples_of(options["course"], options["count"], options["images"])
        peer.prepare(folder, samples)
    elif options["do"] == "against":
        found |= against(peer, peers()[options["other"]], folder, options)
    elif options["do"] == "resume":
        found |= resuming(peer, folder, options)
    else:
        found |= throughput(peer, folder, options)
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
