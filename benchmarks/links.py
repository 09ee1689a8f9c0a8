"""What it costs to keep frames until they have arrived: the fabric over TCP on loopback between two
processes, with and without, turn about.

    python benchmarks/links.py

Prints megabytes a second by size of frame, and microseconds for an all-reduce of 64 bytes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.frames import Greeting, hello
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.fabric.lasting import Lasting
from meshwright.train.fabric.operation import Operation
from meshwright.train.fabric.orders import Orders, Table
from meshwright.train.fabric.sockets import ready, tcp_places
from meshwright.train.fabric.streams import Outgoing

SECRET = "secret"
ROUNDS = 7
SIZES = {1 << 16: 2000, 1 << 20: 300, 16 << 20: 20}  # bytes of a frame: how many in a round
SMALL = 3000


class Plain(Fabric):
    """One whose frames over TCP are lost with the stream."""

    def _open(self, member: int) -> Outgoing | Lasting:
        stream = socket.create_connection(tcp_places(self.table.addresses[member])[0])
        said = hello(SECRET, Greeting(self.member), member, self.epoch)
        outgoing = self._outgoing[member] = Outgoing(ready(stream), said)
        return outgoing


def main() -> None:
    """Fork the peer, measure, and say what came of it."""
    ours, theirs = socket.socketpair()
    member = 0 if (pid := os.fork()) else 1
    talk = ours if pid else theirs
    groups = {kind.__name__: _group(kind, member, talk) for kind in (Plain, Fabric)}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, group in groups.items():
            for size, count in SIZES.items():
                took_s = _time(group, partial(_stream, group, size, count))
                key = f"{size >> 10} KiB, MB/s"
                found.setdefault((key, name), []).append(size * count / took_s / 1e6)
            took_s = _time(group, partial(_sums, group))
            found.setdefault(("sum of 64 B, us", name), []).append(took_s / SMALL * 1e6)
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    for (what, name), values in sorted(found.items()):
        kind = "kept" if name == "Fabric" else "plain"
        print(f"{what:>18} {kind:>6}: {median(values):8.1f}  ({min(values):.1f}-{max(values):.1f})")


def _group(kind: type[Fabric], member: int, talk: socket.socket) -> FabricGroup:
    orders, _ = socket.socketpair()
    fabric = kind(member, Orders(orders.detach()), SECRET, ("127.0.0.1",))
    address = fabric.addresses[1]
    talk.sendall(address.encode().ljust(64))
    other = talk.recv(64, socket.MSG_WAITALL).decode().strip()
    fabric.enter(Table(1, {0: 0, 1: 1}, {member: (address,), 1 - member: (other,)}))
    return FabricGroup(fabric, (0, 1), 2)


def _time(group: FabricGroup, work: Callable[[], object]) -> float:
    group.all_reduce(torch.ones(1)).wait()
    begun_s = time.perf_counter()
    work()
    group.all_reduce(torch.ones(1)).wait()
    return time.perf_counter() - begun_s


def _stream(group: FabricGroup, size: int, count: int) -> None:
    """From the first to the second, as fast as it goes; eight under way."""
    places = [torch.zeros(size, dtype=torch.uint8) for _ in range(8)]
    under_way: list[Operation] = []
    for i in range(count):
        if len(under_way) == len(places):
            under_way.pop(0).wait()
        place = places[i % len(places)]
        sends = group.index == 0
        under_way.append(group.send(place, 1) if sends else group.receive(place, 0))
    for op in under_way:
        op.wait()


def _sums(group: FabricGroup) -> None:
    x = torch.ones(16)
    for _ in range(SMALL):
        group.all_reduce(x).wait()


if __name__ == "__main__":
    main()
