"""Who keeps the state of a member's rank at the table at hand, and what it keeps of others.

A spare has but its part as a shadow.
"""

from __future__ import annotations

from collections import Counter

from meshwright.base.events import Kind
from meshwright.plan.job import Job, OptimizerSection
from meshwright.plan.resilience import Keeping, best_keeping
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.orders import Table
from meshwright.train.faults import Fault
from meshwright.train.following import Events, Watch
from meshwright.train.giving import Met
from meshwright.train.harm import flip
from meshwright.train.keepers import Keeper, arm, take_over
from meshwright.train.loop import TrainLoop
from meshwright.train.redundancy import Cost
from meshwright.train.shadow import Shadow
from meshwright.train.trainer import Trainer
from meshwright.train.witness import Witness

_MOST_DIFFERENCES = 3  # of a shadow from its rank; then it is given up


class Backing:
    """`second_hand`: the state of this member's rank is that of a shadow."""

    keeping: Keeping

    def __init__(
        self, fabric: Fabric, events: Events, watch: Watch, settings: OptimizerSection
    ) -> None:
        self._fabric, self._events, self._watch = fabric, events, watch
        self.shadow = Shadow(fabric, settings, watch.shadow, self._tell_cost)
        self.witness = Witness(fabric)
        self.keeper: Keeper | None = None
        self.second_hand = False
        self._differed: Counter[int] = Counter()  # how often a shadow of this member's rank did

    def follow(self, job: Job, table: Table) -> None:
        """Know who keeps whose state."""
        experts, kind = bool(job.model.n_experts), job.resilience.redundancy
        self.keeping = best_keeping(job.layout, kind, experts, table.nodes, bool(table.shadows))

    def forget(self) -> None:
        """Ranks are other ranks from now on."""
        self.shadow.held.clear()
        self.witness.forget()

    def arm(self, trainer: Trainer) -> None:
        """Have the state of `trainer` kept from now on."""
        self.keeper = arm(trainer, self.keeping, self._fabric, self.keeper, self._shadow_differs)

    def fill(self, loop: TrainLoop) -> None:
        """Have `loop` stand where its rank stood, which this member has shadowed."""
        kept = take_over(self.shadow, self._fabric.rank, loop)
        if self.keeper is not None:
            self.keeper.kept.update(kept)
        self.second_hand = True

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose state can be had from here."""
        return () if self.keeper is None else self.keeper.wards

    def expect(self, met: Met) -> None:
        """The state that is or will be here has to be that of the rank that was lost."""
        guard, expected = self._watch.guard, met.expected(self._fabric.rank)
        if guard is not None and expected is not None:
            guard.expect(*expected)

    def keep_again(self, met: Met) -> None:
        """Have keepers that lack the state of a ward get it, and say what it comes to."""
        if self._watch.guard is not None:
            self._watch.guard.check_given()
        self.witness.begin()
        if self.keeper is not None:
            self.keeper.exchange(met.lacking(self.keeping), self._fabric.rank)

    def corrupt(self, fault: Fault) -> None:
        """Do the harm of a faulty chip to what a spare shadows."""
        flip(next(iter(self.shadow.held.values())).kept.groups[0].master, fault.element)

    def report(self) -> None:
        """Tell what it costs on this rank; twins cost nothing."""
        self._tell_cost(Cost() if self.keeper is None else self.keeper.take_cost())

    def _tell_cost(self, cost: Cost) -> None:
        guard = self._watch.guard
        self._events.emit(
            Kind.REDUNDANCY,
            kind_of=self.keeping.kind,
            bytes=cost.held_bytes,
            seconds=cost.seconds,
            wire_bytes=cost.wire_bytes,
            check_seconds=0.0 if guard is None else guard.take_cost(),
        )

    def _shadow_differs(self, step: int) -> None:
        """It has its state anew, but for one that differs again and again: that chip errs."""
        rank = self._fabric.rank
        shadow = self._fabric.table.shadows[rank]
        self._differed[shadow] += 1
        if (times := self._differed[shadow]) > _MOST_DIFFERENCES:
            return
        members, what = [], f"the shadow of rank {rank} differed and has got its state anew"
        if times == _MOST_DIFFERENCES:
            members, what = [shadow], f"the shadow of rank {rank} differed {times} times"
        told = {"suspects": [], "members": members, "certain": True, "redo": False}
        self._events.emit(Kind.CORRUPT, step=step, what=what, **told)
