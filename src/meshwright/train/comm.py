"""Collectives of one mesh axis, and the clock that says how long they kept this rank waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor

Collective = Callable[..., dist.Work | None]

# Renamed in torch 2.13; the older names do the same.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Clock:
    """Seconds this rank spent in each phase since the last `take()`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to phase `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The sums so far; start again from zero."""
        taken, self.seconds = self.seconds, {}
        return taken


class Pending:
    """A collective under way; `wait()` is timed as communication."""

    def __init__(self, work: dist.Work | None, clock: Clock) -> None:
        self._work, self._clock = work, clock

    def wait(self) -> None:
        """Block until the collective is done. Raises RuntimeError if a peer is gone."""
        if self._work is not None:
            with self._clock.phase("comm"):
                self._work.wait()
            self._work = None


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it. With one rank every collective is a no-op.

    `ranks` are the global ranks of the group in order, `index` this rank's place among them.
    """

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
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
        Pending(self._start(partial(dist.all_reduce, op=dist.ReduceOp.MAX), x), self.clock).wait()

    def start_all_reduce(self, x: Tensor) -> Pending:
        """As `all_reduce`, under way when this returns."""
        return Pending(self._start(dist.all_reduce, x), self.clock)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """`out` [size * n, ...] becomes every rank's `x` [n, ...] in rank order."""
        if self.size == 1:
            out.copy_(x)
        Pending(self._start(_all_gather_single, out, x), self.clock).wait()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """`out` [n, ...] becomes this rank's slice of the sum of `x` [size * n, ...]."""
        if self.size == 1:
            out.copy_(x)
        Pending(self._start(_reduce_scatter_single, out, x), self.clock).wait()

    def _start(self, collective: Collective, *tensors: Tensor) -> dist.Work | None:
        if self.size == 1:
            return None
        with self.clock.phase("comm"):
            return collective(*tensors, group=self.group, async_op=True)
