"""A bounded cache on local disk for blocks of files far away.

Each block is a file `NAME.NUMBER`, written aside and renamed. What is there already when a cache is
opened is used again. The oldest use goes first; the bound holds at any time, but for
the block that each thread is writing.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident

from meshwright.base.errors import ConfigError

Key = tuple[str, int]


class BlockCache:
    """Blocks of several files under one bound in bytes; for one process and all its threads."""

    def __init__(self, folder: Path, limit_bytes: int, block_bytes: int) -> None:
        """Raises ConfigError for a bound that holds no block, OSError for the folder."""
        if limit_bytes < block_bytes:
            fix = f"holds not even one block of {block_bytes}; raise it"
            raise ConfigError("data.cache_bytes", limit_bytes, fix)
        self.folder, self.limit_bytes = folder, limit_bytes
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._total = 0
        self._lock = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            name, _, number = path.name.rpartition(".")
            if number.isdigit():
                self._keep((name, int(number)), path.stat().st_size)
            else:
                path.unlink()  # a write that was killed

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._total

    def get(self, key: Key, start: int, stop: int | None) -> bytes | None:
        """Bytes [start, stop) of a block, or to its end; None if it is not there."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        try:
            with self._path(key).open("rb") as stream:
                stream.seek(start)
                return stream.read() if stop is None else stream.read(stop - start)
        except FileNotFoundError:  # another thread needed its place meanwhile
            return None

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._sizes

    def put(self, key: Key, block: bytes) -> None:
        """Keep a block, and let others go for it."""
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{get_ident()}part")
        draft.write_bytes(block)
        with self._lock:
            self._keep(key, len(block))
            draft.replace(path)

    def drop(self, key: Key) -> None:
        """Forget a block, which is damaged."""
        with self._lock:
            self._total -= self._sizes.pop(key, 0)
            self._path(key).unlink(missing_ok=True)

    def _keep(self, key: Key, size: int) -> None:
        self._total += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        while self._total > self.limit_bytes:
            oldest, freed = self._sizes.popitem(last=False)
            self._total -= freed
            with suppress(FileNotFoundError):
                self._path(oldest).unlink()

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}.{key[1]}"
