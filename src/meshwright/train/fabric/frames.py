"""What travels on a stream: a hello, then frames of a header and a payload. All little-endian."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

_HELLO = struct.Struct("<4sII32s")
_MAGIC = b"MWF1"
_HEADER = struct.Struct("<IIQQQ")

HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size


class Key(NamedTuple):
    """What a frame is matched by."""

    epoch: int
    source: int  # rank
    channel: int
    sequence: int


def pack_header(key: Key, n_bytes: int) -> bytes:
    """The header of a frame with a payload of `n_bytes`."""
    return _HEADER.pack(*key, n_bytes)


def unpack_header(data: bytes | bytearray | memoryview) -> tuple[Key, int]:
    """The key of a frame and the bytes of its payload."""
    epoch, source, channel, sequence, n_bytes = _HEADER.unpack(data)
    return Key(epoch, source, channel, sequence), n_bytes


def hello(secret: str, member: int, peer: int, epoch: int) -> bytes:
    """What `member` says first on a stream to `peer`: who it is, and that it knows the secret."""
    return _HELLO.pack(_MAGIC, member, epoch, _proof(secret, member, peer, epoch))


def open_hello(data: bytes | bytearray | memoryview, secret: str, me: int) -> int | None:
    """The member that says this hello to `me`; None if it is no hello, or not of this run."""
    magic, member, epoch, proof = _HELLO.unpack(data)
    right = hmac.compare_digest(proof, _proof(secret, member, me, epoch))
    return int(member) if magic == _MAGIC and right else None


def _proof(secret: str, member: int, peer: int, epoch: int) -> bytes:
    return hmac.digest(secret.encode(), f"{member}>{peer}@{epoch}".encode(), hashlib.sha256)
