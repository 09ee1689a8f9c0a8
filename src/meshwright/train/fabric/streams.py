"""The two directions of a pair of members: frames out, and frames in. Nothing here blocks."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.train.fabric.frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    Greeting,
    Key,
    pack_header,
    unpack_header,
)
from meshwright.train.fabric.sockets import take
from meshwright.train.fabric.tally import Tally

_SCRATCH_BYTES = 1 << 16
_NO_SIGNAL = socket.MSG_NOSIGNAL  # a peer that is gone is no reason to die


class Counted(Protocol):
    """Something that waits for frames to come and go."""

    missing: int

    def one_done(self) -> None:
        """One of them has."""


@dataclass
class _Frame:
    """What the kernel has not taken yet of a frame; `counted` waits for its last byte."""

    parts: list[memoryview]
    counted: Counted | None = None
    key: Key | None = None
    begun: bool = False  # some of it is on the wire

    def leave(self, n_bytes: int) -> bool:
        """The kernel has taken `n_bytes` more; whether that was all."""
        self.begun = self.begun or n_bytes > 0
        while self.parts and n_bytes >= len(self.parts[0]):
            n_bytes -= len(self.parts.pop(0))
        if n_bytes:
            self.parts[0] = self.parts[0][n_bytes:]
        return not self.parts

    def copied(self) -> _Frame:
        """The same bytes in memory of their own, for nobody."""
        return _Frame([memoryview(bytes(part)) for part in self.parts], begun=True)


class Outgoing:
    """Frames to one member. Once its peer is gone it swallows what it is given."""

    def __init__(self, stream: socket.socket | None, hello: bytes) -> None:
        self._stream = stream
        self._backlog: deque[_Frame] = deque([_Frame([memoryview(hello)], begun=True)])

    @property
    def stream(self) -> socket.socket | None:
        """None once it is broken."""
        return self._stream

    @property
    def given_up(self) -> bool:
        """Whether nothing that it is given will arrive."""
        return self._stream is None

    def put(self, key: Key, payload: memoryview, counted: Counted) -> bool:
        """Send a frame; whether all of it has left. If not, `counted` hears of it later, and the
        payload must stay as it is until then."""
        header = pack_header(key, len(payload))
        if self._backlog and not self.flush():
            self._backlog.append(_Frame([memoryview(header), payload], counted, key))
            return False
        if self._stream is None:
            return True
        sent = self._send([header, payload])
        if sent == len(header) + len(payload) or self._stream is None:
            return True
        frame = _Frame([memoryview(header), payload], counted, key)
        frame.leave(sent)
        self._backlog.append(frame)
        return False

    def flush(self) -> bool:
        """Send what waits; whether nothing is left."""
        while self._backlog and self._stream is not None:
            frame = self._backlog[0]
            sent = self._send(frame.parts)
            if self._stream is None:
                break
            if not frame.leave(sent):
                return False
            self._backlog.popleft()
            if frame.counted is not None:
                frame.counted.one_done()
        return True

    def abandon(self, is_old: Callable[[Key], bool]) -> None:
        """Nobody wants what waits and is old: only the frame on the wire is completed, from a copy,
        so that its memory is free and the stream stays readable."""
        waiting, self._backlog = self._backlog, deque()
        for frame in waiting:
            if frame.key is None or not is_old(frame.key):
                self._backlog.append(frame)
            elif frame.begun:
                self._backlog.append(frame.copied())

    def close(self) -> None:
        """Give the stream up; who waits for it waits no more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        waiting, self._backlog = self._backlog, deque()
        for frame in waiting:
            if frame.counted is not None:
                frame.counted.one_done()

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        assert self._stream is not None
        try:
            return self._stream.sendmsg(parts, (), _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0


class Receiver(Protocol):
    """Who wants the frames of an incoming stream."""

    def welcome(self, hello: memoryview) -> Greeting | None:
        """Who says this hello; None: it may not come in."""

    def resume(self, greeting: Greeting, stream: Incoming) -> Tally | None:
        """What has come of a session, which goes on over `stream`; None: it does not."""

    def place_for(self, key: Key, n_bytes: int, member: int) -> memoryview:
        """Where the payload of a frame that has begun to arrive goes."""

    def arrived(self, key: Key, place: memoryview) -> None:
        """It is complete."""


class Incoming:
    """Frames from one member. Small ones are read many at a time, the rest of a large one straight
    into its place."""

    def __init__(self, stream: socket.socket, receiver: Receiver) -> None:
        self.stream, self._receiver = stream, receiver
        self.member: int | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._head = bytearray()
        self._key: Key | None = None
        self._place = self._rest = memoryview(b"")
        self._tally: Tally | None = None  # where the sender keeps frames until they have arrived

    def read(self) -> bool:
        """Take in what has come; false once there will be no more."""
        goes_on = self._read()
        if self._tally is not None:
            self._tally.may_tell(self.stream)
        return goes_on

    def acknowledge(self) -> None:
        """Tell the sender what has come so far."""
        if self._tally is not None:
            self._tally.tell(self.stream)

    def _read(self) -> bool:
        while True:
            direct = self._key is not None
            target = self._rest if direct else self._scratch
            try:
                if self._tally is None:
                    n_bytes = self.stream.recv_into(target)
                else:
                    n_bytes, self._tally.came_ns = take(self.stream, target)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not n_bytes:
                return False
            if direct:
                self._fill(n_bytes)
            elif not self._parse(target[:n_bytes]):
                return False
            if n_bytes < len(target):  # there was no more
                return True

    def abandon(self, is_old: Callable[[Key], bool]) -> None:
        """Old frames are void: the rest of one goes nowhere."""
        if self._key is not None and is_old(self._key):
            self._rest = memoryview(bytearray(len(self._rest)))
            self._place = self._rest

    def close(self) -> None:
        """Give the stream up."""
        with contextlib.suppress(OSError):
            self.stream.close()

    def _parse(self, data: memoryview) -> bool:
        """All frames in `data`; false if the peer is not of this run."""
        while len(data):
            if self._key is not None:
                n_bytes = min(len(data), len(self._rest))
                self._rest[:n_bytes] = data[:n_bytes]
                self._fill(n_bytes)
                data = data[n_bytes:]
                continue
            wanted = HELLO_BYTES if self.member is None else HEADER_BYTES
            n_bytes = min(len(data), wanted - len(self._head))
            self._head += data[:n_bytes]
            data = data[n_bytes:]
            if len(self._head) < wanted:
                return True
            head, self._head = self._head, bytearray()
            if self.member is None:
                if not self._greet(head):
                    return False
            else:
                self._key, size = unpack_header(head)
                self._place = self._receiver.place_for(self._key, size, self.member)
                self._rest = self._place
                self._fill(0)
        return True

    def _greet(self, head: bytearray) -> bool:
        greeting = self._receiver.welcome(memoryview(head))
        if greeting is None:
            return False
        if greeting.session:
            self._tally = self._receiver.resume(greeting, self)
            if self._tally is None:
                return False
        self.member = greeting.member
        return True

    def _fill(self, n_bytes: int) -> None:
        self._rest = self._rest[n_bytes:]
        if not len(self._rest) and self._key is not None:
            key, self._key = self._key, None
            if self._tally is not None:
                self._tally.add(len(self._place))
            self._receiver.arrived(key, self._place)
