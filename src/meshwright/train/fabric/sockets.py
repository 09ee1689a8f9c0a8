"""Stream sockets of the members: where they listen, and how they reach each other."""

from __future__ import annotations

import contextlib
import socket

_BUFFER_BYTES = 4 << 20  # so that most messages leave in one write
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_BACKLOG = 1024
_CONNECT_S = 5.0  # for a handshake over a network


def listen_unix() -> socket.socket:
    """Listen at an abstract address of this machine that the kernel picks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
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


def connect(addresses: tuple[str, ...]) -> socket.socket | None:
    """A stream to the first of `addresses` that answers; None if none does."""
    for address in addresses:
        with contextlib.suppress(OSError):
            return ready(_connect(address))
    return None


def _connect(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind == "unix":
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect("\0" + place.removeprefix("@"))
        except OSError:
            stream.close()
            raise
        return stream
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_CONNECT_S)


def ready(stream: socket.socket) -> socket.socket:
    """`stream` as the fabric wants it: not blocking, without delay, with large buffers."""
    stream.setblocking(False)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for forced, plain in (
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
    ):
        try:
            stream.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
        except OSError:  # only a privileged process may go beyond the system's limit
            stream.setsockopt(socket.SOL_SOCKET, plain, _BUFFER_BYTES)
    return stream
