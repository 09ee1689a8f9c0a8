"""Sample shards: images, audio, frames, proteins as bytes with named fields, by number.

`PREFIX.bin` holds samples back to back. A sample: u32 bytes of its header, the header as JSON
`{"name", "licence", "fields": [[name, bytes], ...]}`, then the fields one after another.
`PREFIX.idx`: magic, u64 version, u64 samples n, u64[n + 1] offsets, u32[n] CRC-32, little-endian.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DamagedError, DataError
from meshwright.data.store import store_paths

_MAGIC = b"MWSAMPL\x00"
_HEADER = struct.Struct("<8sQQ")
_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """Bytes by field name, and where they are from."""

    name: str
    licence: str
    fields: Mapping[str, bytes]


class Bytes(Protocol):
    """Bytes by place: a memory map, or a file far away."""

    def __getitem__(self, place: slice, /) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True)
class SampleStore:
    """An opened shard. `offsets` int64 [n + 1] into `data`, `sums` uint32 [n]."""

    prefix: Path
    data: Bytes
    offsets: npt.NDArray[np.int64]
    sums: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return self.sums.size

    def read(self, index: int) -> Sample:
        """Sample `index`. Raises IndexError, and DataError if its bytes are not what they were."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        content = bytes(self.data[int(self.offsets[index]) : int(self.offsets[index + 1])])
        if zlib.crc32(content) != self.sums[index]:
            raise DamagedError(
                f"sample {index} of {self.prefix}.bin: damaged (its checksum differs); "
                "build it again, or allow bad samples to be skipped"
            )
        return unpack(content)


def open_samples(prefix: Path) -> SampleStore:
    """Open `prefix`.bin and .idx. Raises DataError if they are absent, torn or do not match."""
    bin_path, idx_path = store_paths(prefix)
    try:
        index, size = idx_path.read_bytes(), bin_path.stat().st_size
    except OSError as error:
        raise DataError(f"sample store {prefix}: {error.filename}: {error.strerror}") from error
    offsets, sums = parse_index(prefix, index)
    if not sums.size:
        raise DataError(f"sample store {prefix}: it holds no samples; build it of other sources")
    if size != offsets[-1]:
        told = f".bin has {size} bytes, .idx tells {offsets[-1]}"
        raise DataError(f"sample store {prefix}: {told}; it is torn: build it again")
    return SampleStore(prefix, np.memmap(bin_path, np.uint8, "r").view(np.ndarray), offsets, sums)


def parse_index(prefix: Path, index: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """(offsets [n + 1], CRC-32 [n]) of an .idx. Raises DataError."""
    torn = DataError(f"sample store {prefix}: .idx is torn or not one of samples; build it again")
    if len(index) < _HEADER.size:
        raise torn
    magic, version, count = _HEADER.unpack_from(index)
    if magic != _MAGIC or version != _VERSION or len(index) != _HEADER.size + 12 * count + 8:
        raise torn
    offsets = np.frombuffer(index, "<i8", count + 1, _HEADER.size)
    if offsets[0] or (np.diff(offsets) < 0).any():
        raise torn
    return offsets, np.frombuffer(index, "<u4", count, _HEADER.size + 8 * (count + 1))


def pack(sample: Sample) -> bytes:
    """A sample as bytes."""
    fields = [[name, len(data)] for name, data in sample.fields.items()]
    about = {"name": sample.name, "licence": sample.licence, "fields": fields}
    header = json.dumps(about, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(header)), header, *sample.fields.values()])


def unpack(content: bytes) -> Sample:
    """What `pack` has packed."""
    (size,) = struct.unpack_from("<I", content)
    about = json.loads(content[4 : 4 + size])
    at, fields = 4 + size, {}
    for name, length in about["fields"]:
        fields[name] = content[at : at + length]
        at += length
    return Sample(about["name"], about["licence"], fields)


class SampleWriter:
    """Appends samples to a store that does not exist yet; see `write_samples`."""

    def __init__(self, stream: BufferedWriter) -> None:
        self._stream = stream
        self._offsets, self._sums = [0], list[int]()

    def add(self, content: bytes) -> None:
        """Append what `pack` returned."""
        self._stream.write(content)
        self._offsets.append(self._offsets[-1] + len(content))
        self._sums.append(zlib.crc32(content))

    @property
    def count(self) -> int:
        """Samples so far."""
        return len(self._sums)

    @property
    def n_bytes(self) -> int:
        """Bytes so far."""
        return self._offsets[-1]

    def index(self) -> bytes:
        """What the .idx holds."""
        offsets = np.array(self._offsets, "<i8").tobytes()
        sums = np.array(self._sums, "<u4").tobytes()
        return _HEADER.pack(_MAGIC, _VERSION, self.count) + offsets + sums


@contextmanager
def write_samples(prefix: Path) -> Iterator[SampleWriter]:
    """A writer whose store appears at `prefix` when the block ends without an exception; as for
    token stores, it exists when its .idx does."""
    bin_path, idx_path = store_paths(prefix)
    part = Path(f"{bin_path}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            writer = SampleWriter(stream)
            yield writer
            stream.flush()
            os.fsync(stream.fileno())
        idx_path.unlink(missing_ok=True)
        part.replace(bin_path)
        part.write_bytes(writer.index())
        part.replace(idx_path)
    finally:
        part.unlink(missing_ok=True)
