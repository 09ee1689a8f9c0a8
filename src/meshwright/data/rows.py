"""The rows that a run reads: its sources, cut or packed, in the one order of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.base.errors import DataError
from meshwright.data.mixture import Mixture
from meshwright.data.opening import Reading, open_tokens
from meshwright.data.order import MixedRows, Order, Rows
from meshwright.data.packing import PackedRows, check_ends
from meshwright.data.store import TokenStore
from meshwright.data.tolerance import BadSamples
from meshwright.data.tolerant_rows import TolerantRows
from meshwright.data.windows import Windows

MANIFEST = "manifest.json"


class HowToRead(Protocol):
    """What a job says of its data: see `plan.data_section.DataSection`."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row less one."""

    @property
    def inside_documents(self) -> bool:
        """Whether attention stays inside each document."""

    @property
    def best_fit(self) -> bool:
        """Whether documents are packed whole."""

    def mixture(self, seed: int) -> Mixture:
        """Shares of the sources."""


@dataclass(frozen=True)
class Checks:
    """Rows with ids of `vocab` or above, or that are damaged, are bad, which is told to `bad`."""

    vocab: int
    bad: BadSamples = field(default_factory=BadSamples)


def open_rows(
    prefixes: Sequence[Path],
    how: HowToRead,
    seed: int,
    end_of_text: int | None = None,
    reading: Reading | None = None,
    checks: Checks | None = None,
) -> MixedRows:
    """The rows of the token stores at `prefixes`. Where attention stays inside documents, these
    must end with `end_of_text`, if that is known. Raises DataError."""
    stores = [open_tokens(prefix, reading) for prefix in prefixes]
    if how.inside_documents and end_of_text is not None:
        for store in stores:
            if isinstance(store.tokens, np.ndarray):  # the others are builds of our own
                check_ends(store, end_of_text)
    sources = [_cut(store, how) for store in stores]
    if checks is not None:
        sources = [TolerantRows(rows, checks.bad, checks.vocab) for rows in sources]
    order = Order(tuple(len(rows) for rows in sources), how.mixture(seed), seed)
    identity = (how.best_fit, *(identity_beside(prefix) for prefix in prefixes))
    return MixedRows(sources, order, tuple(map(str, identity)))


def _cut(store: TokenStore, how: HowToRead) -> Rows:
    return PackedRows(store, how.seq_len) if how.best_fit else Windows(store, how.seq_len)


def identity_beside(prefix: Path) -> str:
    """The hash of the manifest beside a store, which tells what is in it; empty without one."""
    path = prefix.parent / MANIFEST
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def check_goes_on(rows: MixedRows, meta: Mapping[str, Any], sample: int) -> None:
    """Refuse to go on at `sample` from a commit with `meta` that was taken on other data. Commits
    of weights alone, and of earlier versions, do not tell. Raises DataError."""
    if "data" in meta and (found := rows.position_of(meta["data"])) != sample:
        raise DataError(
            f"data state at sample {found}: the run would go on at {sample}; name the same "
            "data.global_batch"
        )
