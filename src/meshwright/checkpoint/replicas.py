"""A second copy of a store, file by file: making it, and taking from it what is damaged here.

Packs are named by their content and records hold their own hash, so nobody must be asked which of
two copies is right, nor any key be had.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.branches import FOLDER as BRANCHES
from meshwright.checkpoint.files import Entry, Files
from meshwright.checkpoint.holding import STORE_FILE, DamagedRecordError, unrooted
from meshwright.checkpoint.packs import pack_name, xxh3
from meshwright.checkpoint.spread import spread

_PACKS, _KEYS, _PARTS = "packs/", "keys/", "parts/"
_KEY = re.compile(r"keys/([0-9a-f]+)\.(\d+)\.json")
_AT_ONCE = 4


@dataclass(frozen=True)
class Mirrored:
    """What was copied, and the names of what was not since it is damaged."""

    files: int
    bytes: int
    damaged: tuple[str, ...]


def mirror(source: Files, target: Files) -> Mirrored:
    """Copy what `target` lacks, so that it is a store with the same commits; a commit comes after
    what it holds. Nothing is removed but wrappings of keys that were rotated away.

    Raises CheckpointError if `target` is another store, OSError or CheckpointError if a file cannot
    be read or written; run again, it goes on where it was.
    """
    there = {entry.name for entry in target.names("")}
    if STORE_FILE in there:
        check_same(source, target)
    # Records first: what is listed after them holds all that they need.
    records = [e for e in source.names("") if not e.name.startswith((_PACKS, _KEYS, _PARTS))]
    keys = source.names(_KEYS)
    bodies = [*keys, *source.names(_PACKS)]
    copied: list[int] = []
    damaged: list[str] = []
    for group in (bodies, records):
        missing = [entry for entry in group if entry.name not in there]
        for entry, size in zip(missing, _copy(source, target, missing), strict=True):
            if size is None:
                damaged.append(entry.name)
            else:
                copied.append(size)
    _forget_rotated(target, there, {entry.name for entry in keys})
    return Mirrored(len(copied), sum(copied), tuple(damaged))


def check_same(files: Files, replica: Files) -> None:
    """Raises CheckpointError if the two are not copies of one store."""
    try:
        ids = [unrooted(STORE_FILE, one.read(STORE_FILE))["id"] for one in (files, replica)]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the replica holds no store (no {STORE_FILE}); mirror it first"
        ) from error
    if ids[0] != ids[1]:
        raise CheckpointError(
            f"the replica is of store {ids[1]}, not of {ids[0]}; name the replica of this one"
        )


def mend_pack(files: Files, replica: Files, pack: str) -> bool:
    """Put the replica's copy of a pack in place of what is here; False if that is no better.

    In the moment between, the pack is absent, which is found out by who reads it, as damage is.
    """
    name = pack_name(pack)
    return _replace(files, name, _sound(replica, name))


def mend_records(files: Files, replica: Files) -> list[str]:
    """Do the same for damaged records of branches: names of those that are whole again. A record
    that is absent here stays so: retention may have removed it."""
    broken = [e.name for e in files.names(BRANCHES) if _sound(files, e.name) is None]
    return [name for name in broken if _replace(files, name, _sound(replica, name))]


def _replace(files: Files, name: str, content: bytes | None) -> bool:
    if content is None:
        return False
    files.remove(name)
    files.create(name, [content])
    return _sound(files, name) is not None


def _copy(source: Files, target: Files, entries: Iterable[Entry]) -> list[int | None]:
    """Bytes of each, None for what is damaged or gone."""

    def one(entry: Entry) -> int | None:
        content = _sound(source, entry.name)
        if content is None:
            return None
        target.create(entry.name, [content])
        return len(content)

    return spread(one, list(entries), _AT_ONCE)


def _sound(files: Files, name: str) -> bytes | None:
    """The content of a file, None if it is absent or not what it says that it is. Wrappings of keys
    do not say."""
    try:
        content = files.read(name)
    except FileNotFoundError:
        return None
    if name.startswith(_PACKS):
        return content if xxh3(content) == name.rpartition("/")[2] else None
    if not name.startswith(_KEYS):
        try:
            unrooted(name, content)
        except DamagedRecordError:
            return None
    return content


def _forget_rotated(target: Files, there: set[str], keys: set[str]) -> None:
    """Whoever has the old master key must not open the copy by it."""
    newest = {match[1]: int(match[2]) for name in sorted(keys) if (match := _KEY.fullmatch(name))}
    for name in there - keys:
        match = _KEY.fullmatch(name)
        if match and int(match[2]) < newest.get(match[1], 0):
            target.remove(name)
