"""Token stores of a job, here or far away, by their prefix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from meshwright.data.checked import checked
from meshwright.data.far import FAR, open_far
from meshwright.data.store import TokenStore, open_store, store_paths

_CACHE_BYTES = 16 << 30


@dataclass(frozen=True)
class Reading:
    """How stores are read. `verify`: blocks of local ones are checked too, as those of far ones
    always are. `cache_bytes` are kept of far ones on this machine by all `processes` together."""

    verify: bool = False
    cache_bytes: int = _CACHE_BYTES
    processes: int = 1


def lies_far(prefix: Path) -> bool:
    """Whether the store at `prefix` is one of a build that stays far away."""
    return (prefix.parent / FAR).is_file()


def open_tokens(prefix: Path, reading: Reading | None = None) -> TokenStore:
    """The store at `prefix`. Raises DataError or ConfigError."""
    reading = reading or Reading()
    if lies_far(prefix):
        return open_far(prefix, reading.cache_bytes, reading.processes)
    store = open_store(prefix)
    if not reading.verify:
        return store
    tokens = checked(store_paths(prefix)[0], store.tokens.dtype)
    return TokenStore(
        prefix, cast("npt.NDArray[np.integer]", tokens), store.starts, store.tokenizer
    )
