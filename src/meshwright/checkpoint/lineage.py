"""Which samples made a commit, and in what two commits differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.record import Stored, renamed


@dataclass(frozen=True)
class Stretch:
    """Samples [first, stop) of the run's order of data, which the steps after `after_step` up to
    `step` saw. `data` is the fingerprint of that order. `sources`: of each source, the samples
    [first, stop) in its own order, if the commits say how many they had drawn."""

    after_step: int
    step: int
    first: int
    stop: int
    data: str
    sources: Mapping[str, tuple[int, int]]


def lineage(line: Sequence[Reader]) -> list[Stretch]:
    """What the commits of a line (oldest first) saw, one after another.

    Their meta says so: "data_position" (samples seen), "data" (state of the order of data, whose
    "data" is its fingerprint) and "drawn" ({source: samples drawn from it}). Commits that lack it
    are passed over.
    """
    found: list[Stretch] = []
    at, position, drawn = 0, 0, dict[str, int]()
    for reader in line:
        meta = reader.meta
        if "data_position" not in meta:
            continue
        now = {source: int(many) for source, many in meta.get("drawn", {}).items()}
        sources = {name: (drawn.get(name, 0), many) for name, many in now.items()}
        stop = int(meta["data_position"])
        made = Stretch(at, reader.step, position, stop, _fingerprint(meta), sources)
        if found and found[-1].data == made.data:
            made = _joined(found.pop(), made)
        found.append(made)
        at, position, drawn = reader.step, stop, now
    return found


def _joined(a: Stretch, b: Stretch) -> Stretch:
    sources = {
        name: (a.sources[name][0] if name in a.sources else first, stop)
        for name, (first, stop) in b.sources.items()
    }
    return Stretch(a.after_step, b.step, a.first, b.stop, a.data, sources)


def _fingerprint(meta: Mapping[str, Any]) -> str:
    state = meta.get("data")
    return str(state.get("data", "")) if isinstance(state, Mapping) else ""


def chain(reader: Reader) -> Iterator[Reader]:
    """A commit and those that it is relative to, down to the full one. Raises CheckpointError."""
    while True:
        yield reader
        if not reader.commit.depth:
            return
        reader = reader.parent


def refuse_bad(reader: Reader, bad: Collection[str]) -> None:
    """Raises CheckpointError if a commit, or one that it is relative to, is of those that are bad:
    what goes on from it by changes would be as well."""
    for one in chain(reader) if bad else ():
        if one.commit.id in bad:
            raise CheckpointError(
                f"{one.commit}: was found bad, so no change can follow on it; write a full commit"
            )


@dataclass(frozen=True)
class TensorDiff:
    """How a tensor differs between two commits. `kind`: "changed", "added", "removed" or "other
    shape". `changed` elements have other bits, of `size`; `largest` is the largest change of one,
    `relative` the norm of the change over the norm of what was before."""

    name: str
    kind: str
    changed: int = 0
    size: int = 0
    largest: float = 0.0
    relative: float = 0.0


def diff(old: Reader, new: Reader) -> list[TensorDiff]:
    """The tensors that differ, sorted by name. What has the same hash in both is not read."""
    found = []
    names = {*old.names, *new.names}
    for name in sorted(names):
        if name not in old.names or name not in new.names:
            found.append(TensorDiff(name, "added" if name in new.names else "removed"))
        elif (old.shape(name), old.dtype(name)) != (new.shape(name), new.dtype(name)):
            found.append(TensorDiff(name, "other shape"))
        elif not _same_hashes(old.stored(name), new.stored(name)):
            one = _compared(old, new, name)
            if one.changed:
                found.append(one)
    return found


def _same_hashes(old: Sequence[Stored], new: Sequence[Stored]) -> bool:
    a, b = (
        {(row.of, row.piece.key): [(c.count, c.raw) for c in row.chunks] for row in rows}
        for rows in (old, new)
    )
    return a == b


def _compared(old: Reader, new: Reader, name: str) -> TensorDiff:
    changed, size, largest, moved, before = 0, 0, 0.0, 0.0, 0.0
    for row in new.stored(name):
        position = row.of.index(name)
        for number, cut in row.cuts():
            now = new.elements(row, number, cut)[position]
            was = old.read_piece(renamed(cut, name))
            changed += _other_bits(now, was)
            size += now.size
            a, b = now.astype(np.float64), was.astype(np.float64)
            largest = max(largest, float(np.max(np.abs(a - b), initial=0.0)))
            moved, before = moved + float(np.sum((a - b) ** 2)), before + float(np.sum(b**2))
    relative = (moved / before) ** 0.5 if before else float("inf")
    return TensorDiff(name, "changed", changed, size, largest, relative)


def _other_bits(a: Array, b: Array) -> int:
    x, y = (one.view(np.uint8).reshape(one.size, one.itemsize) for one in (a, b))
    return int(np.count_nonzero((x != y).any(axis=1)))
