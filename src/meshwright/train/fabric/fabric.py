"""Messages between the members of a run that survives the loss of some of them.

Each pair of members has one stream for each direction, opened by its sender when it is needed. A
frame says its epoch, the rank it comes from, channel and sequence number: it is matched by these,
not by the stream, so that whoever holds a rank may send in its place. Frames of an older epoch are
dropped, those of a newer one kept.

There is no thread: whoever waits, or begins something, turns the one poll loop. It also listens to
the orders; a table of a higher epoch raises `Interrupted` out of any wait. A stream that ends is no
failure: what was to come over it is waited for until a table says how to go on.

The channels inside of a replica may outlive a table, with the epoch that they had: so its ranks can
go on with what they are at while somebody in another one is replaced (`in_place`).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from meshwright.base.pulse import PulseWriter
from meshwright.train.fabric.frames import Greeting, Key, hello, open_hello
from meshwright.train.fabric.lasting import Lasting
from meshwright.train.fabric.mail import Mail
from meshwright.train.fabric.network import Network
from meshwright.train.fabric.operation import Operation
from meshwright.train.fabric.orders import Interrupted, Orders, Table
from meshwright.train.fabric.severed import Severed
from meshwright.train.fabric.sockets import (
    address_of,
    connect_unix,
    listen_tcp,
    listen_unix,
    ready,
)
from meshwright.train.fabric.streams import Counted, Incoming, Outgoing
from meshwright.train.fabric.tally import Tally

_log = logging.getLogger(__name__)

_NAP_S = 0.5  # between two looks at what a signal may have asked for
_LOOK_S = 0.001  # between two looks at the streams of somebody who only sends


class Fabric:
    """The streams of `member`; `orders` are those of its agent, `secret` that of the run.

    It listens on this machine and at each of `hosts`. `on_links` hears when a path to a member is
    lost or found again, `pulse` of operations and waits.
    """

    def __init__(
        self,
        member: int,
        orders: Orders,
        secret: str,
        hosts: tuple[str, ...] = (),
        pulse: PulseWriter | None = None,
        on_links: Callable[[], object] = lambda: None,
    ) -> None:
        self.member, self.orders = member, orders
        self.table = Table(0, {}, {})
        self.rank = self._place = -1
        # What to do with a new table where the operation that is waited for, if any, is inside;
        # false: nothing has been done, and it interrupts.
        self.in_place: Callable[[Table], bool] = lambda _: False
        self._inside: set[int] = set()  # channels
        self._inside_epoch = 0
        self._secret, self._pulse = secret, pulse
        self.network = Network(hosts, self, on_links, Severed(member, self._put, on_links))
        self._listeners = [listen_unix(), *map(listen_tcp, hosts)]
        self._outgoing: dict[int, Outgoing | Lasting] = {}
        self._incoming: dict[int, Incoming] = {}
        self._mail = Mail()
        self._behind: set[int] = set()
        self._looked_s = 0.0
        self._busy = 0  # in the midst of what must not be cut short
        self._void = False  # interrupted already, on the way out
        self._poller = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        for listener in self._listeners:
            self.watch(listener.fileno(), partial(self._accept, listener))
        self.watch(orders.fd, self._listen)

    @property
    def addresses(self) -> list[str]:
        """Where it listens, the best first."""
        return [address_of(listener) for listener in self._listeners]

    @property
    def epoch(self) -> int:
        """Of the table that it goes by."""
        return self.table.epoch

    def enter(self, table: Table, keep_inside: bool = False) -> None:
        """Go by `table` from now on: whatever was under way is forgotten, but with `keep_inside`
        what was inside."""
        self.table = table
        self.rank = -1 if (rank := table.rank_of(self.member)) is None else rank
        self._place = -1 if (place := table.place_of(self.member)) is None else place
        if keep_inside:
            self._forget_old()
        else:
            self.leave_inside()
        for member, outgoing in list(self._outgoing.items()):
            if outgoing.given_up or member not in table.addresses:
                self._forget(member)
        self._void = False

    def leave_inside(self) -> None:
        """What is under way inside is void as well."""
        self._inside_epoch = self.epoch
        self._forget_old()

    def _forget_old(self) -> None:
        self._mail.abandon(self._is_old)
        for incoming in self._incoming.values():
            incoming.abandon(self._is_old)
        for outgoing in self._outgoing.values():
            outgoing.abandon(self._is_old)
        self.network.severed.abandon(self._is_old)

    def _is_old(self, key: Key) -> bool:
        return key.epoch < self.epoch_of(key.channel in self._inside)

    def epoch_of(self, inside: bool) -> int:
        """That new operations have."""
        return self._inside_epoch if inside else self.table.epoch

    def forget_channels(self) -> None:
        """Another layout has other replicas."""
        self._inside.clear()

    def is_inside(self, channel: int) -> None:
        """`channel` and the odd one after it join ranks of one replica."""
        self._inside |= {channel, channel + 1}

    def await_table(self, timeout_s: float | None = None) -> Table | None:
        """The next table; None if the time is over first, or the order is to stop."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.orders.stop:
            left_s = _NAP_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            try:
                self._turn(min(left_s, _NAP_S))
            except Interrupted as interruption:
                return interruption.table
        return None

    def operation(self, inside: bool = False) -> Operation:
        """Something new to wait for. Raises Interrupted."""
        self.look()
        if self._pulse is not None:
            self._pulse.begin()
        return Operation(self, inside=inside)

    def hold(self) -> None:
        """Let no table come in between."""
        self._busy += 1

    def let_go(self) -> None:
        """It may."""
        self._busy -= 1

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A block in which nothing is waited for, and no table comes in between."""
        self.look()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def send(self, op: Operation, rank: int, channel: int, sequence: int, data: memoryview) -> None:
        """Send `data` to `rank` (or any place); it must stay as it is until `op` is done."""
        self.hold()
        try:
            member = self.table.places[rank]
            key = Key(self.epoch_of(op.inside), self._place, channel, sequence)
            if not self.network.severed.hold(member, key, data, op):
                self._put(member, key, data, op)
        finally:
            self._busy -= 1

    def _put(self, member: int, key: Key, data: memoryview, op: Counted) -> None:
        outgoing = self._outgoing.get(member) or self._open(member)
        op.missing += 1
        if outgoing.put(key, data, op):
            op.one_done()
        elif member not in self._behind and outgoing.stream is not None:
            self._behind.add(member)
            self.watch(outgoing.stream.fileno(), lambda: self._flush(member), select.EPOLLOUT)

    def receive(
        self, op: Operation, rank: int, channel: int, sequence: int, place: memoryview
    ) -> None:
        """Receive into `place` what `rank` sends under this number; done when `op` is."""
        key = Key(self.epoch_of(op.inside), rank, channel, sequence)
        self._mail.receive(key, place, op)

    def halt(self) -> NoReturn:
        """Go on only by another table. Raises Interrupted."""
        if self._pulse is not None:
            self._pulse.wait()
        while True:
            self._turn(None)

    def wait(self, op: Operation) -> None:
        """Turn until `op` is done. Raises Interrupted."""
        if op.missing:
            self._tell_wait(op)
            while op.missing:
                self._turn(None, op)
            if self._pulse is not None:
                self._pulse.resume()
        if self._pulse is not None:
            self._pulse.end()

    def _tell_wait(self, op: Operation) -> None:
        if self._pulse is not None:
            source = self._mail.source_for(op)
            self._pulse.wait(None if source is None else self.table.places.get(source))

    def look(self) -> None:
        """Take in what has come, if nobody has for a while. Raises Interrupted."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._turn(0.0)

    def hear(self) -> None:
        """Read the orders, in the handler of a signal: in the midst of the caller's work, but not
        of this fabric's, which reads them by itself. Raises Interrupted."""
        if not self._busy and not self._void:
            self._listen()
            self._obey(None)

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was sent over a network has arrived, for its sender's last act. What
        is left for one that has no place any more, and may be cut off, is of no use."""
        self.network.acknowledge()
        peers = self.table.places.values()
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(Interrupted):
            while self.network.pending(peers) and (left_s := deadline_s - time.monotonic()) > 0:
                self._turn(left_s)

    def close(self) -> None:
        """Give everything up."""
        for incoming in self._incoming.values():
            incoming.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        for listener in self._listeners:
            listener.close()
        self._poller.close()

    # What the streams ask for.

    def welcome(self, said: memoryview) -> Greeting | None:
        """See `streams.Receiver`."""
        found = open_hello(said, self._secret, self.member)
        if found is None:
            _log.warning("refused a stream that did not prove itself")
        return found

    def resume(self, greeting: Greeting, stream: Incoming) -> Tally | None:
        """See `streams.Receiver`."""
        tally, before = self.network.resume(greeting, stream)
        if before is not None:
            self._drop(before)
        return tally

    def place_for(self, key: Key, n_bytes: int, member: int) -> memoryview:
        """See `streams.Receiver`."""
        if self._is_old(key) or (
            key.epoch <= self.epoch and self.table.places.get(key.source) != member
        ):
            return memoryview(bytearray(n_bytes))
        return self._mail.place_for(key, n_bytes)

    def arrived(self, key: Key, place: memoryview) -> None:
        """See `streams.Receiver`."""
        self._mail.arrived(key, place)

    # The loop.

    def _turn(self, timeout_s: float | None, awaited: Operation | None = None) -> None:
        """Handle what is ready, waiting for the first of it. Raises Interrupted."""
        self._obey(awaited)  # a table may have come while nothing could be done about it
        if awaited is not None and not awaited.missing:
            return
        self._busy += 1
        try:
            for fd, _ in self._poller.poll(self.network.patience_s(timeout_s)):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            self.network.tend()
        finally:
            self._busy -= 1
        self._looked_s = time.monotonic()
        self._obey(awaited)

    def _obey(self, awaited: Operation | None) -> None:
        newest = self.orders.newest
        if self._busy or newest is None or newest.epoch <= self.epoch:
            return
        if (awaited is None or awaited.inside) and self.in_place(newest):
            if awaited is not None and awaited.missing:
                self._tell_wait(awaited)
            return
        self._void = True
        raise Interrupted(newest)

    def watch(self, fd: int, handler: Callable[[], object], events: int = select.EPOLLIN) -> None:
        """See `lasting.Loop`."""
        self._handlers[fd] = handler
        try:
            self._poller.register(fd, events)
        except FileExistsError:
            self._poller.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """See `lasting.Loop`."""
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _listen(self) -> None:
        if not self.orders.read():  # the agent is gone, or will speak by another way
            self.unwatch(self.orders.fd)
        self.network.severed.begin(self.orders.broken)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            incoming = Incoming(ready(stream), self)
            fd = stream.fileno()
            self._incoming[fd] = incoming
            self.watch(fd, partial(self._read, incoming))

    def _read(self, incoming: Incoming) -> None:
        if not incoming.read():
            self._drop(incoming)

    def _drop(self, incoming: Incoming) -> None:
        fd = incoming.stream.fileno()
        if self._incoming.pop(fd, None) is not None:
            self.unwatch(fd)
        incoming.close()

    def _open(self, member: int) -> Outgoing | Lasting:
        addresses = self.table.addresses.get(member, ())
        stream = connect_unix(addresses)

        def greet(me: Greeting) -> bytes:
            return hello(self._secret, me, member, self.epoch)

        outgoing: Outgoing | Lasting | None = None
        if stream is None:
            outgoing = self.network.open(member, addresses, greet, self.member)
        if outgoing is None:
            outgoing = Outgoing(stream, greet(Greeting(self.member)))
        self._outgoing[member] = outgoing
        return outgoing

    def _flush(self, member: int) -> None:
        outgoing = self._outgoing[member]
        assert isinstance(outgoing, Outgoing)
        fd = None if outgoing.stream is None else outgoing.stream.fileno()
        if outgoing.flush() and fd is not None:
            self._behind.discard(member)
            if outgoing.stream is None:  # closed: the kernel forgets it by itself
                self._handlers.pop(fd, None)
            else:
                self.unwatch(fd)

    def _forget(self, member: int) -> None:
        outgoing = self._outgoing.pop(member)
        self.network.forget(member)
        if outgoing.stream is not None:
            self.unwatch(outgoing.stream.fileno())
        self._behind.discard(member)
        outgoing.close()
