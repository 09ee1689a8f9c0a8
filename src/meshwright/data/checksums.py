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
    return np.array([zlib.crc32(block) for block in file_blocks(path)], dtype="<u4")


def file_blocks(path: Path) -> Iterator[bytes]:
    """Each `BLOCK_BYTES` of a file, the last ones fewer. Raises OSError."""
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
