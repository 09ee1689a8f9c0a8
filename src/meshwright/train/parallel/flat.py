"""Parameters as slots of flat buffers: gathered, reduced, updated and saved as one run of numbers.

A `FlatGroup` is the unit of data parallelism, one transformer layer or one table. Its fp32 master
weights, gradients and optimizer state are cut into equal ranges over the `dp_shard` axis; the
module's parameters are views into a full buffer in the compute type, which exists only while the
group is gathered. With one shard and fp32 the full buffer *is* the master: no copy at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from meshwright.base.errors import RunError
from meshwright.checkpoint.pieces import Piece
from meshwright.train.comm import Axis, Pending


@dataclass(frozen=True)
class Slot:
    """A parameter: where it lives in the module tree, and which part of the whole model it is.

    `module.attribute` is replaced by a view into a flat buffer; `shape` is this rank's slice.
    `box_offset` is where this rank's tensor-parallel slice begins in the tensor of `global_shape`.
    `whole` says that every tp rank holds all of it; `tied` that the first and the last pipeline
    stage each hold it, and `copy` that this one is the last stage's.
    """

    name: str
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    box_offset: tuple[int, ...]
    decay: bool
    whole: bool
    tied: bool
    copy: bool

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        return prod(self.shape)


class FlatGroup:
    """The parameters `slots` as one flat buffer, cut over `shards`, summed over `replicas`.

    With `release_early` the full weights are freed after each backward, else after the update.
    """

    def __init__(
        self,
        slots: list[Slot],
        shards: Axis,
        replicas: Axis,
        dtype: torch.dtype,
        device: torch.device,
        release_early: bool = False,
    ) -> None:
        self.slots = sorted(slots, key=lambda slot: not slot.decay)
        self.shards, self.replicas = shards, replicas
        *self.starts, self.used = accumulate((slot.numel for slot in self.slots), initial=0)
        self.shard_size = -(-self.used // shards.size)
        self.first = shards.index * self.shard_size
        self.sharded = shards.size > 1
        self._release_early = release_early
        self.master = torch.zeros(self.shard_size, device=device)
        self.grad = torch.zeros(self.shard_size, device=device)
        shares_master = not self.sharded and dtype == torch.float32
        padded = self.shard_size * shards.size
        self.full = (
            self.master if shares_master else torch.empty(padded, dtype=dtype, device=device)
        )
        self._full_grad: Tensor | None = None
        self._gathered = True
        self._fresh = self._reduce_now = False
        self._reduction: Pending | None = None
        self._waiting: set[str] = set()
        self._attach()

    def _attach(self) -> None:
        for slot, start in zip(self.slots, self.starts, strict=True):
            view = slice(start, start + slot.numel)
            # `.data` has a version of its own: gathering again between a forward and its backward
            # writes the same numbers, which autograd must not take for a change.
            parameter = nn.Parameter(self.full[view].view(slot.shape).data)
            setattr(slot.module, slot.attribute, parameter)
            hook = partial(self._on_grad, name=slot.name, view=view)
            parameter.register_post_accumulate_grad_hook(hook)

    # Gathering and releasing the full weights

    def gather(self) -> None:
        """Make the full weights present; no-op if they are."""
        if self._gathered:
            return
        self._resize(self.full, self.full.numel())
        self.shards.all_gather(self.full, self.master.to(self.full.dtype))
        self._gathered = True

    def release(self) -> None:
        """Free the full weights where the shards suffice to make them again."""
        if self.sharded and self._gathered:
            self._resize(self.full, 0)
            self._gathered = False

    def refresh(self) -> None:
        """After an update of the master: the full weights follow."""
        if self.sharded:
            self.release()
        elif self.full is not self.master:
            self.full.copy_(self.master)

    @staticmethod
    def _resize(buffer: Tensor, numel: int) -> None:
        buffer.untyped_storage().resize_(numel * buffer.element_size())

    # Gradients

    def begin_step(self) -> None:
        """The next gradients replace those of the step before."""
        self._fresh = True

    def begin_backward(self, last: bool) -> None:
        """The next backward pass is a micro-batch's; `last` of the step starts the reduction."""
        self._reduce_now = last
        self._waiting = {slot.name for slot in self.slots}

    def end_backward(self) -> None:
        """That backward pass is over. Raises RunError if a parameter got no gradient: its group
        has not been reduced, and replicas would drift apart unseen."""
        if self._waiting:
            raise RunError(f"no gradient reached {', '.join(sorted(self._waiting))}")

    def _on_grad(self, parameter: Tensor, name: str, view: slice) -> None:
        """Autograd has the gradient of one slot for this micro-batch."""
        assert parameter.grad is not None
        target = self._micro_batch_grad()[view].view(parameter.shape)
        if self._fresh or self.sharded:
            target.copy_(parameter.grad)
        else:
            target.add_(parameter.grad)
        parameter.grad = None
        self._waiting.remove(name)
        if not self._waiting:
            self._all_grads_here()

    def _micro_batch_grad(self) -> Tensor:
        """Where gradients go as they come: sharded ones into a buffer that lives for one pass."""
        if not self.sharded:
            return self.grad
        if self._full_grad is None:
            size = self.shard_size * self.shards.size
            self._full_grad = torch.empty(size, device=self.grad.device)
            self._full_grad[self.used :].zero_()
        return self._full_grad

    def _all_grads_here(self) -> None:
        if self._full_grad is not None:
            part = self.grad if self._fresh else torch.empty_like(self.grad)
            self.shards.reduce_scatter(part, self._full_grad)
            if not self._fresh:
                self.grad.add_(part)
            self._full_grad = None
            if self._release_early:
                self.release()
        self._fresh = False
        if self._reduce_now:
            self._reduction = self.replicas.start_all_reduce(self.grad)

    def finish_reduction(self) -> None:
        """Wait until `grad` is the sum over all data-parallel ranks."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    # Ranges of the local shard

    @property
    def decay_size(self) -> int:
        """Elements at the start of the local shard that take weight decay."""
        end = sum(slot.numel for slot in self.slots if slot.decay) - self.first
        return min(max(end, 0), self.shard_size)

    def spans(self) -> Iterator[tuple[Slot, slice, slice]]:
        """Each slot with a part here: (slot, range in the local shard, range in the slot)."""
        for slot, start in zip(self.slots, self.starts, strict=True):
            low = max(start, self.first)
            high = min(start + slot.numel, self.first + self.shard_size)
            if low < high:
                here = slice(low - self.first, high - self.first)
                yield slot, here, slice(low - start, high - start)

    def piece(self, slot: Slot, part: slice, prefix: str = "") -> Piece:
        """The range `part` of `slot` as a piece of the whole model's state."""
        where = (slot.global_shape, slot.box_offset, slot.shape, part.start, part.stop)
        return Piece(prefix + slot.name, *where)


def global_index(slot: Slot, start: int, stop: int, device: torch.device) -> Tensor:
    """Row-major indices in the whole tensor of elements [start, stop) of this rank's slice."""
    local = torch.arange(start, stop, device=device)
    index = torch.zeros_like(local)
    for dim, size in enumerate(slot.shape):
        coordinate = local // prod(slot.shape[dim + 1 :]) % size + slot.box_offset[dim]
        index += coordinate * prod(slot.global_shape[dim + 1 :])
    return index
