"""Gradients of one flat group: summed over micro-batches, scattered over shards, over replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.train.comm import Pending
from meshwright.train.parallel.reduce import AllReduction, Reduction

_UNDER_WAY = 2  # groups whose full gradients may be on their way at a time


@dataclass
class Scatters:
    """The scatters under way on this rank, oldest first, so that full gradients do not pile up
    while a backward pass outruns the network. All ranks begin and end them in the same order.

    With `undisturbed`, where nothing may come in between, it also knows the sums over replicas that
    this step has begun, and what was added up is kept, so that they can be begun again.
    """

    undisturbed: Callable[[], AbstractContextManager[object]] | None = None
    _queue: deque[Accumulator] = field(default_factory=deque)
    _begun: list[Accumulator] = field(default_factory=list)

    def push(self, started: Accumulator) -> None:
        """`started` has begun to scatter; the oldest one too many is waited for."""
        self._queue.append(started)
        while len(self._queue) > _UNDER_WAY:
            self._queue.popleft().settle()

    def finish(self) -> None:
        """Wait for all."""
        while self._queue:
            self._queue.popleft().settle()

    def abandon(self) -> None:
        """Forget those under way."""
        self._queue.clear()
        self._begun.clear()

    def forget_sums(self) -> None:
        """Those that have begun are of no use any more."""
        self._begun.clear()

    def begin_sum(self, of: Accumulator) -> None:
        """Have `of` add up over replicas."""
        with (self.undisturbed or nullcontext)():
            if self.undisturbed is not None:
                self._begun.append(of)
                of.keep()
            of.start_sum()

    def sum_again(self) -> None:
        """Begin the step's sums over replicas anew, in the same order, from what was kept."""
        for accumulator in self._begun:
            accumulator.restore()
            accumulator.start_sum()


@dataclass(frozen=True)
class _Scattering:
    """A full gradient on its way, of which this rank gets `part`; `last` of the step or not."""

    pending: Pending
    part: Tensor
    full: Tensor
    last: bool


class Accumulator:
    """`grad` [shard_size] holds the sum of the step's gradients once `finish` has returned.

    Without shards gradients are added where they stay. With `each_pass` (ZeRO stages 2 and 3) the
    full gradient of a pass is scattered in the background and freed before two other groups' have
    followed; otherwise (stage 1) it is kept whole until the last pass of the step. A pass delivers
    each of `expected` once.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        each_pass: bool,
        scatter: Reduction,
        add_up: AllReduction,
        scatters: Scatters,
    ) -> None:
        self._used, shard_size, shards = sizes
        self._padded = shard_size * shards
        self._sharded, self._each_pass = shards > 1, each_pass
        self._scatter, self._add_up, self._scatters = scatter, add_up, scatters
        self.grad = torch.zeros(shard_size, dtype=dtype, device=device)
        self._full: Tensor | None = None if self._sharded else self.grad
        self._fresh_full = self._fresh = self._last = False
        self._scattering: deque[_Scattering] = deque()
        self._reduction: Pending | None = None
        self._kept: Tensor | None = None
        self._waiting: set[object] = set()

    def begin_step(self) -> None:
        """The next gradients replace those of the step before."""
        self._fresh = self._fresh_full = True

    def begin_pass(self, last: bool, expected: set[object]) -> None:
        """A backward pass will deliver `expected`; after the `last` of the step they are summed."""
        self._last, self._waiting = last, set(expected)

    def end_pass(self) -> None:
        """That pass is over. Raises RunError if a gradient is missing: the group has not been
        reduced, and replicas would drift apart unseen."""
        if self._waiting:
            raise RunError(f"no gradient reached {', '.join(sorted(map(str, self._waiting)))}")

    def deliver(self, key: object, place: slice, grad: Tensor) -> bool:
        """Take the gradient of `key`, elements `place` of the flat buffer; whether it was the last
        of its pass."""
        target = self._whole()[place]
        if self._fresh_full or self._each_pass:
            target.copy_(grad.flatten())
        else:
            target.add_(grad.flatten())
        self._waiting.remove(key)
        if self._waiting:
            return False
        self._pass_complete()
        return True

    def _whole(self) -> Tensor:
        if self._full is None:
            self._full = torch.empty(self._padded, dtype=self.grad.dtype, device=self.grad.device)
            self._full[self._used :].zero_()
        return self._full

    def _pass_complete(self) -> None:
        self._fresh_full = False
        if self._sharded and (self._each_pass or self._last):
            full, self._full = self._whole(), None
            part = torch.empty_like(self.grad)
            pending = self._scatter.start_reduce_scatter(part, full)
            self._scattering.append(_Scattering(pending, part, full, self._last))
            self._scatters.push(self)
        if self._last and not self._sharded:
            self._scatters.begin_sum(self)

    def settle(self) -> None:
        """Add the slice that has been on its way longest; after the step's last one begin the sum
        over replicas."""
        done = self._scattering.popleft()
        done.pending.wait()
        if self._fresh:
            self.grad.copy_(done.part)
        else:
            self.grad.add_(done.part)
        self._fresh = False
        if done.last:
            self._scatters.begin_sum(self)

    def start_sum(self) -> None:
        """Begin to add up over replicas."""
        self._reduction = self._add_up.start_all_reduce(self.grad)

    def keep(self) -> None:
        """Remember what is to be added up."""
        if self._kept is None:
            self._kept = torch.empty_like(self.grad)
        self._kept.copy_(self.grad)

    def restore(self) -> None:
        """Bring back what was remembered."""
        assert self._kept is not None
        self.grad.copy_(self._kept)

    def finish(self) -> None:
        """Wait until `grad` is the sum over all ranks that share the group."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def abandon(self) -> None:
        """Forget what is under way. `grad` stays; the next step begins it anew."""
        self._scattering.clear()
        self._reduction = None
        self._waiting = set()
        if self._sharded:
            self._full = None
