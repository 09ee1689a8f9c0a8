"""Local stores whose blocks are checked when something of them is first read."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DamagedError, DataError
from meshwright.data.checksums import BLOCK_BYTES


@dataclass(frozen=True)
class CheckedArray:
    """A one-dimensional array in the file at `path`, read by slices. `sums`: CRC-32 of each block
    of `BLOCK_BYTES`, which is checked once in each process."""

    path: Path
    content: npt.NDArray[np.uint8]
    sums: npt.NDArray[np.uint32]
    dtype: np.dtype[Any]
    checked: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Items."""
        return self.content.size // self.dtype.itemsize

    def __getitem__(self, place: slice) -> npt.NDArray[Any]:
        """Raises DamagedError."""
        start, stop, _ = place.indices(self.size)
        first, last = start * self.dtype.itemsize, stop * self.dtype.itemsize
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            if block not in self.checked:
                self._check(block)
        return self.content[first:last].view(self.dtype)

    def _check(self, block: int) -> None:
        start = block * BLOCK_BYTES
        content = self.content[start : start + BLOCK_BYTES]
        if zlib.crc32(content.data) != self.sums[block]:
            where = f"{self.path}: bytes {start} to {start + content.size}"
            raise DamagedError(f"{where}: damaged (the checksum differs); build or fetch it again")
        self.checked.add(block)


def checked(path: Path, dtype: np.dtype[Any]) -> CheckedArray:
    """The file at `path` with the checksums beside it. Raises DataError where it has none."""
    try:
        sums = np.frombuffer(path.with_suffix(".crc").read_bytes(), "<u4")
    except OSError as error:
        fix = "build it with `meshwright data build`, or leave data.verify out"
        raise DataError(f"{path}: has no checksums beside it; {fix}") from error
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    if sums.size != -(-content.size // BLOCK_BYTES):
        raise DataError(f"{path}: its checksums are of another file; build or fetch it again")
    return CheckedArray(path, content, sums, dtype)
