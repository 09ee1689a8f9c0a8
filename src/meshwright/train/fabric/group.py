"""The collectives of one group of ranks over the fabric.

Sums are made in rank order, on one rank or on all alike: whoever holds a rank, no bit changes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.operation import Operation

_SMALL_BYTES = 1 << 15  # whole buffers travel, not slices of them
_PHASES = 2  # of a collective: each has a number of its own
_FEW = 4  # ranks that send a small buffer to each other rather than through the first


class FabricGroup:
    """See `comm.Group`. `channel`, an even number, tells groups apart that share ranks; messages
    between two ranks go over the odd one after it. `inside`: all ranks are of one replica, and use
    it for nothing but the passes of a step.

    Frames are numbered when a collective begins, whenever they are sent: all ranks begin the
    collectives of a group in the same order.
    """

    def __init__(
        self, fabric: Fabric, ranks: tuple[int, ...], channel: int, inside: bool = False
    ) -> None:
        self.ranks, self._fabric, self._channel = ranks, fabric, channel
        self._inside = inside
        if inside:
            fabric.is_inside(channel)
        self._epoch = -1
        self._number = 0
        self._sent: list[int] = []
        self._got: list[int] = []

    @property
    def index(self) -> int:
        """This rank's place."""
        return self.ranks.index(self._fabric.rank)

    def all_reduce(self, x: Tensor, largest: bool = False) -> Operation:
        """See `comm.Group`."""
        combine: Callable[[Tensor, Tensor], object] = _largest if largest else Tensor.add_
        size, n_bytes = len(self.ranks), x.numel() * x.element_size()
        if size > 2 and n_bytes > _SMALL_BYTES:
            return self._reduce_slices(x, combine)
        if size > _FEW:
            return self._reduce_at_first(x, combine)
        op, number = self._collective()
        parts = x.new_empty(size, x.numel())
        for i in self._others():
            self._receive(op, i, number, bytes_of(parts[i]))
        data = bytes_of(x)
        for i in self._others():
            self._send(op, i, number, data)
        op.then = lambda: self._combine(parts, x.view(-1), combine)
        return op.begun()

    def all_gather(self, out: Tensor, x: Tensor) -> Operation:
        """See `comm.Group`."""
        op, number = self._collective()
        mine, parts = bytes_of(x), bytes_of(out)
        if len(self.ranks) > _FEW and len(parts) <= _SMALL_BYTES:
            return self._gather_at_first(op, number, mine, parts)
        arriving = _cut(parts, [len(mine)] * len(self.ranks))
        self._exchange(op, number, lambda _: mine, arriving)
        return op.begun()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: list[int] | None, in_rows: list[int] | None
    ) -> Operation:
        """See `comm.Group`."""
        (op, number), size = self._collective(), len(self.ranks)
        leaving = _cut_rows(bytes_of(x), x, in_rows, size)
        arriving = _cut_rows(bytes_of(out), out, out_rows, size)
        self._exchange(op, number, leaving.__getitem__, arriving)
        return op.begun()

    def send(self, x: Tensor, index: int) -> Operation:
        """See `comm.Group`."""
        op = self._operation()
        self._sent[index] += 1
        rank, channel = self.ranks[index], self._channel + 1
        self._fabric.send(op, rank, channel, self._sent[index], bytes_of(x))
        return op.begun()

    def receive(self, out: Tensor, index: int) -> Operation:
        """See `comm.Group`."""
        op = self._operation()
        self._got[index] += 1
        rank, channel = self.ranks[index], self._channel + 1
        self._fabric.receive(op, rank, channel, self._got[index], bytes_of(out))
        return op.begun()

    def _others(self) -> list[int]:
        return [i for i, rank in enumerate(self.ranks) if rank != self._fabric.rank]

    def _exchange(
        self,
        op: Operation,
        number: int,
        leaving: Callable[[int], memoryview],
        arriving: list[memoryview],
    ) -> None:
        for i in self._others():
            self._receive(op, i, number, arriving[i])
        for i in self._others():
            self._send(op, i, number, leaving(i))
        arriving[self.index][:] = leaving(self.index)

    def _combine(
        self, parts: Tensor, x: Tensor, combine: Callable[[Tensor, Tensor], object]
    ) -> None:
        """`x` becomes `parts` and this rank's `x` combined in rank order."""
        me = self.index
        if len(parts) == 2:  # the order of two does not matter
            combine(x, parts[1 - me])
            return
        parts[me].copy_(x)
        total = parts[0]
        for part in parts[1:]:
            combine(total, part)
        x.copy_(total)

    def _reduce_at_first(self, x: Tensor, combine: Callable[[Tensor, Tensor], object]) -> Operation:
        """The first rank combines and tells the others: the fewest messages."""
        op, number = self._collective()
        if self.index:
            self._send(op, 0, number, bytes_of(x))
            # It may be overwritten only once it has left.
            op.then = lambda: self._receive(op, 0, number + 1, bytes_of(x))
            return op.begun()
        parts = x.new_empty(len(self.ranks), x.numel())
        for i in self._others():
            self._receive(op, i, number, bytes_of(parts[i]))

        def tell() -> None:
            self._combine(parts, x.view(-1), combine)
            for i in self._others():
                self._send(op, i, number + 1, bytes_of(x))

        op.then = tell
        return op.begun()

    def _gather_at_first(
        self, op: Operation, number: int, mine: memoryview, parts: memoryview
    ) -> Operation:
        if self.index:
            self._send(op, 0, number, mine)
            self._receive(op, 0, number + 1, parts)
            return op.begun()
        arriving = _cut(parts, [len(mine)] * len(self.ranks))
        arriving[0][:] = mine
        for i in self._others():
            self._receive(op, i, number, arriving[i])

        def tell() -> None:
            for i in self._others():
                self._send(op, i, number + 1, parts)

        op.then = tell
        return op.begun()

    def _reduce_slices(self, x: Tensor, combine: Callable[[Tensor, Tensor], object]) -> Operation:
        """Each rank combines its slice and sends it to all."""
        size, me, flat = len(self.ranks), self.index, x.view(-1)
        step = -(-flat.numel() // size)
        slices = flat.split(step)  # the last ones may be shorter, or none
        mine = slices[me] if me < len(slices) else flat[:0]
        parts = x.new_empty(size, mine.numel())
        views = [bytes_of(part) for part in slices]
        views += [memoryview(bytearray())] * (size - len(slices))
        op, number = self._collective()
        self._exchange(op, number, views.__getitem__, [bytes_of(part) for part in parts])

        def gather() -> None:
            if mine.numel():
                self._combine(parts, mine, combine)
            for i in self._others():
                self._receive(op, i, number + 1, views[i])
            for i in self._others():
                self._send(op, i, number + 1, views[me])

        op.then = gather
        return op.begun()

    def _collective(self) -> tuple[Operation, int]:
        """An operation, and the number of its first phase."""
        op = self._operation()
        self._number += _PHASES
        return op, self._number

    def _operation(self) -> Operation:
        op = self._fabric.operation(self._inside)
        epoch = self._fabric.epoch_of(self._inside)
        if self._epoch != epoch:
            self._epoch, self._number = epoch, 0
            self._sent, self._got = [0] * len(self.ranks), [0] * len(self.ranks)
        return op

    def _send(self, op: Operation, index: int, number: int, data: memoryview) -> None:
        if len(data):
            self._fabric.send(op, self.ranks[index], self._channel, number, data)

    def _receive(self, op: Operation, index: int, number: int, place: memoryview) -> None:
        if len(place):
            self._fabric.receive(op, self.ranks[index], self._channel, number, place)


class Groups:
    """Makes groups, each with a channel of its own that follows from its ranks and from how many
    of the same ranks were made before: every rank makes its groups in the same order. `block` are
    the ranks of this one's replica."""

    def __init__(self, fabric: Fabric, block: frozenset[int] = frozenset()) -> None:
        self._fabric, self._block = fabric, block
        self._made: Counter[tuple[int, ...]] = Counter()

    def __call__(self, ranks: list[int]) -> FabricGroup:
        """A group of `ranks` for the passes of a step."""
        return self._make(ranks, self._block.issuperset(ranks))

    def after(self, ranks: list[int]) -> FabricGroup:
        """One for what follows on them."""
        return self._make(ranks, False)

    def _make(self, ranks: list[int], inside: bool) -> FabricGroup:
        key = tuple(ranks)
        self._made[key] += 1
        name = f"{key}/{self._made[key]}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return FabricGroup(self._fabric, key, int.from_bytes(digest, "little") & ~1, inside)


class _Memory:
    """The memory of a tensor, for numpy. `Tensor.numpy()` would fix its size for good, and weights
    that are gathered anew each time are freed in between."""

    def __init__(self, x: Tensor) -> None:
        self.kept = x  # as long as anybody looks at its memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (x.nbytes,),
            "data": (x.data_ptr(), False),
        }


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous `x` on the host."""
    assert x.is_contiguous(), "what travels lies in one piece"
    if not x.numel():
        return memoryview(bytearray())
    data: Any = np.asarray(_Memory(x))
    return memoryview(data)


def json_tensors(fields: dict[str, Any]) -> list[Tensor]:
    """What travels of plain JSON: its size, then its bytes."""
    data = torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)
    return [torch.tensor([data.numel()]), data]


def receive_json(group: FabricGroup, index: int) -> dict[str, Any]:
    """What the rank at place `index` sends as `json_tensors`. Raises Interrupted."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, index).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.receive(data, index).wait()
    found: dict[str, Any] = json.loads(bytes(bytes_of(data)))
    return found


def _largest(x: Tensor, other: Tensor) -> None:
    torch.maximum(x, other, out=x)


def _cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    return [data[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def _cut_rows(data: memoryview, x: Tensor, rows: list[int] | None, size: int) -> list[memoryview]:
    if rows is None:
        return _cut(data, [len(data) // size] * size)
    row = len(data) // max(x.shape[0], 1)
    return _cut(data, [n * row for n in rows])
