"""Streams that lose their path: every frame arrives once and in order, whatever is cut and when."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.fabric.frames import Greeting, Key, hello, open_hello
from meshwright.train.fabric.lasting import Lasting
from meshwright.train.fabric.sockets import listen_tcp, ready
from meshwright.train.fabric.streams import Incoming
from meshwright.train.fabric.tally import Tallies, Tally

_BOUND_S = 20.0
_SECRET = "s"


class Loop:
    """The poll loop of the sender."""

    def __init__(self) -> None:
        self.poller = select.epoll()
        self.handlers: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, handler: Callable[[], object], events: int) -> None:
        known = fd in self.handlers
        self.handlers[fd] = handler
        (self.poller.modify if known else self.poller.register)(fd, events)

    def unwatch(self, fd: int) -> None:
        del self.handlers[fd]
        self.poller.unregister(fd)

    def turn(self) -> None:
        for fd, _ in self.poller.poll(0.001):
            if fd in self.handlers:
                self.handlers[fd]()


@dataclass
class Count:
    """An operation."""

    missing: int = 0

    def one_done(self) -> None:
        self.missing -= 1


@dataclass
class Peer:
    """Who gets the frames; it reads when it is told to."""

    listeners: list[socket.socket]
    tallies: Tallies = field(default_factory=Tallies)
    streams: list[Incoming] = field(default_factory=list)
    got: list[tuple[int, bytes]] = field(default_factory=list)
    newest: Incoming | None = None
    deaf: bool = False

    def welcome(self, said: memoryview) -> Greeting | None:
        return open_hello(said, _SECRET, 1)

    def resume(self, greeting: Greeting, stream: Incoming) -> Tally | None:
        tally = self.tallies.resume(greeting)
        if tally is not None:
            if self.newest is not None:
                self.newest.close()
                self.streams.remove(self.newest)
            self.newest = stream
        return tally

    def place_for(self, key: Key, n_bytes: int, member: int) -> memoryview:
        assert (key.source, member) == (0, 0)
        return memoryview(bytearray(n_bytes))

    def arrived(self, key: Key, place: memoryview) -> None:
        self.got.append((key.sequence, bytes(place)))

    def turn(self) -> None:
        for listener in self.listeners:
            with suppress(BlockingIOError):
                self.streams.append(Incoming(ready(listener.accept()[0]), self))
        for stream in list(self.streams):
            if stream in self.streams and not stream.read():
                stream.close()
                self.streams.remove(stream)
                self.newest = None if self.newest is stream else self.newest
        if self.newest is not None and self.tallies.overdue():
            self.newest.acknowledge()

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for stream in self.streams:
            stream.close()


@dataclass
class Relay:
    """A network that passes on as much as it is told to, and loses the rest when it is cut."""

    to: tuple[str, int]
    listener: socket.socket = field(default_factory=lambda: listen_tcp("127.0.0.1"))
    ends: list[socket.socket] = field(default_factory=list)

    def turn(self, n_bytes: int) -> None:
        with suppress(BlockingIOError):
            front = self.listener.accept()[0]
            self.ends = [front, socket.create_connection(self.to)]
            for end in self.ends:
                end.setblocking(False)
        if self.ends:
            front, back = self.ends
            with suppress(BlockingIOError):
                back.sendall(front.recv(n_bytes))
            with suppress(BlockingIOError):
                front.sendall(back.recv(n_bytes))

    def cut(self) -> None:
        for end in self.ends:
            end.close()
        self.ends = []

    def close(self) -> None:
        self.cut()
        self.listener.close()


def _frame(sequence: int, n_bytes: int) -> tuple[Key, memoryview]:
    payload = (bytes(range(251)) * (n_bytes // 251 + 2))[sequence % 251 :][:n_bytes]
    return Key(1, 0, 2, sequence), memoryview(payload)


def _greet(attempt: int) -> bytes:
    return hello(_SECRET, Greeting(0, 77, attempt), 1, 1)


def _place(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()
    return host, port


_ACTS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([0, 1, 40, 3000, 200_000])),
    st.tuples(st.just("pass"), st.sampled_from([1, 30, 5000, 300_000])),
    st.tuples(st.just("cut"), st.just(0)),
    st.tuples(st.just("abandon"), st.just(0)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(_ACTS, max_size=40))
def test_whatever_is_cut_each_frame_arrives_once_and_in_order(acts: list[tuple[str, int]]) -> None:
    peer = Peer([listen_tcp("127.0.0.1")])
    relay, loop, count, sent = Relay(_place(peer.listeners[0])), Loop(), Count(), 0
    stream = Lasting([_place(relay.listener)], (), _greet, loop, lambda: None, 0.05)
    try:
        abandoned = False
        for act, amount in acts:
            if act == "put":
                count.missing += 1
                sent += 1
                assert not stream.put(*_frame(sent, amount), count)
            elif act == "cut":
                relay.cut()
            elif act == "abandon":
                stream.abandon(lambda _: True)
                abandoned = True
            loop.turn()
            relay.turn(amount if act == "pass" else 64)
            peer.turn()
            stream.tend(time.monotonic())
        deadline_s = time.monotonic() + _BOUND_S
        while stream.restless:
            assert time.monotonic() < deadline_s, "frames do not arrive"
            loop.turn()
            relay.turn(1 << 20)
            peer.turn()
            stream.tend(time.monotonic())
        numbers = [number for number, _ in peer.got]
        if abandoned:  # what nobody had seen any of may be left out
            assert numbers == sorted(set(numbers))
        else:
            assert numbers == list(range(1, sent + 1))
            assert count.missing == 0
        for number, data in peer.got:
            assert data == bytes(_frame(number, len(data))[1])
    finally:
        stream.close()
        relay.close()
        peer.close()
        loop.poller.close()


class Pair:
    """A stream to a peer, and what turns both until something is so."""

    def __init__(self, places: list[tuple[str, int]], listeners: list[socket.socket]) -> None:
        self.peer, self.loop, self.count = Peer(listeners), Loop(), Count()
        self.changes = 0
        self.stream = Lasting(places, (), _greet, self.loop, self._change, 0.05)

    def _change(self) -> None:
        self.changes += 1

    def put(self, sequence: int, n_bytes: int) -> None:
        self.count.missing += 1
        if self.stream.put(*_frame(sequence, n_bytes), self.count):
            self.count.one_done()

    def until(self, what: Callable[[], object], reads: bool = True) -> None:
        deadline_s = time.monotonic() + _BOUND_S
        while not what():
            assert time.monotonic() < deadline_s, "it does not happen"
            self.loop.turn()
            if reads:
                self.peer.turn()
            self.stream.tend(time.monotonic())

    def pause(self, seconds: float) -> None:
        """The peer reads nothing for a while."""
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end_s, reads=False)

    def close(self) -> None:
        self.stream.close()
        self.peer.close()
        self.loop.poller.close()


def test_an_address_that_does_not_answer_is_left_for_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:  # the kernel has no room for more, and is silent
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        good = listen_tcp("127.0.0.1")
        pair = Pair([_place(full), _place(good)], [good])
        pair.put(1, 10)
        pair.until(lambda: not pair.stream.restless)
        assert [number for number, _ in pair.peer.got] == [1]
        told = pair.stream.figures()
        assert (told["lost"], told["frames"], told["cut"]) == (["127.0.0.1"], 1, False)
        pair.close()
        for one in waiting:
            one.close()


def test_to_a_dead_peer_nothing_is_sent_any_more() -> None:
    listeners = [listen_tcp("127.0.0.1"), listen_tcp("127.0.0.1")]
    pair = Pair([_place(one) for one in listeners], listeners)
    pair.put(1, 10)
    pair.until(lambda: not pair.stream.restless)
    pair.peer.close()
    pair.put(2, 100)
    pair.put(3, 9 << 20)
    pair.until(lambda: pair.stream.given_up, reads=False)
    assert pair.count.missing == 0 and not pair.stream.restless
    assert not pair.loop.handlers
    pair.put(4, 10)  # swallowed
    assert pair.count.missing == 0
    assert pair.stream.figures()["lost"] == []  # it is no path that was lost
    pair.close()


def test_a_peer_without_room_is_waited_for_on_the_same_path() -> None:
    listener = listen_tcp("127.0.0.1")
    pair = Pair([_place(listener)], [listener])
    pair.put(1, 10)
    pair.until(lambda: not pair.stream.restless)
    pair.put(2, 40 << 20)  # far more than kernels hold

    pair.pause(0.5)  # ten times its patience
    assert pair.count.missing == 1 and pair.changes == 0
    pair.until(lambda: not pair.stream.restless)
    assert [number for number, _ in pair.peer.got] == [1, 2] and pair.count.missing == 0
    assert pair.stream.figures()["lost"] == []
    pair.close()


def test_what_a_peer_is_late_with_is_not_the_time_of_the_path() -> None:
    listener = listen_tcp("127.0.0.1")
    pair = Pair([_place(listener)], [listener])
    pair.put(1, 10)
    pair.until(lambda: not pair.stream.restless)
    pair.stream.figures()
    late_s = 0.4
    for sequence, n_bytes in ((2, 10), (3, 200_000)):
        pair.put(sequence, n_bytes)
        pair.pause(late_s)
        pair.until(lambda: not pair.stream.restless)
    told = pair.stream.figures()
    assert told["frames"] == 2
    assert told["small_s"] < late_s / 4
    assert told["bytes_per_s"] > 200_000 / (late_s / 4)
    pair.close()
