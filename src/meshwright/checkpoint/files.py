"""The files of a store, wherever they are: created once and whole, never overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from meshwright.base.errors import CheckpointError

_T = TypeVar("_T")
Body = bytes | memoryview


@dataclass(frozen=True)
class Entry:
    """A file: its name in the store, its bytes, and when it was made (seconds since 1970)."""

    name: str
    size: int
    modified_s: float


class Files(Protocol):
    """A folder of files that are never changed. Names have parts apart by `/`.

    All raise OSError for what storage refuses.
    """

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, fewer if it ends before. Raises FileNotFoundError."""

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """Make a file of `parts`, whole and durable or not at all. False if it was there."""

    def names(self, prefix: str) -> list[Entry]:
        """All files whose name begins with `prefix`, sorted."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


@runtime_checkable
class CanHurry(Protocol):
    """Files that can be made without waiting until they are on disk."""

    def hasty(self) -> Files:
        """The same files, which do not wait."""


@runtime_checkable
class ReadsInto(Protocol):
    """Files that can be read into memory that is there."""

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start` of a file on: bytes read, fewer if it ends before. Raises
        FileNotFoundError."""


@runtime_checkable
class LeavesDrafts(Protocol):
    """Files of which a writer that dies leaves a draft."""

    def sweep(self, before_s: float) -> int:
        """Remove drafts that were begun before that time: how many."""


def open_files(address: str | Path) -> Files:
    """The files at a path, or at an address that fsspec knows (`s3://bucket/run`).

    Raises CheckpointError if no file system answers to the address.
    """
    from meshwright.checkpoint import local, remote  # here, for both are made of what is above

    if "://" in str(address):
        return remote.open_remote(str(address))
    return local.LocalFiles(Path(address))


@dataclass(frozen=True)
class ToldFiles:
    """`files`, of which an error is one line for a person: CheckpointError with address and way
    out. That a file is absent stays a FileNotFoundError."""

    files: Files
    address: str

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        return self._told(name, "read", lambda: self.files.read(name, start, stop))

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`."""
        return self._told(name, "written", lambda: self.files.create(name, parts))

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        return self._told(prefix, "listed", lambda: self.files.names(prefix))

    def remove(self, name: str) -> None:
        """As `Files.remove`."""
        self._told(name, "removed", lambda: self.files.remove(name))

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """As `ReadsInto.read_into`."""
        return self._told(name, "read", lambda: read_into(self.files, name, start, into))

    def _told(self, name: str, done: str, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except OSError as error:
            if done == "read" and isinstance(error, FileNotFoundError):
                raise
            said = error.strerror or str(error) or type(error).__name__
            raise CheckpointError(
                f"{self.address}/{name}: cannot be {done} ({' '.join(said.split())}); "
                "free space, mend permissions, or see whether the storage is up"
            ) from error


def hasty(files: Files) -> Files:
    """The same files, which do not wait until a new one is on disk, where they can."""
    if isinstance(files, ToldFiles):
        return ToldFiles(hasty(files.files), files.address)
    return files.hasty() if isinstance(files, CanHurry) else files


def read_into(files: Files, name: str, start: int, into: memoryview) -> int:
    """As `ReadsInto.read_into`, of any files."""
    if isinstance(files, ReadsInto):
        return files.read_into(name, start, into)
    found = files.read(name, start, start + len(into))
    into[: len(found)] = found
    return len(found)


def sweep(files: Files, before_s: float) -> int:
    """Remove what writers that died before that time (seconds since 1970) have left half written,
    where that can be seen: how many files."""
    inner = files.files if isinstance(files, ToldFiles) else files
    return inner.sweep(before_s) if isinstance(inner, LeavesDrafts) else 0
