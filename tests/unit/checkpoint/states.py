"""States to save, layouts to save them under, and ways to look at a store from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.codec import Update
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece, Shape
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

Array = NDArray[Any]
State = Mapping[str, Array]
_TRIES = count()
LIMIT_S = 60.0  # of anything a test waits for: a guard against hanging, not a measure


@dataclass(frozen=True)
class Split:
    """`tp` slices along `dim`, each flat over `shards` ranks; neither has to divide."""

    dim: int = 0
    tp: int = 1
    shards: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.shards


ONE, TWO = Split(), Split(shards=2)


def pieces_of(name: str, shape: Shape, split: Split) -> Iterator[tuple[int, Piece]]:
    """Rank and piece, for every rank of the split; some pieces may be empty."""
    if not shape:
        yield 0, Piece.whole(name, ())
        return
    dim = min(split.dim, len(shape) - 1)
    edges = [round(i * shape[dim] / split.tp) for i in range(split.tp + 1)]
    for tp in range(split.tp):
        offset = tuple(edges[tp] if d == dim else 0 for d in range(len(shape)))
        box = tuple(edges[tp + 1] - edges[tp] if d == dim else n for d, n in enumerate(shape))
        chunk = -(-prod(box) // split.shards)
        for shard in range(split.shards):
            start = min(shard * chunk, prod(box))
            stop = min(start + chunk, prod(box))
            yield tp * split.shards + shard, Piece(name, shape, offset, box, start, stop)


def part_of(full: Array, piece: Piece) -> Array:
    """The elements of a piece by plain numpy: cut the box out, flatten, cut the range out."""
    box = tuple(slice(o, o + n) for o, n in zip(piece.box_offset, piece.box_shape, strict=True))
    return full[box].ravel()[piece.start : piece.stop]


def shares(state: State, split: Split) -> list[dict[Piece, Array]]:
    """What each rank holds."""
    held: list[dict[Piece, Array]] = [{} for _ in range(split.ranks)]
    for name, full in state.items():
        for rank, piece in pieces_of(name, full.shape, split):
            held[rank][piece] = part_of(full, piece)
    return held


def adam_state(step: int, shape: Shape = (7, 3), names: int = 1) -> dict[str, Array]:
    """Parameters and moments, and a tensor that is not AdamW's; of other bits at each step."""
    found: dict[str, Array] = {}
    for number in range(names):
        rng = np.random.default_rng([step, number])
        for prefix in ("param/", "adamw.m/", "adamw.v/"):
            found[f"{prefix}w{number}"] = rng.standard_normal(shape).astype(np.float32)
    return found | {"router/load": np.full(5, step, np.float32)}


def write(
    store: Store,
    step: int,
    state: State,
    split: Split = ONE,
    encoding: Encoding | None = None,
    base: State | None = None,
    ranks: tuple[int, ...] | None = None,
    parent: Commit | None = None,
) -> Attempt:
    """Write the parts of some ranks, of all by default."""
    attempt = Attempt(
        step, f"t{os.getpid()}-{next(_TRIES)}", split.ranks, parent.id if parent else None
    )
    held = shares(state, split)
    bases = shares(base, split) if base is not None else [None] * split.ranks
    for rank in ranks if ranks is not None else range(split.ranks):
        store.write_part(attempt, rank, held[rank], encoding, bases[rank])
    return attempt


def save(
    store: Store,
    step: int,
    state: State | None = None,
    split: Split = ONE,
    encoding: Encoding | None = None,
    base: State | None = None,
    branch: str = "main",
    meta: Mapping[str, Any] | None = None,
) -> Commit:
    """Commit a state that goes on from the head of the branch."""
    state = adam_state(step) if state is None else state
    parent = store.head(branch)
    attempt = write(store, step, state, split, encoding, base, parent=parent)
    return store.commit(attempt, {"step": step} if meta is None else meta, branch)


def update_of(step: int) -> Update:
    """The update of AdamW that the tests tell of."""
    return Update(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)


def relative(step: int, chunk_bytes: int = 32) -> Encoding:
    """An encoding relative to the parent."""
    return Encoding("raw", chunk_bytes, lambda _: update_of(step), durable=False)


def fresh(folder: Path | str) -> Store:
    """A store, made if there is none."""
    return Store.open(folder, create=True)


def read_all(reader: Reader) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: reader.read(name).tobytes() for name in reader.names}


def as_bytes(state: State) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: state[name].tobytes() for name in sorted(state)}


def steps(store: Store, branch: str = "main") -> list[int]:
    """The steps of a branch's commits."""
    return [commit.step for commit in store.commits(branch)]


def files_in(folder: Path, of: str = "") -> list[Path]:
    """All files of a part of a store on disk."""
    return sorted(path for path in (folder / of).rglob("*") if path.is_file())


def pack_path(
    home: Path, store: Store, commit: Commit, name: str = "param/w0", chunk: int = 0
) -> Path:
    pack = store.reader(commit).stored(name)[0].chunks[chunk].pack
    return home / "packs" / pack[:2] / pack


def flip(home: Path, store: Store, commit: Commit, name: str = "param/w0", chunk: int = 0) -> str:
    """Damage one chunk; what the error must say of it."""
    where = store.reader(commit).stored(name)[0].chunks[chunk]
    path = pack_path(home, store, commit, name, chunk)
    content = bytearray(path.read_bytes())
    content[where.at + where.bytes // 2] ^= 16
    path.write_bytes(content)
    return f"{name} is damaged: chunk {chunk}, bytes [{where.at}, {where.at + where.bytes})"
