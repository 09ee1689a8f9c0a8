"""The files of a store at any address that fsspec knows, object storage above all.

Objects appear whole. A new one is put on the condition that there is none of that name
(`If-None-Match: *` on S3), which is what publishes a commit once.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.files import Body, Entry

_T = TypeVar("_T")
_SINGLE_PUT = 5 << 30  # s3fs would send larger ones by pieces, whose end has no condition
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, FileExistsError)


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, and how long is waited after the first failure, then twice
    that, and so on."""

    tries: int = 5
    first_s: float = 0.1
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class RemoteFiles:
    """Files under `root` of a file system of fsspec, which has no types."""

    files: Any
    root: str
    patience: Patience = field(default_factory=Patience)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        if stop is not None and stop <= start:
            return b""
        return bytes(self._try(lambda: self._cat(f"{self.root}/{name}", start, stop)))

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`. False also if a try that seemed to fail had made it after all."""
        data, path = b"".join(parts), f"{self.root}/{name}"

        def put() -> bool:
            self.files.pipe_file(path, data, mode="create", **self._whole())
            return True

        try:
            return self._try(put)
        except FileExistsError:
            return False

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        folder = f"{self.root}/{prefix}".rpartition("/")[0]
        found: Mapping[str, Mapping[str, Any]] = self._try(
            lambda: self.files.find(folder, detail=True)
        )
        cut = len(self.root.lstrip("/")) + 1
        entries = [
            Entry(path.lstrip("/")[cut:], int(told["size"] or 0), _modified_s(told))
            for path, told in found.items()
        ]
        return sorted((e for e in entries if e.name.startswith(prefix)), key=lambda e: e.name)

    def remove(self, name: str) -> None:
        """As `Files.remove`."""
        try:
            self._try(lambda: self.files.rm_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return

    def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        try:
            return bytes(self.files.cat_file(path, start=start, end=stop))
        except OSError as error:
            if "range" in str(error).lower():  # it begins behind the end
                return b""
            raise

    def _whole(self) -> dict[str, int]:
        return {"chunksize": _SINGLE_PUT} if "s3" in _protocols(self.files) else {}

    def _try(self, request: Callable[[], _T]) -> _T:
        """What a request gives, tried again if it fails in a way that may pass."""
        delay_s = self.patience.first_s
        for left in reversed(range(self.patience.tries)):
            try:
                return _told_as_os(request)
            except _FINAL:
                raise
            except OSError:
                if not left:
                    raise
                self.patience.sleep(delay_s)
                delay_s *= 2
        raise AssertionError("a try at least")


def open_remote(address: str, options: Mapping[str, Any] | None = None) -> RemoteFiles:
    """The files at an address. `options` are those of fsspec for its kind, as `{"endpoint_url": …}`
    for S3. Raises CheckpointError."""
    fsspec = importlib.import_module("fsspec")  # here, for it takes a while
    try:
        # Lists are never taken from memory: others write as well.
        asked = {"use_listings_cache": False, **(options or {})}
        files, root = fsspec.core.url_to_fs(address, **asked)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{address}: cannot be opened ({error}); install what it names, or check the address"
        ) from error
    return RemoteFiles(files, str(root).rstrip("/"))


def _protocols(files: Any) -> tuple[str, ...]:
    told = files.protocol
    return (told,) if isinstance(told, str) else tuple(told)


def _modified_s(told: Mapping[str, Any]) -> float:
    """When a file was made, by the name that its kind of file system has for that."""
    found = next((told[k] for k in ("LastModified", "mtime", "created") if told.get(k)), 0.0)
    return found.timestamp() if isinstance(found, datetime) else float(found)


def _told_as_os(request: Callable[[], _T]) -> _T:
    """Storage of each kind has errors of its own: all become an OSError."""
    try:
        return request()
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
