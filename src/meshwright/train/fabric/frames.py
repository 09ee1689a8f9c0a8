"""What travels on a stream: a hello, then frames of a header and a payload; the other way, where
frames are kept until they have arrived, how many have. All little-endian."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

_HELLO = struct.Struct("<4sIIQI32s")
_MAGIC = b"MWF2"
_HEADER = struct.Struct("<IIQQQ")
_ARRIVED = struct.Struct("<QQ")

HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size
ARRIVED_BYTES = _ARRIVED.size


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


class Greeting(NamedTuple):
    """Who says hello. A stream that is opened again, by another path, has the `session` of the one
    before and a higher `attempt`. Session 0: what is lost with the stream is lost."""

    member: int
    session: int = 0
    attempt: int = 0


def hello(secret: str, me: Greeting, peer: int, epoch: int) -> bytes:
    """What is said first on a stream to `peer`: who this is, and that it knows the secret."""
    member, session, attempt = me
    return _HELLO.pack(_MAGIC, member, epoch, session, attempt, _proof(secret, me, peer, epoch))


def open_hello(data: bytes | bytearray | memoryview, secret: str, me: int) -> Greeting | None:
    """Who says this hello to `me`; None if it is no hello, or not of this run."""
    magic, member, epoch, session, attempt, shown = _HELLO.unpack(data)
    said = Greeting(member, session, attempt)
    right = hmac.compare_digest(shown, _proof(secret, said, me, epoch))
    return said if magic == _MAGIC and right else None


def _proof(secret: str, who: Greeting, peer: int, epoch: int) -> bytes:
    said = f"{who.member}>{peer}@{epoch}/{who.session}.{who.attempt}"
    return hmac.digest(secret.encode(), said.encode(), hashlib.sha256)


def pack_arrived(frames: int, held_ns: int) -> bytes:
    """That so many frames of a session are complete, the last of which had come `held_ns` before
    this was said: what the reader was late with is no fault of the path."""
    return _ARRIVED.pack(frames, held_ns)


def unpack_arrived(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """What `pack_arrived` was given."""
    frames, held_ns = _ARRIVED.unpack(data)
    return frames, held_ns
