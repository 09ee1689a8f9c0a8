"""Flat groups of our trainer: what each keeps, gathers and reduces (`train/parallel/flat.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.plan.own_rank import Rank
from meshwright.plan.own_tape import Block


@dataclass(frozen=True)
class Weight:
    """A parameter or the rows of one: elements here, whether it decays, whether its gradient is
    summed over tp, and whether it is the tied table."""

    key: str
    numel: int
    decay: bool = True
    partial: bool = False
    tied: bool = False


class Group:
    """One flat group of `weights` on `rank`; `kind` is "" or "expert "."""

    def __init__(self, rank: Rank, weights: list[Weight], kind: str, early: bool) -> None:
        self.rank, self.early = rank, early
        self.weights = sorted(weights, key=lambda weight: not weight.decay)
        self.keys = {weight.key for weight in weights}
        self.axis, self.copies_axis = f"{kind}shards", f"{kind}replicas"
        self.shards = rank.axes[self.axis]
        self.used = sum(weight.numel for weight in weights)
        self.shard = -(-self.used // self.shards)
        layout = rank.layout
        self.frees = self.shards > 1 and layout.zero_stage == 3
        self.each_pass = self.shards > 1 and layout.zero_stage >= 2
        self._allocate(layout.offload in ("optimizer", "both"))
        self.present = True
        self.gathering: Block | None = None
        if self.frees:
            self.buffer.resize(0)
            self.present = False
        self.full: Block | None = None
        self.reducing: tuple[Block, ...] = ()
        self.waiting: set[str] = set()
        self.last = False

    def _allocate(self, offloaded: bool) -> None:
        tape, rank = self.rank.tape, self.rank
        aliased = self.shards == 1 and rank.size == 4
        home = "host" if offloaded and not aliased else "masters"
        moments = "host" if offloaded else "moments"
        self.master = tape.block(4 * self.shard, home)
        self.aliased = aliased
        size = 0 if aliased else rank.size * self.shard * self.shards
        self.buffer = tape.block(size, "weights")
        self.grad = tape.block(rank.grad_size * self.shard, "gradients")
        self.moments = tape.block(8 * self.shard, moments)
        self.scalars = tape.block(4 * (self._edge() > 0) + 4 * (self._edge() < self.shard), "other")

    def _edge(self) -> int:
        end = (
            sum(w.numel for w in self.weights if w.decay) - self.rank.index(self.axis) * self.shard
        )
        return min(max(end, 0), self.shard)

    def runs(self) -> tuple[int, int]:
        """Elements of the shard that decay, and others."""
        return self._edge(), self.shard - self._edge()

    def spans(self) -> Iterator[tuple[Weight, int]]:
        """Weights with a part in this shard, and how many elements."""
        first, start = self.rank.index(self.axis) * self.shard, 0
        for weight in self.weights:
            low, high = max(start, first), min(start + weight.numel, first + self.shard)
            if low < high:
                yield weight, high - low
            start += weight.numel

    # Weights in use.

    def start_gather(self) -> None:
        """Begin to make the weights present."""
        if not self.present and self.gathering is None:
            self.buffer.resize(self.rank.size * self.shard * self.shards)
            self.gathering = self._start()

    def _start(self) -> Block:
        copied = self.rank.size != 4 or self.master.part == "host"
        mine = self.rank.new(self.rank.size * self.shard) if copied else self.master
        self.rank.say(self.axis, "all_gather", self.buffer.n_bytes, self.buffer, mine)
        return mine if self.shards > 1 else self.master

    def gather(self) -> None:
        """Make the weights present."""
        self.start_gather()
        if self.gathering is not None:
            self.gathering, self.present = None, True

    def release(self) -> None:
        """Free them where shards make them again."""
        if self.frees:
            self.gathering = None
            self.buffer.resize(0)
            self.present = False

    def release_early(self) -> None:
        """A backward pass needs them no more; tables stay."""
        if self.early:
            self.release()

    def start_refresh(self) -> None:
        """The masters have changed."""
        if self.frees:
            self.release()
        elif not self.aliased:
            self.present, self.gathering = False, self._start()

    # Gradients.

    def begin_pass(self, last: bool) -> None:
        """Gradients of a micro-batch are coming."""
        self.last, self.waiting = last, set(self.keys)

    def deliver(self, key: str) -> None:
        """One of them is here."""
        if self.shards > 1 and self.full is None:
            n_bytes = self.rank.grad_size * self.shard * self.shards
            self.full = self.rank.tape.block(n_bytes, "gradients")
        self.waiting.remove(key)
        if not self.waiting:
            self._complete()
            self.release_early()

    def _complete(self) -> None:
        rank, n_bytes = self.rank, self.rank.grad_size * self.shard
        if self.shards > 1 and (self.each_pass or self.last):
            full, self.full = self.full, None
            assert full is not None
            part, slices = rank.new(n_bytes), rank.new(full.n_bytes)
            rank.say(self.axis, "reduce_scatter", full.n_bytes, full, slices)
            rank.start_scatter((part, full, slices), self._sum_copies if self.last else None)
        if self.last and self.shards == 1:
            self._sum_copies()

    def _sum_copies(self) -> None:
        """Begin the sum over replicas: at once, level by level, or (experts) in order."""
        rank, size = self.rank, self.rank.axes[self.copies_axis]
        expert = self.copies_axis.startswith("expert")
        inside = 1 if expert else min(rank.layout.domain or 1, rank.domain_replicas)
        across = rank.domain_replicas // inside
        if inside > 1 and across > 1:
            part = self._in_halves("replicas inside", inside)
            rank.say("replicas across", "all_reduce", part, size=across)
        elif expert and size > 2:
            self._in_halves(self.copies_axis, size)
        else:
            rank.say(self.copies_axis, "all_reduce", self.grad.n_bytes)

    def _in_halves(self, axis: str, size: int) -> int:
        """Reduce-scatter and all-gather of padded buffers, which stay until the end of the step;
        bytes of one part."""
        rank = self.rank
        part = rank.grad_size * -(-self.shard // size)
        whole, mine, slices = rank.new(part * size), rank.new(part), rank.new(part * size)
        rank.say(axis, "reduce_scatter", part * size, whole, slices, size=size)
        rank.say(axis, "all_gather", part * size, whole, mine, size=size)
        self.reducing = (whole, mine, slices)
        return part

    def finish(self) -> None:
        """The sum over replicas is there."""
        self.reducing = ()
