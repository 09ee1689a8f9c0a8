"""Reads shards of MosaicML streaming (format "mds", version 2).

A shard: u32 samples n, u32[n + 1] offsets from the file's beginning, JSON of the configuration,
then samples. A sample: u32 sizes of the columns whose size varies, then all columns one by one
(https://docs.mosaicml.com/projects/streaming, "MDS format"; streaming/base/format/mds/reader.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.base.errors import DataError
from meshwright.data.ingest.records import Unit, damaged

_SCALARS = {
    f"{kind}{bits}": f"<{kind[0]}{bits // 8}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
    if (kind, bits) != ("float", 8)
}
_AS_BYTES = frozenset({"bytes", "jpeg", "png", "jpeg_array", "jpegarray", "pil"})


def _decode(encoding: str, data: bytes) -> Any:
    if encoding == "str":
        return data.decode("utf-8")
    if encoding == "int":
        return struct.unpack("<q", data)[0]
    if encoding == "json":
        return json.loads(data)
    return np.frombuffer(data, _SCALARS[encoding])[0].item() if encoding in _SCALARS else data


def _is_read(encoding: str) -> bool:
    known = {"str", "int", "json", *_SCALARS, *_AS_BYTES}
    return encoding in known or encoding.startswith("ndarray")


def read_mds(unit: Unit) -> Iterator[dict[str, Any]]:
    """Rows of a shard by column; images stay bytes. Raises DataError."""
    data = unit.path.read_bytes()
    columns = list(
        zip(unit.about["names"], unit.about["encodings"], unit.about["sizes"], strict=True)
    )
    for name, encoding, _ in columns:
        if not _is_read(encoding):
            raise DataError(
                f"{unit.path}: column {name!r} is of encoding {encoding!r}, which is not read; "
                "write it as str, bytes, json, an image or a number"
            )
    try:
        (count,) = struct.unpack_from("<I", data)
        offsets = np.frombuffer(data, "<u4", count + 1, 4).tolist()
        if offsets[-1] != len(data) or sorted(offsets) != offsets:
            raise ValueError("offsets do not end with the file")
        for start, stop in pairwise(offsets):
            yield _row(data[start:stop], columns)
    except (struct.error, ValueError, IndexError) as error:
        raise damaged(unit.path, error) from error


def _row(data: bytes, columns: list[tuple[str, str, int | None]]) -> dict[str, Any]:
    varying = sum(not size for _, _, size in columns)
    lengths = iter(struct.unpack_from(f"<{varying}I", data))
    at, row = 4 * varying, {}
    for name, encoding, size in columns:
        length = size or next(lengths)
        if at + length > len(data):
            raise ValueError("a sample is shorter than its columns")
        row[name] = _decode(encoding, data[at : at + length])
        at += length
    return row
