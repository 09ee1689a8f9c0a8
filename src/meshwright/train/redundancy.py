"""The state of another rank in this one's memory, current at every step that counts.

Before the vote on a step each rank sends its keeper the redo log: its reduced gradients, what its
routers go by, and their counts. A keeper votes only once it has the logs of its wards; so a step
that counts can be redone from the keepers. After the vote it makes the same update as its ward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.base.pulse import Phase
from meshwright.plan.job import OptimizerSection
from meshwright.train.fabric.group import FabricGroup, json_tensors, receive_json
from meshwright.train.fabric.operation import Operation
from meshwright.train.optim import MasterOptimizer
from meshwright.train.trainer import Trainer


@dataclass
class Cost:
    """What keeping states takes of a rank: bytes held for others, and since it was last asked, by
    step, seconds and bytes sent."""

    held_bytes: int = 0
    seconds: float = 0.0
    wire_bytes: int = 0
    steps: int = 0

    def take(self, held_bytes: int) -> Cost:
        """The means of a step, from now on anew."""
        steps = max(self.steps, 1)
        found = Cost(held_bytes, self.seconds / steps, self.wire_bytes // steps, self.steps)
        self.seconds, self.wire_bytes, self.steps = 0.0, 0, 0
        return found


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes."""
    return sum(x.nbytes for x in tensors)


@dataclass(frozen=True)
class KeptGroup:
    """One flat group of a ward, as the optimizer sees it."""

    master: Tensor
    grad: Tensor
    decay_size: int


@dataclass(frozen=True)
class Router:
    """What the routers of a rank go by, and the counts that a step teaches them."""

    state: list[Tensor]
    counts: Tensor | None


class Kept:
    """The state of one ward after the last step that counts, and the log of the one under way."""

    def __init__(self, shapes: dict[str, Any], settings: OptimizerSection) -> None:
        dtype = getattr(torch, shapes["grad_dtype"])
        self.groups = [
            KeptGroup(torch.empty(n), torch.empty(n, dtype=dtype), decay)
            for n, decay in shapes["groups"]
        ]
        self.optimizer = MasterOptimizer(self.groups, settings)
        self.optimizer.set_updates_done(shapes["updates"])
        self._sizes = shapes["router"]
        self.router = Router([torch.empty(n) for n in self._sizes], None)
        self.coming = self._room()
        self.has_counts = bool(shapes["counts"])
        self._counts_shape = tuple(shapes["counts"])

    def _room(self) -> list[Tensor]:
        return [torch.empty(n) for n in self._sizes]

    def state(self) -> list[Tensor]:
        """Masters and moments by group, then routers': in the order of `state_tensors`."""
        found = []
        for group, moments in zip(self.groups, self.optimizer.moments, strict=True):
            found += [group.master, *moments]
        return [*found, *self.router.state]

    def log(self) -> list[Tensor]:
        """Where the log of a step arrives."""
        self.counts = torch.empty(self._counts_shape, dtype=torch.int64)
        counts = [self.counts] if self.has_counts else []
        return [*(group.grad for group in self.groups), *self.coming, *counts]

    def apply(self, rate: float | None, divisor: float) -> None:
        """The step of the log counts; `rate` None: it was skipped."""
        learnt = self.counts if rate is not None and self.has_counts else None
        self.router, self.coming = Router(self.coming, learnt), self.router.state
        if rate is not None:
            self.optimizer.step(rate, divisor)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return size_of([*self.state(), *(group.grad for group in self.groups)])


def own_log(trainer: Trainer) -> list[Tensor]:
    """What a step whose gradients are whole needs besides the vote, in the order of `Kept.log`."""
    counts = trainer.routing.packed_counts
    grads = [group.grad for group in trainer.data.groups]
    routers = [x.clone() for x in trainer.routing.state().values()]
    return [*grads, *routers, *([] if counts is None else [counts])]


def seed(trainer: Trainer) -> tuple[dict[str, Any], list[Tensor]]:
    """What makes a `Kept` of a rank: its shapes, and its state in the order of `Kept.state`."""
    groups, moments = trainer.data.groups, trainer.optimizer.moments
    routers = list(trainer.routing.state().values())
    layers = len(trainer.routing.layers)
    shapes = {
        "groups": [[group.master.numel(), group.decay_size] for group in groups],
        "grad_dtype": str(groups[0].grad.dtype).removeprefix("torch."),
        "router": [x.numel() for x in routers],
        "counts": [layers, trainer.job.model.n_experts] if layers else [],
        "updates": trainer.optimizer.updates_done,
    }
    state: list[Tensor] = []
    for group, pair in zip(groups, moments, strict=True):
        state += [group.master, *pair]
    return shapes, [*state, *(x.clone() for x in routers)]


class Mirror:
    """What a rank does for its wards, and for itself with its keeper. See `trainer.Redundancy`."""

    def __init__(
        self,
        trainer: Trainer,
        world: FabricGroup,
        keeper: int,
        wards: tuple[int, ...],
        kept: dict[int, Kept],
    ) -> None:
        """`kept` is what this rank holds of others already."""
        self._trainer, self._world, self._keeper = trainer, world, keeper
        self._wards = wards
        self.kept = kept
        self.cost = Cost()

    def log(self) -> None:
        """Send this rank's log and wait for those of its wards."""
        self._trainer.mesh.clock.enter(Phase.MIRROR)
        start = time.perf_counter()
        log = own_log(self._trainer)
        ops = [self._world.send(x, self._keeper) for x in log if x.numel()]
        self.cost.wire_bytes += size_of(log)
        for ward in self._wards:
            ops += self._receive(self.kept[ward].log(), ward)
        for op in ops:
            op.wait()
        self.cost.seconds += time.perf_counter() - start

    def apply(self, rate: float | None, divisor: float) -> bool:
        """Make the wards' updates."""
        start = time.perf_counter()
        for kept in self.kept.values():
            kept.apply(rate, divisor)
        self.cost.seconds += time.perf_counter() - start
        self.cost.steps += 1
        return False

    def exchange(self, pairs: list[tuple[int, int]], rank: int) -> None:
        """For each (ward, keeper) of `pairs` the ward sends all that it has, and the keeper keeps
        it; the state of all is that of the same step. What is nobody's ward any more is dropped."""
        for ward, keeper in pairs:
            if keeper == rank:
                self.kept.pop(ward, None)
        ops: list[Operation] = []
        alive: list[Tensor] = []  # until it has been sent
        for ward, _ in pairs:
            if ward == rank:
                shapes, state = seed(self._trainer)
                alive += [*json_tensors(shapes), *state]
        ops += [self._world.send(x, self._keeper) for x in alive if x.numel()]
        arrived: dict[int, Kept] = {}
        for ward, keeper in pairs:
            if keeper == rank:
                arrived[ward] = self._take_seed(ward)
        for op in ops:
            op.wait()
        self.kept.update(arrived)
        self.kept = {ward: self.kept[ward] for ward in self._wards}

    @property
    def n_bytes(self) -> int:
        """Memory that it takes on this rank."""
        return sum(kept.n_bytes for kept in self.kept.values())

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose state can be had from here."""
        return tuple(self.kept)

    def take_cost(self) -> Cost:
        """What it has taken since it was last asked."""
        return self.cost.take(self.n_bytes)

    def _take_seed(self, ward: int) -> Kept:
        kept = Kept(receive_json(self._world, ward), self._trainer.job.optimizer)
        for op in self._receive(kept.state(), ward):
            op.wait()
        return kept

    def _receive(self, places: list[Tensor], ward: int) -> list[Operation]:
        return [self._world.receive(x, ward) for x in places if x.numel()]
