"""Parts into the final stores, copies left out, some of the documents held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DataError
from meshwright.data.ingest.dedup import exact_copies, near_copies
from meshwright.data.ingest.part import Part
from meshwright.data.ingest.plan import BuildOptions, Encoder
from meshwright.data.samples import open_samples, write_samples
from meshwright.data.store import open_store, write_store

Bools = npt.NDArray[np.bool_]

_COPY_TOKENS = 1 << 24


@dataclass
class Counts:
    """Of what was merged: documents, tokens and bytes by store, documents by licence, and those
    left out by reason."""

    stores: dict[str, dict[str, int]] = field(default_factory=dict)
    licences: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)


def merge(parts: Sequence[Part], folder: Path, options: BuildOptions, encoder: Encoder) -> Counts:
    """Write the stores `train` and, if asked for, `held_out` into `folder`.

    Raises DataError where nothing is left for one of them.
    """
    counts = Counts()
    for part in parts:
        counts.removed.update(part.removed)
    keep = _kept(parts, options, counts)
    aside = [_held_out(part, options.held_out) for part in parts]
    write = _merge_tokens if options.kind == "tokens" else _merge_samples
    for name in ("train", "held_out") if options.held_out else ("train",):
        chosen = [k & (a == (name == "held_out")) for k, a in zip(keep, aside, strict=True)]
        if not any(some.any() for some in chosen):
            left_out = ", ".join(f"{n} by {why}" for why, n in counts.removed.items()) or "none"
            fix = f"no document is left for {name} (left out: {left_out}); relax the rules"
            raise DataError(f"sources: {fix} or name more data")
        counts.stores[name] = write(parts, chosen, folder / name, encoder)
    for part, some in zip(parts, keep, strict=True):
        for number, many in Counter(part.licence_of[some].tolist()).items():
            counts.licences[part.licences[number] or "unknown"] += many
    return counts


def _kept(parts: Sequence[Part], options: BuildOptions, counts: Counts) -> list[Bools]:
    """Which documents of each part are not copies of an earlier one."""
    edges = np.cumsum([0, *(part.documents for part in parts)])
    keep = np.ones(edges[-1], dtype=bool)
    if options.dedup != "none" and keep.size:
        keep &= ~exact_copies(np.concatenate([part.keys for part in parts]))
        counts.removed["exact copy"] = int((~keep).sum())
    if options.dedup == "minhash" and keep.size:
        whole = [part.signatures for part in parts if part.documents]
        near = near_copies(np.concatenate(whole)) & keep
        counts.removed["near copy"] = int(near.sum())
        keep &= ~near
    return [keep[a:b] for a, b in pairwise(edges)]


def _held_out(part: Part, share: float) -> Bools:
    """By the content alone, so that a text is on the same side in every build."""
    first = np.frombuffer(part.keys.tobytes(), "<u8").reshape(-1, 2)[:, 0]
    return np.asarray(first < np.uint64(int(share * 2**63)) * np.uint64(2))


def _runs(chosen: Bools) -> Iterator[tuple[int, int]]:
    """[first, stop) of consecutive documents."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _merge_tokens(
    parts: Sequence[Part], chosen: Sequence[Bools], prefix: Path, encoder: Encoder
) -> dict[str, int]:
    with write_store(prefix, *encoder.about) as writer:
        for part, some in zip(parts, chosen, strict=True):
            if not some.any():
                continue
            store = open_store(part.prefix)
            for first, stop in _runs(some):
                edges = store.starts[first : stop + 1]
                for low, high in _slices(edges):
                    tokens = store.tokens[edges[low] : edges[high]]
                    writer.extend(tokens, np.diff(edges[low : high + 1]))
        documents = sum(int(some.sum()) for some in chosen)
        return {"documents": documents, "tokens": writer.n_tokens}


def _slices(edges: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Documents in groups of about `_COPY_TOKENS`."""
    low = 0
    while low < edges.size - 1:
        high = int(np.searchsorted(edges, edges[low] + _COPY_TOKENS, side="right")) - 1
        high = max(low + 1, high)
        yield low, high
        low = high


def _merge_samples(
    parts: Sequence[Part], chosen: Sequence[Bools], prefix: Path, _encoder: Encoder
) -> dict[str, int]:
    with write_samples(prefix) as writer:
        for part, some in zip(parts, chosen, strict=True):
            if not some.any():
                continue
            store = open_samples(part.prefix)
            for index in np.flatnonzero(some).tolist():
                writer.add(bytes(store.data[store.offsets[index] : store.offsets[index + 1]]))
        return {"documents": writer.count, "bytes": writer.n_bytes}


def summary(counts: Counts) -> dict[str, Any]:
    """As the manifest holds it."""
    return {
        **counts.stores,
        "licences": dict(sorted(counts.licences.items())),
        "removed": {why: many for why, many in sorted(counts.removed.items()) if many},
    }
