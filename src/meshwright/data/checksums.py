"""CRC-32 of a file's blocks, so that any part of it can be checked without reading the rest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 18  # what is fetched at once of a file far away

Sums = npt.NDArray[np.uint32]


def block_sums(path: Path) -> Sums:
    """Of each `BLOCK_BYTES` of a file, uint32 [blocks]. Raises OSError."""
    return np.array([zlib.crc32(block) for block in _blocks(path)], dtype="<u4")


def damaged_blocks(path: Path, sums: Sums) -> list[int]:
    """Numbers of the blocks that are not what they were. Raises OSError."""
    found = block_sums(path)
    longer = range(min(found.size, sums.size), max(found.size, sums.size))
    return [*np.flatnonzero(found[: sums.size] != sums[: found.size]).tolist(), *longer]


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
