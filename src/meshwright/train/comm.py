"""Collectives of one mesh axis, and the clock that says how long they kept this rank waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.pulse import Phase

# Renamed in torch 2.13; the older name does the same.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until it is done; what was to arrive is there."""


class Group(Protocol):
    """What carries the collectives of one group of ranks. Buffers must live, and what is sent must
    not be written to, until they have been waited for."""

    def all_reduce(self, x: Tensor, largest: bool = False) -> Work:
        """`x` becomes the sum, or the largest of each element, over the group."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """`out` [size * n, ...] becomes every rank's `x` [n, ...] in rank order."""

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: list[int] | None, in_rows: list[int] | None
    ) -> Work:
        """Exchange rows of `x` for rows of `out`; None: the same number with each rank."""

    def send(self, x: Tensor, index: int) -> Work:
        """Send `x` to the rank at place `index` of the group."""

    def receive(self, out: Tensor, index: int) -> Work:
        """Receive what the rank at place `index` sends next."""


@dataclass(frozen=True)
class TorchGroup:
    """A process group of torch (NCCL, gloo); None is the default group."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    def all_reduce(self, x: Tensor, largest: bool = False) -> Work:
        """See `Group`."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return _under_way(dist.all_reduce(x, op=op, group=self.group, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """See `Group`."""
        return _under_way(_all_gather_single(out, x, group=self.group, async_op=True))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: list[int] | None, in_rows: list[int] | None
    ) -> Work:
        """See `Group`."""
        rows = (out_rows, in_rows)
        return _under_way(dist.all_to_all_single(out, x, *rows, group=self.group, async_op=True))

    def send(self, x: Tensor, index: int) -> Work:
        """See `Group`."""
        return _under_way(dist.isend(x, dst=self.ranks[index], group=self.group))

    def receive(self, out: Tensor, index: int) -> Work:
        """See `Group`."""
        return _under_way(dist.irecv(out, src=self.ranks[index], group=self.group))


def _under_way(work: dist.Work | None) -> Work:
    assert work is not None  # torch gives none to ranks outside of the group alone
    return work


class Watch(Protocol):
    """Who follows what this rank is at."""

    def enter(self, phase: Phase) -> None:
        """That comes now. May raise what ends the step."""


@dataclass
class Clock:
    """Seconds this rank spent in each phase since the last `take()`.

    On a GPU it is the stream that waits for communication, while the process goes on: there events
    on either side of the wait time it, and count once the GPU has passed them.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    watch: Watch | None = None
    _stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Add the time that the body waits for other ranks to phase `comm`."""
        if not torch.cuda.is_initialized():
            with self.phase("comm"):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._stalls.append((start, end))

    def enter(self, phase: Phase) -> None:
        """Tell who watches what comes now."""
        if self.watch is not None:
            self.watch.enter(phase)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to phase `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The sums so far; start again from zero."""
        passed = [end.query() for _, end in self._stalls]
        for (start, end), is_past in zip(self._stalls, passed, strict=True):
            if is_past:
                self.add("comm", start.elapsed_time(end) / 1e3)
        self._stalls = [s for s, is_past in zip(self._stalls, passed, strict=True) if not is_past]
        taken, self.seconds = self.seconds, {}
        return taken


class Pending:
    """A collective under way; `wait()` is timed as communication. `finish` then runs, once."""

    def __init__(
        self,
        work: Work | None,
        clock: Clock,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._clock, self._finish = work, clock, finish

    def wait(self) -> None:
        """Block until the collective is done. Raises RuntimeError if a peer is gone."""
        if self._work is not None:
            with self._clock.communication():
                self._work.wait()
            self._work = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it. With one rank every collective is a no-op.

    `ranks` are the global ranks of the group in order, `index` this rank's place among them. A
    process group stands for the `TorchGroup` of it, None for that of the default group.
    """

    ranks: tuple[int, ...]
    index: int
    group: Group | dist.ProcessGroup | None
    clock: Clock

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the axis, in place."""
        self.start_all_reduce(x).wait()

    def all_reduce_max(self, x: Tensor) -> None:
        """Largest value of each element over the axis, in place."""
        self._start(lambda group: group.all_reduce(x, largest=True)).wait()

    def start_all_reduce(self, x: Tensor) -> Pending:
        """As `all_reduce`, under way when this returns."""
        return self._start(lambda group: group.all_reduce(x))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """`out` [size * n, ...] becomes every rank's `x` [n, ...] in rank order."""
        self.start_all_gather(out, x).wait()

    def start_all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """As `all_gather`, under way when this returns; `out` must not be `x`."""
        if self.size == 1:
            out.copy_(x)
        return self._start(lambda group: group.all_gather(out, x))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """`out` [n, ...] becomes this rank's slice of the sum of `x` [size * n, ...]."""
        self.start_reduce_scatter(out, x).wait()

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """As `reduce_scatter`, under way when this returns.

        Slices are exchanged and added up in rank order: the same bytes as a ring, and the bits of
        an element do not depend on its place in the buffer.
        """
        if self.size == 1:
            out.copy_(x)
            return Pending(None, self.clock)
        slices = torch.empty_like(x)
        parts = slices.view(self.size, *out.shape)
        return self._start(
            lambda group: group.all_to_all(slices, x, None, None),
            finish=lambda: torch.sum(parts, dim=0, out=out),
        )

    def all_to_all(self, out: Tensor, x: Tensor, out_rows: list[int], in_rows: list[int]) -> None:
        """Send `in_rows[i]` rows of `x` to rank i, receive `out_rows[i]` rows of `out` from it."""
        self.start_all_to_all(out, x, out_rows, in_rows).wait()

    def start_all_to_all(
        self, out: Tensor, x: Tensor, out_rows: list[int], in_rows: list[int]
    ) -> Pending:
        """As `all_to_all`, under way when this returns."""
        if self.size == 1:
            out.copy_(x)
        return self._start(lambda group: group.all_to_all(out, x, out_rows, in_rows))

    def send(self, x: Tensor, index: int) -> Pending:
        """Send `x` to the rank at place `index` of the axis; `x` must live until it is done."""
        return self._start(lambda group: group.send(x, index))

    def receive(self, out: Tensor, index: int) -> Pending:
        """Receive into `out` what the rank at place `index` sends next to this one."""
        return self._start(lambda group: group.receive(out, index))

    @cached_property
    def _carrier(self) -> Group:
        if self.group is None or isinstance(self.group, dist.ProcessGroup):
            return TorchGroup(self.ranks, self.group)
        return self.group

    def _start(
        self, begin: Callable[[Group], Work], finish: Callable[[], object] | None = None
    ) -> Pending:
        if self.size == 1:
            return Pending(None, self.clock, finish)
        with self.clock.phase("comm"):
            return Pending(begin(self._carrier), self.clock, finish)
