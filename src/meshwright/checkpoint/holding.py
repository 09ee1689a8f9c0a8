"""What every part of a store needs: its files, its seal, and how small things are written down.

Small things (commits, parts, tags, marks) are canonical JSON with the sha256 of the rest as "root":
bytes that differ from what their content would be written as are damaged, wherever they differ.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.files import Body, Files
from meshwright.checkpoint.seal import Plain, Seal, SealError

FORMAT = 2
STORE_FILE = "store.json"  # the id of a store
Json = Mapping[str, Any]


class DamagedRecordError(CheckpointError):
    """A file of the store that holds JSON is not what was written."""


@dataclass(frozen=True)
class Holding:
    """A store that is open: where it is, its own id, its files, and the seal of its bytes."""

    address: str
    id: str
    files: Files
    seal: Seal

    def bound(self, *what: object) -> bytes:
        """What sealed bytes of this store are bound to."""
        return canonical([self.id, *what])

    @property
    def sealed(self) -> bool:
        """Whether its bytes are sealed."""
        return not isinstance(self.seal, Plain)

    def close(self, plain: Body, *bound: object) -> Body:
        """`plain`, sealed if anything is; not copied else."""
        return memoryview(self.seal.seal(plain, self.bound(*bound))) if self.sealed else plain

    def open(self, closed: Body, *bound: object) -> Body:
        """Inverse of `close`. Raises SealError."""
        return memoryview(self.seal.open(closed, self.bound(*bound))) if self.sealed else closed

    def create_json(self, name: str, content: Json, *bound: object) -> bool:
        """Write down `content`, sealed to `bound` if there is one. False if the name is taken."""
        if bound and self.sealed:
            closed = self.close(canonical(content), *bound)
            content = {"sealed": b64encode(closed).decode()}
        return self.files.create(name, [rooted(content)])

    def read_json(self, name: str, *bound: object) -> Json:
        """Inverse of `create_json`. Raises FileNotFoundError, and CheckpointError if it is damaged,
        of another format or sealed by another key."""
        content = self.parse(name, self.files.read(name))
        if "sealed" not in content:
            if bound and self.sealed:
                raise SealError(f"{self.address}/{name}: is not sealed, and this store is")
            return content
        inner: Json = json.loads(bytes(self.open(b64decode(content["sealed"]), *bound)))
        return inner

    def parse(self, name: str, written: bytes) -> Json:
        """The content of a small file, without what guards it. Raises CheckpointError."""
        return unrooted(f"{self.address}/{name}", written)


def canonical(content: Any) -> bytes:
    """JSON of which there is one for a content."""
    plain = json.loads(json.dumps(content))  # keys become text, and so are sorted as text
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def root(content: Json) -> str:
    """sha256 of the canonical content and the format, hexadecimal."""
    return sha256(canonical({"format": FORMAT, **content})).hexdigest()


def rooted(content: Json) -> bytes:
    """The bytes of a small file."""
    return canonical({"format": FORMAT, **content, "root": root(content)})


def unrooted(where: str, written: bytes) -> Json:
    """Inverse of `rooted`. Raises CheckpointError, DamagedRecordError if a bit is another."""
    try:
        content = dict(json.loads(written))
        told, made = content.pop("root"), content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRecordError(f"{where}: is damaged ({error}); {WAY_OUT}") from error
    if told != root(content) or rooted(content) != written:
        raise DamagedRecordError(f"{where}: is damaged (its hash differs); {WAY_OUT}")
    if made != FORMAT:
        raise CheckpointError(
            f"{where}: format {made}, this version reads format {FORMAT}; "
            "use the version of Meshwright that wrote it"
        )
    return {key: value for key, value in content.items() if key != "format"}


WAY_OUT = "restore it from a copy, or go on from the commit before"
