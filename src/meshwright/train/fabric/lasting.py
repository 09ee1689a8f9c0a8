"""Frames to one member over a network, kept until they have arrived: a path may be lost, they go by
the next one.

The peer says on the same stream how many frames have come (`tally.py`). Where the stream breaks, or
what the kernel has sent is not even acknowledged by the other kernel, the next address of the peer
is dialled; the answer to the hello says how many frames had come, and the rest is sent again. A
peer that is late with reading is no reason: its kernel answers for it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from meshwright.train.fabric.figures import LARGE_BYTES, Figures
from meshwright.train.fabric.frames import ARRIVED_BYTES, Key, pack_header, unpack_arrived
from meshwright.train.fabric.sockets import dial, drop, take, tcp_info
from meshwright.train.fabric.streams import Counted

_PATIENCE_S = 0.4  # by then the kernel has sent what was lost once more, and has an answer
_ROUND_TRIPS = 4  # without headway: far longer than a queue that is merely full would grow
_MOST_ROUNDS = 4  # of all addresses, each with twice the patience of the one before, or as much
_COPIED_BYTES = 4 << 20  # what kernels hold by themselves; for more its sender waits anyway
_NO_SIGNAL = socket.MSG_NOSIGNAL

Place = tuple[str, int]


class _Loss(Enum):
    """How a stream was lost. Only of a path that is `SILENT` the machine of the peer says nothing;
    where it has `REFUSED`, the peer does not listen any more."""

    SILENT = auto()
    ENDED = auto()
    REFUSED = auto()


class Loop(Protocol):
    """The poll loop that streams are part of."""

    def watch(self, fd: int, handler: Callable[[], object], events: int) -> None:
        """Call `handler` on `events`, from now on."""

    def unwatch(self, fd: int) -> None:
        """No more."""


@dataclass(slots=True)
class _Frame:
    """`counted` waits until nobody needs the memory of `payload` any more."""

    key: Key
    header: bytes
    payload: memoryview
    counted: Counted | None
    offset: int = 0  # bytes that the kernel has taken of it
    begun_ns: int = 0

    @property
    def size(self) -> int:
        return len(self.header) + len(self.payload)

    @property
    def rest(self) -> list[bytes | memoryview]:
        """What the kernel has not taken."""
        over = self.offset - len(self.header)
        return [self.payload[over:]] if over >= 0 else [self.header[self.offset :], self.payload]

    def own(self) -> None:
        """Have memory of its own, if it has not."""
        if self.counted is not None:
            self.payload = memoryview(bytes(self.payload))

    def disown(self) -> None:
        """Nobody waits for it any more; what has to be sent of it, is."""
        self.own()
        self.counted = None

    def release(self) -> None:
        """Its memory is not needed any more."""
        if self.counted is not None:
            counted, self.counted = self.counted, None
            counted.one_done()

    def again(self) -> None:
        """To be sent from its first byte."""
        self.offset = self.begun_ns = 0


class Lasting:
    """Frames to one member, which listens at `places`; `hosts` are this member's own addresses.

    `greet` makes the hello of attempt 1, 2, ... to connect. `on_change` hears when a path is lost,
    none is left, or the peer is reached again. To a peer whose every address refuses, and so is
    dead, nothing more is sent: as `streams.Outgoing`, it swallows what it is given.
    """

    stream = None  # none that another would have to watch

    def __init__(
        self,
        places: list[Place],
        hosts: tuple[str, ...],
        greet: Callable[[int], bytes],
        loop: Loop,
        on_change: Callable[[], object],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._places, self._hosts, self._greet = places, hosts, greet
        self._loop, self._on_change, self._patience_s = loop, on_change, patience_s
        self._queue: deque[_Frame] = deque()
        self._kept: deque[_Frame] = deque()  # taken by the kernel, not known to have arrived
        self._arrived = 0
        self._again = 0  # frames at the head of the queue that a stream before had taken
        self._figures = Figures()
        self._stream: socket.socket | None = None
        self._hello: memoryview | None = None  # the rest of it
        self._events = 0
        self._answered = False
        self._said = b""
        self._buffer = memoryview(bytearray(1 << 12))
        self._at = self._attempt = self._tried = self._refused = self._rounds = 0
        self._dialled_s = self._retry_s = 0.0  # when, and when to dial again
        self._stuck: tuple[int, float] | None = None  # bytes acknowledged, and since when
        self.given_up = False
        self.cut = False  # no address answers, for now
        self._dial()

    @property
    def pending(self) -> bool:
        """Whether frames are under way."""
        return bool(self._queue or self._kept) and not self.given_up

    @property
    def restless(self) -> bool:
        """Whether it has to be tended: one that is cut tries on, so that all know when it heals."""
        return self.pending or (self.cut and not self.given_up)

    @property
    def host(self) -> str:
        """The address by which the peer is reached, or tried."""
        return self._places[self._at][0]

    def figures(self) -> dict[str, Any]:
        """What was measured since the last call."""
        told: dict[str, Any] = {"host": self.host, "answers": self._answered, "cut": self.cut}
        told |= self._figures.take()
        if self._stream is not None and self._hello is None:
            with contextlib.suppress(OSError):
                info = tcp_info(self._stream)
                told |= {"rtt_s": info.rtt_s, "resent": info.resent}
        return told

    def put(self, key: Key, payload: memoryview, counted: Counted) -> bool:
        """As `Outgoing.put`; `counted` hears of every frame that is not swallowed."""
        if self.given_up:
            return True
        self._queue.append(_Frame(key, pack_header(key, len(payload)), payload, counted))
        if self._stream is None:
            self._dial_again(time.monotonic())
        elif len(self._queue) == 1:
            self._push()
        return False

    def abandon(self, is_old: Callable[[Key], bool]) -> None:
        """As `Outgoing.abandon`: what is old and the peer has not seen the beginning of is
        dropped."""
        seen = [
            frame
            for i, frame in enumerate(self._queue)
            if i < self._again or frame.offset or not is_old(frame.key)
        ]
        self._queue = deque(seen)
        for frame in [*self._kept, *seen]:
            if is_old(frame.key):
                frame.disown()

    def close(self) -> None:
        """Give the stream up; who waits for it waits no more."""
        self.given_up = True
        if self._stream is not None:
            self._loop.unwatch(self._stream.fileno())
            self._stream.close()
            self._stream = None
        frames = [*self._kept, *self._queue]
        self._kept, self._queue = deque(), deque()
        for frame in frames:
            frame.release()

    def tend(self, now_s: float) -> None:
        """Go by another path if this one does not get on."""
        if self._stream is None:
            self._dial_again(now_s)
        elif self._is_stuck(self._stream, now_s):
            self._lose(_Loss.SILENT)

    def _is_stuck(self, stream: socket.socket, now_s: float) -> bool:
        if self._hello is not None:
            return now_s - self._dialled_s > self._dial_limit_s
        try:
            info = tcp_info(stream)
        except OSError:
            return True
        if not info.unanswered:
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != info.acknowledged:
            self._stuck = info.acknowledged, now_s
        else:
            limit_s = max(self._patience_s, _ROUND_TRIPS * info.rtt_s)
            return now_s - self._stuck[1] > limit_s
        return False

    # --- paths

    def _dial_again(self, now_s: float) -> None:
        if self.restless and now_s >= self._retry_s:
            self._dial()

    def _dial(self) -> None:
        self._attempt += 1
        self._answered, self._said, self._stuck = False, b"", None
        self._hello = memoryview(self._greet(self._attempt))
        self._dialled_s = time.monotonic()
        source = None
        if self._rounds % 2 and len(self._hosts) == len(self._places):
            source = self._hosts[self._at]  # where routes alone do not choose the network
        try:
            self._stream = dial(self._places[self._at], source)
        except OSError:
            self._next(_Loss.SILENT)
        else:
            self._watch(select.EPOLLIN | select.EPOLLOUT)

    def _lose(self, how: _Loss) -> None:
        """The present stream is of no use any more."""
        self._leave()
        self._again += len(self._kept)
        self._queue.extendleft(reversed(self._kept))
        self._kept.clear()
        for frame in self._queue:
            frame.again()
        self._next(how)

    @property
    def _dial_limit_s(self) -> float:
        """How long an address may take to answer, and how long none of them is asked again."""
        return self._patience_s * float(2 ** min(self._rounds, _MOST_ROUNDS))

    def _next(self, how: _Loss) -> None:
        if how is _Loss.SILENT:
            self._figures.lose(self.host)
        answered, self._answered = self._answered, False
        if not answered:
            self._tried += 1
            self._refused += how is _Loss.REFUSED
        self._at = (self._at + 1) % len(self._places)
        if self._refused == len(self._places):
            self.close()
        elif self._tried == len(self._places):
            self._retry_s = time.monotonic() + self._dial_limit_s
            self._tried = self._refused = 0
            self._rounds += 1
            self.cut = True
            self._on_change()
        elif how is _Loss.SILENT and answered:
            self._on_change()

    def _leave(self) -> None:
        if self._stream is not None:
            self._loop.unwatch(self._stream.fileno())
            drop(self._stream)
            self._stream, self._events = None, 0

    def _watch(self, events: int) -> None:
        if self._stream is not None and events != self._events:
            self._events = events
            self._loop.watch(self._stream.fileno(), self._handle, events)

    # --- what goes over one

    def _handle(self) -> None:
        """Something has come, or there is room."""
        if self._hello is None:
            self._listen()
        self._push()

    @property
    def _open(self) -> bool:
        """Whether frames may be sent: over a later stream, once the peer has said from which on."""
        greeted = self._hello is None and (self._answered or self._attempt == 1)
        return greeted and self._stream is not None

    def _push(self) -> None:
        """Send what goes."""
        if self._hello is not None and self._stream is not None:
            self._hello = self._hello[self._send([self._hello]) :] or None
        while self._queue and self._open:
            frame = self._queue[0]
            frame.begun_ns = frame.begun_ns or time.time_ns()
            sent = self._send(frame.rest)
            if self._stream is None:
                return
            frame.offset += sent
            if frame.offset < frame.size:
                break
            self._queue.popleft()
            self._again = max(0, self._again - 1)
            self._kept.append(frame)
            if frame.size <= _COPIED_BYTES:
                frame.own()
                frame.release()
        waits = self._hello is not None or (bool(self._queue) and self._open)
        self._watch(select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _send(self, parts: list[Any]) -> int:
        assert self._stream is not None
        try:
            return self._stream.sendmsg(parts, (), _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lose(_how(error))
            return 0

    def _listen(self) -> None:
        """Hear how many frames have arrived."""
        while self._stream is not None:
            try:
                n_bytes, came_ns = take(self._stream, self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(_how(error))
                return
            if not n_bytes:
                self._lose(_Loss.ENDED)
                return
            said = self._said + self._buffer[:n_bytes]
            end = len(said) - len(said) % ARRIVED_BYTES
            self._said = said[end:]
            if end:
                frames, held_ns = unpack_arrived(said[end - ARRIVED_BYTES : end])
                self._hear(frames - self._arrived, (came_ns or time.time_ns()) - held_ns)

    def _hear(self, frames: int, came_ns: int) -> None:
        """So many more have arrived, the last of them then."""
        resumes = not self._answered and self._attempt > 1
        sent = self._queue if resumes else self._kept
        if not 0 <= frames <= (self._again if resumes else len(sent)):
            self.close()  # this is no peer of ours
            return
        arrived = [sent.popleft() for _ in range(frames)]
        self._arrived += frames
        self._answered = True
        self._tried = self._refused = self._rounds = 0
        if resumes:
            self._again -= frames
            self.cut = False
            self._on_change()
        elif arrived:
            self._measure(arrived, came_ns)
        for frame in arrived:
            frame.release()

    def _measure(self, arrived: list[_Frame], came_ns: int) -> None:
        self._figures.count(len(arrived), sum(frame.size for frame in arrived))
        # What came with a large one, behind it, has hardly taken any time.
        large = [frame for frame in arrived if frame.size >= LARGE_BYTES]
        told = (large or arrived)[-1]
        if not large:
            self._figures.note_small(told.size, told.begun_ns, came_ns)
        elif self._stream is not None:
            with contextlib.suppress(OSError):
                unwilling_s = tcp_info(self._stream).unwilling_s
                self._figures.note_large(told.size, told.begun_ns, came_ns, unwilling_s)


def _how(error: OSError) -> _Loss:
    if isinstance(error, ConnectionRefusedError):
        return _Loss.REFUSED
    return _Loss.ENDED if isinstance(error, ConnectionError) else _Loss.SILENT
