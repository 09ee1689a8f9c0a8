"""Whether a build is what its manifest says, and what is in it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from meshwright.base.errors import DataError
from meshwright.data.checksums import BLOCK_BYTES, file_blocks
from meshwright.data.far import is_far
from meshwright.data.ingest.run import check_format, read_manifest
from meshwright.data.packing import WINDOW_ROWS, PackedRows
from meshwright.data.remote import open_remote
from meshwright.data.samples import SampleStore, open_samples
from meshwright.data.store import TokenStore, check_tokenizer, open_store

_SAMPLED_WINDOWS = 50
_SAMPLED = 200  # samples
_SCRATCH_BYTES = 64 << 20  # of blocks of a build far away


def open_built(folder: Path, part: str, tokenizer_sha256: str | None = None) -> TokenStore:
    """The token store `part` of a build. Raises DataError where it is absent, or its tokenizer is
    not the one of `tokenizer_sha256`."""
    manifest = read_manifest(folder)
    if manifest["kind"] != "tokens" or part not in manifest:
        raise DataError(f"{folder}: has no tokens for {part}; build it with --kind tokens")
    own = manifest["tokenizer"]["sha256"]
    if tokenizer_sha256 not in (None, own):
        raise DataError(
            f"{folder}: tokenizer {own[:12]}, but {str(tokenizer_sha256)[:12]} is wanted; ids of "
            "one mean nothing to the other: build all sources with the same --tokenizer"
        )
    store = open_store(folder / part)
    check_tokenizer(store, own, str(folder))
    return store


def open_together(folders: Sequence[Path], part: str) -> list[TokenStore]:
    """The token store `part` of several builds, which must share a tokenizer. Raises DataError."""
    first = read_manifest(folders[0])["tokenizer"].get("sha256")
    return [open_built(folder, part, first) for folder in folders]


class Build(Protocol):
    """A build, here or far away: see `LocalBuild` and `remote.RemoteBuild`."""

    @property
    def url(self) -> str:
        """Its folder or address."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What `data build` has told of it."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None: it is not there."""

    def whole(self, name: str) -> bytes:
        """All of a small file."""

    def blocks(self, part: str) -> Iterator[bytes | str]:
        """Each block of the .bin of `part` in turn, or what is wrong with it."""

    def tokens(self, part: str) -> TokenStore:
        """The token store `part`."""

    def samples(self, part: str) -> SampleStore:
        """The sample store `part`."""


@dataclass(frozen=True)
class LocalBuild:
    """A build in `folder`."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def url(self) -> str:
        """Its folder."""
        return str(self.folder)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None: it is not there."""
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def whole(self, name: str) -> bytes:
        """All of a small file. Raises DataError."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"{self.folder / name}: cannot be read: {error.strerror}") from error

    def blocks(self, part: str) -> Iterator[bytes | str]:
        """Each block of the .bin of `part` in turn, or what is wrong with it."""
        path = self.folder / f"{part}.bin"
        sums = np.frombuffer(self.whole(f"{part}.crc"), "<u4")
        for number, (block, told) in enumerate(zip(file_blocks(path), sums, strict=True)):
            if zlib.crc32(block) == told:
                yield block
                continue
            where = f"{path}: bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(block)}"
            yield f"{where} are damaged; fetch or build it again"

    def tokens(self, part: str) -> TokenStore:
        """The token store `part`. Raises DataError."""
        return open_store(self.folder / part)

    def samples(self, part: str) -> SampleStore:
        """The sample store `part`. Raises DataError."""
        return open_samples(self.folder / part)


@contextmanager
def opened(source: str | Path) -> Iterator[Build]:
    """The build in a folder or at an address. Raises DataError if there is none."""
    if not is_far(str(source)):
        yield LocalBuild(Path(source), read_manifest(Path(source)))
        return
    with TemporaryDirectory() as scratch:
        build = open_remote(str(source).rstrip("/"), Path(scratch), _SCRATCH_BYTES)
        check_format(build.url, build.manifest)
        yield build


def faults(source: str | Path) -> Iterator[str]:
    """What is wrong with the build in a folder or at an address, one line each; reads all of it.
    Raises DataError if there is no manifest, or what is far away cannot be reached."""
    with opened(source) as build:
        wrong = set[str]()
        for name in build.manifest["files"]:
            for line in _of_file(build, name):
                wrong.add(name)
                yield line
        for part in _parts(build):
            if not wrong & {f"{part}.bin", f"{part}.idx", f"{part}.crc"}:
                yield from _of_part(build, part)


def _parts(build: Build) -> list[str]:
    return [part for part in ("train", "held_out") if part in build.manifest]


def _of_file(build: Build, name: str) -> Iterator[str]:
    """A file's size, and of a small one its hash."""
    told, size, where = build.manifest["files"][name], build.size(name), f"{build.url}/{name}"
    if size is None:
        yield f"{where}: is gone; fetch or build it again"
    elif size != told["bytes"]:
        yield f"{where}: has {size} bytes, the manifest tells {told['bytes']}"
    elif not name.endswith(".bin") and sha256(build.whole(name)).hexdigest() != told["sha256"]:
        yield f"{where}: damaged (its hash differs); fetch or build it again"


def _of_part(build: Build, part: str) -> Iterator[str]:
    """Blocks that are not what they were, ids that the tokenizer does not have, and documents
    without an end. Those of samples have nothing that their checksums do not cover."""
    look = None
    try:
        look = _Look(build, part) if build.manifest["kind"] == "tokens" else None
    except DataError as error:
        yield str(error)
    for number, block in enumerate(build.blocks(part)):
        if isinstance(block, str):
            yield block
        elif look is not None:
            look.at(number * int(build.manifest["block_bytes"]), block)
    if look is not None:
        yield from look.found()


class _Look:
    """At the ids of a store, block after block."""

    def __init__(self, build: Build, part: str) -> None:
        store, about = build.tokens(part), build.manifest["tokenizer"]
        check_tokenizer(store, about["sha256"], build.url)
        self._dtype, self._ends = store.tokens.dtype, store.starts[1:] - 1
        self._vocab, self._end_of_text = about["vocab"], about["end_of_text"]
        self._where = f"{build.url}/{part}.bin"
        self._highest = self._unended = 0

    def at(self, start: int, block: bytes) -> None:
        """`block` begins at byte `start`."""
        ids, first = np.frombuffer(block, self._dtype), start // self._dtype.itemsize
        low, high = np.searchsorted(self._ends, [first, first + ids.size])
        ends = ids[self._ends[low:high] - first]
        self._highest = max(self._highest, int(ids.max()))
        self._unended += int((ends != self._end_of_text).sum())

    def found(self) -> Iterator[str]:
        """What is wrong."""
        if self._highest >= self._vocab:
            yield f"{self._where}: id {self._highest} is outside the vocab of {self._vocab}"
        if self._unended:
            yield f"{self._where}: {self._unended} documents lack their end-of-text token"


def described(source: str | Path, seq_len: int) -> dict[str, Any]:
    """What `data inspect` tells of the build in a folder or at an address: the manifest's figures,
    lengths of documents or samples, how rows of `seq_len` pack. Raises DataError."""
    with opened(source) as build:
        manifest = build.manifest
        kept = ("kind", "sources", "tokenizer", "train", "held_out", "licences", "removed")
        document = {key: manifest[key] for key in kept if key in manifest}
        document["bytes"] = sum(file["bytes"] for file in manifest["files"].values())
        describe = _tokens if manifest["kind"] == "tokens" else _samples
        for part in _parts(build):
            before = "" if part == "train" else f"{part}_"
            told = describe(build, part, seq_len)
            document |= {f"{before}{key}": value for key, value in told.items()}
        return document


def _tokens(build: Build, part: str, seq_len: int) -> dict[str, Any]:
    store = build.tokens(part)
    rows = PackedRows(store, seq_len)
    windows = -(-len(rows) // WINDOW_ROWS)
    return {
        "dtype": str(store.tokens.dtype),
        "document_tokens": _quantiles(np.diff(store.starts)),
        "packing": {
            "seq_len": seq_len,
            "rows": len(rows),
            "full": rows.efficiency,
            "whole_documents": rows.whole_share(_some(windows, _SAMPLED_WINDOWS)),
        },
    }


def _samples(build: Build, part: str, _seq_len: int) -> dict[str, Any]:
    store = build.samples(part)
    looked_at = _some(len(store), _SAMPLED)
    fields = {name for index in looked_at for name in store.read(index).fields}
    return {"sample_bytes": _quantiles(np.diff(store.offsets)), "fields": sorted(fields)}


def _some(count: int, about: int) -> range:
    """Numbers below `count`, evenly spread."""
    return range(0, count, max(1, count // about))


def _quantiles(lengths: Any) -> dict[str, int]:
    names = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}
    return {name: int(np.quantile(lengths, q)) for name, q in names.items()}
