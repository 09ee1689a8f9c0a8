"""The history of the figures of chips: rows of floats at 1 s, 1 min and 1 h, packed and kept.

A row of a cluster at a grain is an array of shape (3, chips, 16): mean, low and high of what was
seen in the interval; at 1 s the three are one, of shape (1, chips, 16).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import zstandard
from sqlalchemy import Connection, delete, select

from meshwright.control.store.tables import samples

Rows = npt.NDArray[np.float32]

GRAINS_S = (1, 60, 3600)
KEPT_S = {1: 3600, 60: 3 * 86_400, 3600: 400 * 86_400}  # how long each grain is kept
CHUNK_S = {1: 10, 60: 60, 3600: 3600}  # how much one row of the table holds
_LEVEL = 1


@dataclass(frozen=True)
class Chunk:
    """Consecutive intervals of `grain_s` from `start_s` on: `rows[i]` is the i-th; NaN: unseen."""

    grain_s: int
    start_s: int
    rows: Rows


@dataclass
class _Open:
    """What has been seen of an interval that is not over."""

    start_s: int
    total: Rows
    low: Rows
    high: Rows
    seen: Rows

    @classmethod
    def of(cls, start_s: int, low: Rows, high: Rows, mean: Rows) -> _Open:
        there = ~np.isnan(mean)
        return cls(start_s, np.where(there, mean, 0), low.copy(), high.copy(), there.astype("f4"))

    def add(self, low: Rows, high: Rows, mean: Rows) -> None:
        there = ~np.isnan(mean)
        self.total += np.where(there, mean, 0)
        self.seen += there
        self.low, self.high = np.fmin(self.low, low), np.fmax(self.high, high)

    def row(self) -> Rows:
        with np.errstate(invalid="ignore"):
            return np.stack([self.total / self.seen, self.low, self.high]).astype(np.float32)


@dataclass
class Recorder:
    """Samples of one cluster, on their way to the table. Safe to use from several threads.

    The last ten seconds and the minute under way are in memory only: they are lost with the
    service, which keeps no promise about figures that it keeps about requests. The hour under way
    is made anew by `resume`.
    """

    chips: int
    figures: int
    _open: dict[int, _Open] = field(default_factory=dict)
    _rows: dict[int, dict[int, Rows]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    latest: Rows | None = None
    latest_s: float = 0.0

    def add(self, ts: float, sample: Rows) -> list[Chunk]:
        """Take a sample of shape (chips, figures) at `ts`; the chunks that are full by it."""
        with self._lock:
            second = int(ts)
            done = self._put(1, second, sample[None])
            self.latest, self.latest_s = sample, ts
            done += self._gather(60, second, sample, sample, sample)
            return done

    def resume(self, minutes: Iterable[Chunk]) -> None:
        """Take the minutes of the hour under way, oldest first, that an earlier service kept."""
        with self._lock:
            for chunk in minutes:
                mean, low, high = chunk.rows[0]
                if len(mean) == self.chips:
                    self._gather(3600, chunk.start_s, low, high, mean)

    def flush(self) -> list[Chunk]:
        """All that is not in the table yet, as chunks that are not full."""
        with self._lock:
            done = [chunk for grain_s in list(self._rows) if (chunk := self._take(grain_s))]
            if minute := self._open.get(60):
                done.append(_chunk(60, {minute.start_s: minute.row()}))
            return done

    def recent(self, grain_s: int) -> Chunk | None:
        """What of a grain is not in the table yet."""
        with self._lock:
            rows = dict(self._rows.get(grain_s, {}))
            if grain_s in self._open:
                rows[self._open[grain_s].start_s] = self._open[grain_s].row()
        return _chunk(grain_s, rows) if rows else None

    def _gather(self, grain_s: int, second: int, low: Rows, high: Rows, mean: Rows) -> list[Chunk]:
        start_s = second // grain_s * grain_s
        found, done = self._open.get(grain_s), list[Chunk]()
        if found is not None and found.start_s == start_s:
            found.add(low, high, mean)
            return done
        if found is not None:
            row = found.row()
            done.append(_chunk(grain_s, {found.start_s: row}))
            if grain_s == 60:
                done += self._gather(3600, found.start_s, row[1], row[2], row[0])
        self._open[grain_s] = _Open.of(start_s, low, high, mean)
        return done

    def _put(self, grain_s: int, start_s: int, row: Rows) -> list[Chunk]:
        done = list[Chunk]()
        rows = self._rows.setdefault(grain_s, {})
        span_s = CHUNK_S[grain_s]
        if rows and start_s // span_s != min(rows) // span_s and (chunk := self._take(grain_s)):
            done.append(chunk)
        self._rows.setdefault(grain_s, {})[start_s] = row
        return done

    def _take(self, grain_s: int) -> Chunk | None:
        rows = self._rows.pop(grain_s, {})
        return _chunk(grain_s, rows) if rows else None


def _chunk(grain_s: int, rows: dict[int, Rows]) -> Chunk:
    first, last = min(rows), max(rows)
    shape = next(iter(rows.values())).shape
    found = np.full(((last - first) // grain_s + 1, *shape), np.nan, np.float32)
    for start_s, row in rows.items():
        found[(start_s - first) // grain_s] = row
    return Chunk(grain_s, first, found)


def keep(connection: Connection, cluster: str, chunk: Chunk) -> None:
    """Write a chunk; one of the same start is replaced, which is what a restart writes anew."""
    where = (samples.c.cluster_id == cluster) & (samples.c.grain_s == chunk.grain_s)
    connection.execute(delete(samples).where(where & (samples.c.start_s == chunk.start_s)))
    words = {"cluster_id": cluster, "grain_s": chunk.grain_s, "start_s": chunk.start_s}
    connection.execute(
        samples.insert().values(**words, rows=len(chunk.rows), data=pack(chunk.rows))
    )


def pack(rows: Rows) -> bytes:
    """Bytes of a chunk: differences between rows, planes of bytes, zstd."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32).reshape(len(rows), -1)
    bits = np.concatenate([bits[:1], bits[1:] ^ bits[:-1]])
    planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, 4).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())


def unpack(data: bytes, rows: int, shape: tuple[int, ...]) -> Rows:
    """What `pack` made bytes of."""
    size = 4 * rows * int(np.prod(shape))
    plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    planes = np.frombuffer(plain, np.uint8).reshape(4, -1).T
    bits = np.ascontiguousarray(planes).view(np.uint32).reshape(rows, -1)
    return np.bitwise_xor.accumulate(bits, axis=0).view(np.float32).reshape(rows, *shape)


def history(
    connection: Connection, cluster: str, grain_s: int, first_s: float, last_s: float, figures: int
) -> list[Chunk]:
    """Chunks of a grain that may have something between two times, oldest first."""
    in_time = (samples.c.start_s >= first_s - CHUNK_S[grain_s]) & (samples.c.start_s <= last_s)
    of_it = (samples.c.cluster_id == cluster) & (samples.c.grain_s == grain_s)
    query = select(samples).where(of_it & in_time).order_by(samples.c.start_s)
    found = []
    for row in connection.execute(query).mappings():
        parts = 1 if grain_s == 1 else 3
        chips = _chips(row["data"], row["rows"] * parts * figures)
        rows = unpack(row["data"], row["rows"], (parts, chips, figures))
        found.append(Chunk(grain_s, row["start_s"], rows))
    return found


def resumed(
    connection: Connection, cluster: str, chips: int, figures: int, now_s: float
) -> Recorder:
    """A recorder that goes on in the hour of `now_s`, with the minutes that are kept of it."""
    recorder = Recorder(chips, figures)
    hour_s = now_s // 3600 * 3600
    found = history(connection, cluster, 60, hour_s, now_s, figures)
    recorder.resume(chunk for chunk in found if chunk.start_s >= hour_s)
    return recorder


def _chips(data: bytes, values_of_one: int) -> int:
    """How many chips a chunk is of: a cluster may have been resized since."""
    size: int = zstandard.frame_content_size(data)
    return size // (4 * values_of_one)


def forget_old(connection: Connection, now_s: float) -> None:
    """Drop what is older than its grain is kept."""
    for grain_s, kept_s in KEPT_S.items():
        old = (samples.c.grain_s == grain_s) & (samples.c.start_s < now_s - kept_s)
        connection.execute(delete(samples).where(old))
