"""The exclusive or of the states of some ranks in the memory of another: for a share of what
mirrors take, any one of them can be made again from the others.

What makes it whole at every moment of a step:

- Before the vote the keeper adds up (bitwise, in exclusive or) its wards' redo logs, and votes only
  once it has them all. So a gradient that counts can be made again.
- After the vote the ranks of a group update one flat group after the other. Each sends how the bits
  of its flat group have changed, and goes on once the keeper has the changes of all, which it takes
  in at once. So the parity is always that of a known number of flat groups of the new state.
- A rank keeps what a flat group was until the keeper has taken the change in. Where a new table
  cuts this short it finishes its update, and keeps what all further ones were; so it can still say
  how its state was when the parity was last whole.

The lost rank's state follows from the parity and the others' states as of then; what was not yet
updated it updates itself, with its gradients, which follow likewise. Twelve bytes a parameter and
the gradients are on the wire, where a mirror takes the gradients alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.base.pulse import Phase
from meshwright.plan.resilience import Keeping
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.line import Line
from meshwright.train.fabric.orders import Interrupted
from meshwright.train.redundancy import Cost, Kept, size_of
from meshwright.train.trainer import Trainer

_TO_KEEPER, _FROM_KEEPER = 8, 10  # channels
Pieces = list[Tensor]  # of one flat group: master, both moments, or the gradient


@dataclass
class Sum:
    """The parity of a group of ranks: of their states after `applied` steps, the first `done` flat
    groups one step later; and of their gradients. `sizes` has the elements of each rank's flat
    groups, and the bytes of an element of a gradient."""

    ranks: tuple[int, ...]
    sizes: dict[int, list[int]]
    grad_bytes: int
    applied: int
    done: int = 0
    state: list[Pieces] = field(default_factory=list)
    grads: list[Pieces] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index in range(self.count):
            most = max(self.size(rank, index) for rank in self.ranks)
            self.state.append([torch.zeros(4 * most, dtype=torch.uint8) for _ in range(3)])
            self.grads.append([torch.zeros(self.grad_bytes * most, dtype=torch.uint8)])

    @property
    def count(self) -> int:
        """Flat groups of the rank that has most."""
        return max(len(sizes) for sizes in self.sizes.values())

    def size(self, rank: int, index: int) -> int:
        """Elements of a flat group; 0 if the rank has none of that number."""
        sizes = self.sizes[rank]
        return sizes[index] if index < len(sizes) else 0

    def advance(self) -> None:
        """The flat group that is under way is taken in."""
        self.done += 1
        if self.done == self.count:
            self.applied, self.done = self.applied + 1, 0

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return sum(x.nbytes for pieces in (*self.state, *self.grads) for x in pieces)


class Parity:
    """What a rank does for its own group, and for those whose parity it keeps. See `keepers.py`.

    `sums` are those that it keeps already, by group.
    """

    def __init__(
        self, trainer: Trainer, fabric: Fabric, keeping: Keeping, before: object = None
    ) -> None:
        """`before` did the same until the table at hand."""
        rank = fabric.rank
        self._trainer, self._fabric = trainer, fabric
        self.group, self._keeper = keeping.group_of(rank), keeping.keepers[rank]
        self._groups = [g for g in keeping.parity if keeping.keepers[g[0]] == rank]
        self._up = Line(fabric, self._keeper, _TO_KEEPER, _FROM_KEEPER)
        members = [ward for group in self._groups for ward in group]
        self._down = {ward: Line(fabric, ward, _FROM_KEEPER, _TO_KEEPER) for ward in members}
        self.sums: dict[tuple[int, ...], Sum] = {}
        self.was: dict[int, Pieces] = {}  # flat groups before the last step, gradients included
        self.last: dict[str, Any] = {}  # how that went
        if isinstance(before, Parity):
            self.sums = {
                group: before.sums[group] for group in self._groups if group in before.sums
            }
            if before.group == self.group:
                self.was, self.last = before.was, before.last
        self._updated = 0  # flat groups that have had the step under way
        self._whole = False  # whether all is kept, and kept up
        self.cost = Cost()

    @property
    def kept(self) -> dict[int, Kept]:
        """No state as a whole."""
        return {}

    @property
    def wards(self) -> tuple[int, ...]:
        """Ranks whose parity is here."""
        return tuple(rank for group in self.sums for rank in group)

    def log(self) -> None:
        """Have the gradients of this rank in its keeper's sum, and those of its wards here."""
        self._trainer.mesh.clock.enter(Phase.MIRROR)
        start = time.perf_counter()
        grads = [[group.grad] for group in self._trainer.data.groups]
        self._rounds(grads.__getitem__, self._take_grads, list(self.sums.values()))
        self.cost.seconds += time.perf_counter() - start

    def apply(self, rate: float | None, divisor: float) -> bool:
        """The update, one flat group after the other. Never raises Interrupted."""
        start = time.perf_counter()
        self.last = {"rate": rate, "divisor": divisor}
        self.was, self._updated = {}, 0
        if rate is None:
            for kept in self.sums.values():
                kept.applied += 1
            return True
        if self._whole:
            try:
                self._rounds(
                    lambda index: self._change(index, rate, divisor),
                    self._take_state,
                    list(self.sums.values()),
                    self.was.pop,
                )
            except Interrupted:  # the fabric says so again at the next wait
                self._whole = False
        for index in range(self._updated, len(self._trainer.data.groups)):
            self.update(index, rate, divisor)
        self.cost.seconds += time.perf_counter() - start
        self.cost.steps += 1
        return True

    def exchange(self, _pairs: list[tuple[int, int]], _rank: int) -> None:
        """Make the parities anew that are not whole."""
        applied = self._trainer.applied
        current = {g for g, one in self.sums.items() if (one.applied, one.done) == (applied, 0)}
        anew = [group for group in self._groups if group not in current]
        for group in self._groups:
            self._tell(group, {"anew": group in anew})
        told: dict[str, Any] = {}
        self._up.hear(told.update).wait()
        groups = self._trainer.data.groups
        if told["anew"]:
            sizes = [group.master.numel() for group in groups]
            grad_bytes = groups[0].grad.element_size()
            self._up.say({"sizes": sizes, "grad_bytes": grad_bytes}).wait()
        made = [self._room(group, applied - 1) for group in anew]
        mine = self._state if told["anew"] else None
        self._rounds(mine, self._take_state, made)
        self.was, self._whole, self.cost = {}, True, Cost()

    def take_cost(self) -> Cost:
        """What it has taken since it was last asked, but for this rank's own update."""
        return self.cost.take(sum(one.n_bytes for one in self.sums.values()))

    def as_of(self, applied: int, done: int, index: int) -> Pieces:
        """Flat group `index` of this rank, and its gradient, as they were when `done` of them had
        had the step after `applied`."""
        if self._trainer.applied > applied and index >= done and self.last["rate"] is not None:
            return self.was[index]
        return [*self._state(index), self._trainer.data.groups[index].grad]

    # --- one flat group after the other

    def _rounds(
        self,
        mine: Callable[[int], Pieces] | None,
        take: Callable[[Sum, int, list[tuple[int, Pieces]]], object],
        sums: Sequence[Sum],
        taken: Callable[[int], object] = lambda _: None,
    ) -> None:
        """For each flat group: send `mine`, `take` in what wards send, and go on once the keeper
        has taken in this rank's. Nobody waits for one who waits for it: what is sent in a round
        rests on earlier rounds only."""
        own = len(self._trainer.data.groups) if mine is not None else 0
        for index in range(max([own, *(one.count for one in sums)])):
            answer = torch.zeros(1, dtype=torch.int64)
            sending = None
            if mine is not None and index < own:
                pieces = mine(index)
                sending = self._up.send(pieces)
                self.cost.wire_bytes += size_of(pieces)
            for one in sums:
                self._serve(one, index, take)
            if sending is not None:
                self._up.receive([answer]).wait()
                sending.wait()
                taken(index)

    def _serve(
        self, one: Sum, index: int, take: Callable[[Sum, int, list[tuple[int, Pieces]]], object]
    ) -> None:
        room = one.state if take == self._take_state else one.grads
        if index >= one.count:
            return
        coming, ops = [], []
        width = 4 if take == self._take_state else one.grad_bytes
        for rank in one.ranks:
            size = one.size(rank, index) * width
            pieces = [torch.empty(size, dtype=torch.uint8) for _ in room[index]]
            ops.append(self._down[rank].receive(pieces))
            coming.append((rank, pieces))
        for op in ops:
            op.wait()
        take(one, index, coming)
        for rank in one.ranks:
            if index < len(one.sizes[rank]):
                self._down[rank].send([torch.ones(1, dtype=torch.int64)])

    def _take_state(self, one: Sum, index: int, coming: list[tuple[int, Pieces]]) -> None:
        for _, pieces in coming:
            add(one.state[index], pieces)
        one.advance()
        if not one.done:  # before any rank hears that it is: what it was is dropped then
            self.sums[one.ranks] = one

    def _take_grads(self, one: Sum, index: int, coming: list[tuple[int, Pieces]]) -> None:
        for place in one.grads[index]:
            place.zero_()
        for _, pieces in coming:
            add(one.grads[index], pieces)

    def _state(self, index: int) -> Pieces:
        moments = self._trainer.optimizer.moments[index]
        return [self._trainer.data.groups[index].master, *moments]

    def update(self, index: int, rate: float, divisor: float) -> None:
        """Make the step of one flat group, and keep what it was."""
        grad = self._trainer.data.groups[index].grad
        self.was[index] = [x.clone() for x in (*self._state(index), grad)]
        start = time.perf_counter()
        self._trainer.optimizer.step_group(index, rate, divisor)
        self.cost.seconds -= time.perf_counter() - start
        self._updated = index + 1

    def _change(self, index: int, rate: float, divisor: float) -> Pieces:
        self._trainer.mesh.clock.enter(Phase.OPTIMIZER)
        self.update(index, rate, divisor)
        pairs = zip(self.was[index], self._state(index), strict=False)
        return [torch.bitwise_xor(_bits(before), _bits(now)) for before, now in pairs]

    def _tell(self, group: tuple[int, ...], said: dict[str, Any]) -> None:
        for rank in group:
            self._down[rank].say(said)

    def _room(self, group: tuple[int, ...], applied: int) -> Sum:
        """An empty sum, as large as the ranks of `group` say."""
        told: dict[int, dict[str, Any]] = {}
        for rank in group:
            told[rank] = {}
            self._down[rank].hear(told[rank].update).wait()
        sizes = {rank: said["sizes"] for rank, said in told.items()}
        return Sum(group, sizes, told[group[0]]["grad_bytes"], applied)


def add(places: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Exclusive or of each of `pieces` into the beginning of its place, or as much as fits."""
    for place, piece in zip(places, pieces, strict=False):
        into, bits = _bits(place), _bits(piece)
        size = min(into.numel(), bits.numel())
        into[:size].bitwise_xor_(bits[:size])


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
