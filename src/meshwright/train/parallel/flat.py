"""Parameters as slots of flat buffers: gathered, reduced, updated and saved as one run of numbers.

A `FlatGroup` is the unit of data parallelism: one transformer layer, its experts, or one table. Its
fp32 master weights and optimizer state are cut into equal ranges over the shards axis (ZeRO stage
1), its gradients too (stage 2), and the weights in use as well (stage 3). arXiv 1910.02054,
2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from math import prod

import torch
from torch import Tensor, nn

from meshwright.checkpoint.pieces import Piece
from meshwright.train.comm import Axis
from meshwright.train.nn.linear import WeightGradients
from meshwright.train.parallel.accumulate import Accumulator, Scatters
from meshwright.train.parallel.reduce import AllReduction, Reduction
from meshwright.train.parallel.weights import FullWeights


@dataclass(frozen=True)
class Slot:
    """A tensor or a part of one: where it lives in the module tree, and what part it is.

    `module.attribute` is replaced by a view into a flat buffer; where consecutive slots name the
    same attribute (the experts of a layer), it views them stacked along the first dimension.
    `shape` is this rank's slice, which begins at `box_offset` in the tensor of `global_shape`.
    `whole` says that every tp rank holds all of it, `partial` that each then has only a part of its
    gradient; `tied` that the first and the last pipeline stage each hold it, and `copy` that this
    one repeats what another slot answers for.
    """

    name: str
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    box_offset: tuple[int, ...]
    decay: bool
    whole: bool = False
    partial: bool = False
    tied: bool = False
    copy: bool = False

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        return prod(self.shape)


@dataclass(frozen=True)
class Storage:
    """Types of the numbers, the ZeRO stage, and `home`, where masters and moments are kept."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    zero: int
    device: torch.device
    home: torch.device


@dataclass(frozen=True)
class Copies:
    """The axes that copies of a group's numbers span, and how gradients are added up over them;
    `scatters` are those of all groups of the rank."""

    shards: Axis
    replicas: Axis
    scatter: Reduction
    add_up: AllReduction
    scatters: Scatters


class FlatGroup:
    """The parameters `slots` as one flat buffer, cut over shards, summed over replicas.

    With `release_early` the full weights of ZeRO stage 3 are freed after each backward pass, else
    after the update. Gradients that `later` holds back are delivered when it is flushed.
    """

    def __init__(
        self,
        slots: list[Slot],
        copies: Copies,
        storage: Storage,
        later: WeightGradients,
        release_early: bool = False,
    ) -> None:
        self.slots = sorted(slots, key=lambda slot: not slot.decay)
        self.shards, self.replicas = copies.shards, copies.replicas
        self._later, self._release_early = later, release_early
        *self.starts, self.used = accumulate((slot.numel for slot in self.slots), initial=0)
        self.shard_size = -(-self.used // self.shards.size)
        self.first = self.shards.index * self.shard_size
        sharded = self.shards.size > 1
        self.master = torch.zeros(self.shard_size, device=storage.home)
        self.weights = FullWeights(
            self.master,
            self.shards,
            storage.dtype,
            storage.device,
            frees=sharded and storage.zero == 3,
        )
        self.sums = Accumulator(
            (self.used, self.shard_size, self.shards.size),
            storage.grad_dtype,
            storage.device,
            each_pass=sharded and storage.zero >= 2,
            scatter=copies.scatter,
            add_up=copies.add_up,
            scatters=copies.scatters,
        )
        self._expected: set[object] = set()
        self._attach()
        self.weights.release()  # so that a model that fits only in shards can be built

    @property
    def grad(self) -> Tensor:
        """This rank's shard of the summed gradients, [shard_size]."""
        return self.sums.grad

    def _attach(self) -> None:
        """Put views of the full weights in the place of the modules' parameters."""
        placed = zip(self.slots, self.starts, strict=True)
        for (module, attribute), run in groupby(placed, lambda s: (s[0].module, s[0].attribute)):
            slots, starts = zip(*run, strict=True)
            place = slice(starts[0], starts[-1] + slots[-1].numel)
            rows = sum(slot.shape[0] for slot in slots)
            # `.data` has a version of its own: gathering again between a forward and its backward
            # writes the same numbers, which autograd must not take for a change.
            view = self.weights.buffer[place].view(rows, *slots[0].shape[1:]).data
            parameter = nn.Parameter(view)
            setattr(module, attribute, parameter)
            key = slots[0].name
            self._expected.add(key)
            deliver = partial(self._deliver, key, place)
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad, deliver=deliver))
            getattr(module, "delivers", {})[attribute] = deliver

    def begin_pass(self, last: bool) -> None:
        """A backward pass is coming whose gradients are complete; `last` of the step or not."""
        self.sums.begin_pass(last, self._expected)

    def _on_grad(self, parameter: Tensor, deliver: partial[None]) -> None:
        """Autograd has the gradient of one parameter for this micro-batch."""
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # put off: its layer will deliver it
            return
        if self._later.holding:
            self._later.put(lambda: grad, deliver)
        else:
            deliver(grad)

    def _deliver(self, key: str, place: slice, grad: Tensor) -> None:
        if self.sums.deliver(key, place, grad):
            self.release_early()

    def release_early(self) -> None:
        """A backward pass needs the weights no more: free them if they are not needed soon."""
        if self._release_early:
            self.weights.release()

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
