"""The files of a store in a folder of a local or shared file system."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from meshwright.checkpoint.files import Body, Entry

DRAFTS = ".drafts"  # what is being written; left there by who dies
_TRIES = 3


@dataclass(frozen=True)
class LocalFiles:
    """Files in `root`. A file is written under another name and then linked to its own, which is
    atomic and fails if the name is taken. `durable`: `create` waits until it is on disk."""

    root: Path
    durable: bool = True

    def hasty(self) -> LocalFiles:
        """The same, not durable."""
        return replace(self, durable=False)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        with (self.root / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = max(0, (size if stop is None else min(stop, size)) - start)
            found = os.pread(file.fileno(), wanted, start)
            while len(found) < wanted:  # a read gives 2 GiB at most
                more = os.pread(file.fileno(), wanted - len(found), start + len(found))
                if not more:
                    break
                found += more
            return found

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """As `ReadsInto.read_into`."""
        with (self.root / name).open("rb", buffering=0) as file:
            done = 0
            while done < len(into):  # a read gives 2 GiB at most
                more = os.preadv(file.fileno(), [into[done:]], start + done)
                if not more:
                    break
                done += more
            return done

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`."""
        draft = self.root / DRAFTS / uuid4().hex
        target = self.root / name
        if target.exists():
            return False
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(draft, parts)
            return self._link(draft, target)
        finally:
            draft.unlink(missing_ok=True)

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        folder = prefix.rpartition("/")[0]
        found = (e for e in _walk(self.root / folder, f"{folder}/" if folder else ""))
        return sorted((e for e in found if e.name.startswith(prefix)), key=lambda e: e.name)

    def remove(self, name: str) -> None:
        """As `Files.remove`. A folder that becomes empty goes as well."""
        path = self.root / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # there is more in it
            path.parent.rmdir()

    def sweep(self, before_s: float) -> int:
        """As `LeavesDrafts.sweep`."""
        old = [e for e in _walk(self.root / DRAFTS, f"{DRAFTS}/") if e.modified_s < before_s]
        for entry in old:
            (self.root / entry.name).unlink(missing_ok=True)
        return len(old)

    def _write(self, draft: Path, parts: Iterable[Body]) -> None:
        with draft.open("xb", buffering=0) as file:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[file.write(left) :]
            if self.durable:
                os.fsync(file.fileno())

    def _link(self, draft: Path, target: Path) -> bool:
        for left in reversed(range(_TRIES)):
            made = self._make_folder(target.parent)
            try:
                os.link(draft, target)
            except FileExistsError:
                return False
            except FileNotFoundError:  # somebody removed the folder, since it was empty
                if not left:
                    raise
                continue
            if self.durable:
                for folder in {target.parent, *made}:
                    _sync_folder(folder)
            return True
        raise AssertionError("a try at least")

    def _make_folder(self, folder: Path) -> list[Path]:
        """Make `folder`; the folders that have a new entry by that."""
        changed = []
        missing = folder
        while not missing.is_dir():
            missing = missing.parent
            changed.append(missing)
        folder.mkdir(parents=True, exist_ok=True)
        return changed


def _walk(folder: Path, prefix: str) -> Iterator[Entry]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/")
            continue
        try:
            told = entry.stat()
        except FileNotFoundError:  # removed since it was listed
            continue
        yield Entry(prefix + entry.name, told.st_size, told.st_mtime)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
