"""Packs: many chunks one after another in a file whose name is the xxh3 of its content."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from meshwright.checkpoint.files import Body, Files

PACK_BYTES = 32 << 20  # storage far away joins a pack before it sends it: 64 MiB at most are held


def pack_name(digest: str) -> str:
    """Where the pack of that digest lies."""
    return f"packs/{digest[:2]}/{digest}"


def xxh3(*parts: Body) -> str:
    """xxh3 of 128 bits over `parts`, hexadecimal."""
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


@dataclass
class PackWriter:
    """Gathers chunks to packs of `limit` bytes and writes a pack when it is full. Of the chunks
    that it was given it holds a pack at most, and no less than one chunk."""

    files: Files
    limit: int = PACK_BYTES
    digests: list[str] = field(default_factory=list)  # of the packs written
    found: list[str] = field(default_factory=list)  # those of them that were there already
    written_bytes: int = 0
    _waiting: list[Body] = field(default_factory=list)
    _size: int = 0

    def add(self, body: Body) -> tuple[int, int]:
        """Take a chunk: the number of its pack among `digests`, and where in that it lies. Raises
        CheckpointError if the pack before, which is full now, cannot be written."""
        if self._size and self._size + len(body) > self.limit:
            self.flush()
        at = self._size
        self._waiting.append(body)
        self._size += len(body)
        return len(self.digests), at

    def add_last(self, body: Body) -> int:
        """Take a chunk into the pack that has been begun, however full, and write that: where the
        chunk lies in it. Raises CheckpointError."""
        at = self._size
        self._waiting.append(body)
        self._size += len(body)
        self.flush()
        return at

    def flush(self) -> None:
        """Write the pack that has been begun. Raises CheckpointError."""
        if not self._waiting:
            return
        digest = xxh3(*self._waiting)
        name = pack_name(digest)
        if not self.files.create(name, self._waiting):
            self.found.append(digest)
            if not self._is_whole(name, digest):
                # Its name says what it must hold, and that is at hand: it is mended for all.
                self.files.remove(name)
                self.files.create(name, self._waiting)
        self.digests.append(digest)
        self.written_bytes += self._size
        self._waiting, self._size = [], 0

    def _is_whole(self, name: str, digest: str) -> bool:
        try:
            return xxh3(self.files.read(name)) == digest
        except FileNotFoundError:
            return False
