"""Stream sockets of the members: where they listen, and how they reach each other."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
from typing import NamedTuple

_BUFFER_BYTES = 4 << 20  # so that most messages leave in one write
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_BACKLOG = 1024
_TIMESTAMPS = 35  # SO_TIMESTAMPNS: when what is read had come
_TIME = struct.Struct("qq")
# struct tcp_info of linux/tcp.h, from its first byte to `sndbuf_limited`.
_TCP_INFO = struct.Struct("=8B24I4Q6I4Q")


class TcpInfo(NamedTuple):
    """What the kernel knows of a TCP stream; in segments, bytes and seconds since it began."""

    unanswered: int  # segments, or questions for more room, that nothing has come back for
    rtt_s: float
    resent: int  # segments
    acknowledged: int  # bytes
    unwilling_s: float  # the other end had no room


def listen_unix() -> socket.socket:
    """Listen at an abstract address of this machine, which no other machine has as well."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0meshwright-{secrets.token_hex(8)}")
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def listen_tcp(host: str) -> socket.socket:
    """Listen at a free port of `host`."""
    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """`unix:@NAME` or `tcp:HOST:PORT`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return "unix:@" + bytes(name)[1:].decode()
    return f"tcp:{name[0]}:{name[1]}"


def connect_unix(addresses: tuple[str, ...]) -> socket.socket | None:
    """A stream to the first of `addresses` of this machine that answers; None if none does."""
    for address in addresses:
        kind, _, place = address.partition(":")
        if kind == "unix":
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                stream.connect("\0" + place.removeprefix("@"))
            except OSError:
                stream.close()
            else:
                return ready(stream)
    return None


def tcp_places(addresses: tuple[str, ...]) -> list[tuple[str, int]]:
    """Host and port of each TCP address, in order."""
    found = []
    for address in addresses:
        kind, _, place = address.partition(":")
        if kind == "tcp":
            host, _, port = place.rpartition(":")
            found.append((host, int(port)))
    return found


def dial(place: tuple[str, int], source: str | None) -> socket.socket:
    """A TCP stream that begins to connect, from the address `source` if that is set: it can be
    written to once it has. Raises OSError."""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        ready(stream)
        if source is not None:
            stream.bind((source, 0))
        code = stream.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except OSError:
        stream.close()
        raise
    return stream


def drop(stream: socket.socket) -> None:
    """Close a TCP stream, and have the kernel send nothing more of what it holds."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def tcp_info(stream: socket.socket) -> TcpInfo:
    """Raises OSError."""
    said = _TCP_INFO.unpack(stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    words, longs, more = said[8:32], said[32:36], said[42:46]
    unanswered = words[4] + said[3]
    return TcpInfo(unanswered, words[15] / 1e6, words[23], longs[2], more[2] / 1e6)


def take(stream: socket.socket, place: memoryview) -> tuple[int, int]:
    """Read into `place`: how many bytes, and the Unix time in nanoseconds at which the last of them
    had come, 0 where the kernel does not say. Raises OSError."""
    n_bytes, said, _, _ = stream.recvmsg_into([place], 64)
    for _, kind, data in said:
        if kind == _TIMESTAMPS:
            seconds, rest_ns = _TIME.unpack(data[: _TIME.size])
            return n_bytes, seconds * 10**9 + rest_ns
    return n_bytes, 0


def ready(stream: socket.socket) -> socket.socket:
    """`stream` as the fabric wants it: not blocking, without delay, with large buffers."""
    stream.setblocking(False)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
    for forced, plain in (
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
    ):
        try:
            stream.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
        except OSError:  # only a privileged process may go beyond the system's limit
            stream.setsockopt(socket.SOL_SOCKET, plain, _BUFFER_BYTES)
    return stream
