"""Stores that are read over the network: by blocks, checked, cached, and tried again.

Any address that fsspec knows will do: `s3://…` (with s3fs), `https://…`, a path of a shared folder.
"""

from __future__ import annotations

import importlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DamagedError, DataError, MeshwrightError
from meshwright.data.blocks import BlockCache, Key
from meshwright.data.samples import SampleStore, parse_index
from meshwright.data.store import TokenStore, read_index

Fetch = Callable[[int, int], bytes]
"""Bytes [start, stop) of one file. Raises OSError."""

T = TypeVar("T")

_FIRST_TRIES = 4
_SCANNED = 64  # blocks that are read side by side where all are looked through
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)  # trying again would not help


@dataclass(frozen=True)
class Patience:
    """How often a read is tried, and how long is waited after the first failure, then twice that,
    and so on, up to `longest_s`."""

    tries: int = 6
    first_s: float = 0.1
    longest_s: float = 10.0
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Traffic:
    """Of a file: blocks and bytes fetched, reads that failed, blocks that came damaged."""

    fetched: int = 0
    fetched_bytes: int = 0
    failed: int = 0
    damaged: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)

    def count(self, **more: int) -> None:
        """Add to the figures of these names."""
        with self.lock:
            for name, many in more.items():
                setattr(self, name, getattr(self, name) + many)


@dataclass(frozen=True)
class RemoteFile:
    """A file far away, of which blocks are fetched when they are first needed.

    `sums`: CRC-32 of each block. Blocks from the cache are checked once in each process.
    """

    url: str
    size: int
    sums: npt.NDArray[np.uint32]
    block_bytes: int
    fetch: Fetch
    cache: BlockCache
    patience: Patience = field(default_factory=Patience)
    at_once: int = 16
    traffic: Traffic = field(default_factory=Traffic)
    checked: set[int] = field(default_factory=set)
    spoiled: dict[int, str] = field(default_factory=dict)  # damaged there, whenever it was fetched

    @property
    def name(self) -> str:
        """Under which it is in the cache: its address and what is in it."""
        return sha256(self.url.encode() + self.sums.tobytes()).hexdigest()[:24]

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Raises DataError if they cannot be had, DamagedError if what is had
        is not what was built."""
        parts = []
        for block in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            first = block * self.block_bytes
            low, high = max(start - first, 0), min(stop - first, self.block_bytes)
            parts.append(self._part(block, low, high))
        return b"".join(parts)

    def fetch_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        """Get all blocks of bytes [start, stop) of `spans` that are not here, side by side."""
        size = self.block_bytes
        wanted = {b for start, stop in spans for b in range(start // size, -(-stop // size))}
        missing = sorted(block for block in wanted if self._key(block) not in self.cache)
        if len(missing) > 1:
            with ThreadPoolExecutor(min(self.at_once, len(missing))) as pool:
                list(pool.map(self._get, missing))

    def _key(self, block: int) -> Key:
        return self.name, block

    def _part(self, block: int, low: int, high: int) -> bytes:
        if block in self.checked:
            kept = self.cache.get(self._key(block), low, high)
            if kept is not None:
                return kept
        return self._get(block)[low:high]

    def _get(self, block: int) -> bytes:
        """A whole block that is as it was built."""
        kept = self.cache.get(self._key(block), 0, None)
        if kept is not None:
            if zlib.crc32(kept) == self.sums[block]:
                self.checked.add(block)
                return kept
            self.cache.drop(self._key(block))
        fresh = self.fetch_block(block)
        self.cache.put(self._key(block), fresh)
        self.checked.add(block)
        return fresh

    def fetch_block(self, block: int) -> bytes:
        """A block as it is there, checked and not kept. Raises DataError, or DamagedError."""
        start = block * self.block_bytes
        stop = min(start + self.block_bytes, self.size)
        where, why = f"{self.url}: bytes {start} to {stop}", ""
        if block in self.spoiled:
            raise DamagedError(self.spoiled[block])
        delay_s, spoiled, tries = self.patience.first_s, False, 0
        seen: set[int] = set()  # what came damaged twice alike is so there, and not on the way
        for attempt in range(self.patience.tries):
            tries = attempt + 1
            if attempt:
                self.patience.sleep(delay_s)
                delay_s = min(2 * delay_s, self.patience.longest_s)
            try:
                content = _told_as_os(lambda: self.fetch(start, stop))
            except _GONE as error:
                fix = "has it been moved or removed?"
                raise DataError(f"{where}: cannot be read: {_words(error)}; {fix}") from error
            except OSError as error:
                why = f"cannot be read: {_words(error)}; is the network or the storage down?"
                spoiled = False
                self.traffic.count(failed=1)
                continue
            found = zlib.crc32(content)
            if len(content) == stop - start and found == self.sums[block]:
                self.traffic.count(fetched=1, fetched_bytes=len(content))
                return content
            why, spoiled = "damaged there (the checksum differs); upload it again", True
            self.traffic.count(damaged=1)
            if found in seen:
                break
            seen.add(found)
        told = f"{where}: {why} ({tries} tries)"
        if not spoiled:
            raise DataError(told)
        self.spoiled[block] = told
        raise DamagedError(told)


@dataclass(frozen=True)
class RemoteArray:
    """A one-dimensional array in a remote file, read by slices."""

    file: RemoteFile
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Items."""
        return self.file.size // self.dtype.itemsize

    def __getitem__(self, place: slice) -> npt.NDArray[Any]:
        start, stop, _ = place.indices(self.size)
        width = self.dtype.itemsize
        return np.frombuffer(self.file.read(start * width, stop * width), self.dtype)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Get items [start, stop) of all `spans` here, side by side."""
        width = self.dtype.itemsize
        self.file.fetch_spans((start * width, stop * width) for start, stop in spans)


@dataclass(frozen=True)
class RemoteBuild:
    """A folder that `meshwright data build` has made, at an address. `identity`: the hash of its
    manifest."""

    url: str
    manifest: Mapping[str, Any]
    identity: str
    files: Any  # fsspec.AbstractFileSystem, which has no types
    root: str
    cache: BlockCache
    patience: Patience

    def size(self, name: str) -> int | None:
        """Bytes of a file; None: it is not there. Raises DataError if that cannot be told."""
        try:
            return int(_told_as_os(lambda: self.files.size(f"{self.root}/{name}")))
        except FileNotFoundError:
            return None
        except OSError as error:
            fix = "is the network or the storage down?"
            raise DataError(f"{self.url}/{name}: cannot be read: {_words(error)}; {fix}") from error

    def whole(self, name: str) -> bytes:
        """All of a small file, unchecked. Raises DataError."""
        return read_whole(self.files, self.root, self.url, name, self.patience)

    def blocks(self, part: str) -> Iterator[bytes | str]:
        """Each block of the .bin of `part` in turn, or what is wrong with it; nothing is cached.
        Raises DataError if they cannot be had."""
        file, _ = self._open(part)

        def read(block: int) -> bytes | str:
            try:
                return file.fetch_block(block)
            except DamagedError as error:
                return str(error)

        with ThreadPoolExecutor(file.at_once) as pool:
            for group in range(0, file.sums.size, _SCANNED):
                yield from pool.map(read, range(group, min(group + _SCANNED, file.sums.size)))

    def tokens(self, part: str) -> TokenStore:
        """The token store `part`. Raises DataError."""
        file, index = self._open(part)
        dtype, starts, tokenizer = read_index(Path(f"{self.url}/{part}"), index, file.size)
        tokens = cast("npt.NDArray[np.integer]", RemoteArray(file, dtype))
        return TokenStore(Path(part), tokens, starts, tokenizer)

    def samples(self, part: str) -> SampleStore:
        """The sample store `part`. Raises DataError."""
        file, index = self._open(part)
        prefix = Path(f"{self.url}/{part}")
        offsets, sums = parse_index(prefix, index)
        return SampleStore(prefix, RemoteArray(file, np.dtype(np.uint8)), offsets, sums)

    def _open(self, part: str) -> tuple[RemoteFile, bytes]:
        """The .bin, and all of the .idx."""
        names = f"{part}.bin", f"{part}.idx", f"{part}.crc"
        if any(name not in self.manifest["files"] for name in names):
            raise DataError(f"{self.url}: has no {part}; name another part or build it")
        path, url = f"{self.root}/{names[0]}", f"{self.url}/{names[0]}"
        index, sums = (self._checked(name) for name in names[1:])
        file = RemoteFile(
            url,
            self.manifest["files"][names[0]]["bytes"],
            np.frombuffer(sums, "<u4"),
            self.manifest["block_bytes"],
            lambda start, stop: bytes(self.files.cat_file(path, start=start, end=stop)),
            self.cache,
            self.patience,
        )
        return file, index

    def _checked(self, name: str) -> bytes:
        content = self.whole(name)
        if sha256(content).hexdigest() != self.manifest["files"][name]["sha256"]:
            raise DataError(f"{self.url}/{name}: damaged (its hash differs); upload it again")
        return content


def open_remote(
    url: str,
    cache_folder: Path,
    cache_bytes: int,
    patience: Patience | None = None,
    options: Mapping[str, Any] | None = None,
) -> RemoteBuild:
    """The build at `url`. `options` are those of fsspec for its kind of address, as
    `{"endpoint_url": …}` for S3. Raises DataError or ConfigError."""
    patience = patience or Patience()
    files, root = connect(url, options)
    content = read_whole(files, root, url, "manifest.json", patience)
    try:
        manifest = json.loads(content)
        cache = BlockCache(cache_folder, cache_bytes, int(manifest["block_bytes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url}/manifest.json: is not one of ours; build it again") from error
    return RemoteBuild(url, manifest, sha256(content).hexdigest(), files, root, cache, patience)


def connect(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """fsspec's file system of `url`, which has no types, and the path in it. Raises DataError."""
    fsspec = importlib.import_module("fsspec")  # here, for it takes a while
    try:
        files, root = fsspec.core.url_to_fs(url, **(options or {}))
    except (ImportError, ValueError) as error:
        fix = "install what it names, or check the address"
        raise DataError(f"{url}: cannot be opened: {_words(error)}; {fix}") from error
    return files, root


def read_whole(files: Any, root: str, url: str, name: str, patience: Patience) -> bytes:
    """The file `name` of the folder `url`. Raises DataError. As the first read of a run it is tried
    a few times only: a wrong address should be told soon."""
    delay_s = patience.first_s
    for left in reversed(range(min(patience.tries, _FIRST_TRIES))):
        try:
            return bytes(_told_as_os(lambda: files.cat_file(f"{root}/{name}")))
        except _GONE as error:
            fix = "name what `meshwright data build` has built and you have uploaded"
            raise DataError(f"{url}: no {name}: {_words(error)}; {fix}") from error
        except OSError as error:
            if not left:
                fix = "is the network or the storage down?"
                raise DataError(f"{url}/{name}: cannot be read: {_words(error)}; {fix}") from error
            patience.sleep(delay_s)
            delay_s = min(2 * delay_s, patience.longest_s)
    raise AssertionError("a try at least")


def _told_as_os(read: Callable[[], T]) -> T:
    """What `read` gives. Storage of each kind has errors of its own: all become an OSError."""
    try:
        return read()
    except (OSError, MeshwrightError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _words(error: BaseException) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(said).split())
