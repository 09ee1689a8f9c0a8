"""A worker of a run that survives: a rank's trainer, or a spare that could be one in a moment.

It goes by the tables of its orders. At each new one the members that hold ranks meet, settle what
counts, give state to those who have none (`recovery.py`) and go on; a member without a rank keeps
itself warm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import CheckpointError, RunError
from meshwright.base.events import Kind, WorkerContext
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import latest
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import best_keeping, blocks, check_survivable
from meshwright.train.comm import Axis, Clock
from meshwright.train.device import measure_peak_flops
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup, Groups
from meshwright.train.fabric.orders import Interrupted, Orders, Table
from meshwright.train.faults import Fault, Faults
from meshwright.train.following import Events, Watch
from meshwright.train.giving import Handing, Met
from meshwright.train.harm import corrupt, flip
from meshwright.train.inputs import TrainArgs, first_step, open_inputs, start
from meshwright.train.keepers import Keeper, arm, share_said, take_over
from meshwright.train.link_reports import LinkReports
from meshwright.train.loop import Progress, StopFlag, TrainLoop, something_follows
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.recovery import (
    Settled,
    Standing,
    meet,
    set_words,
    settle,
    state_tensors,
    state_words,
)
from meshwright.train.redundancy import Cost
from meshwright.train.shadow import Shadow
from meshwright.train.trainer import Trainer
from meshwright.train.vigil import stand_guard
from meshwright.train.warm import warm_up

_RECOVERY_CHANNEL = 2  # what groups take for themselves are hashes
_SETTLE_S = 10.0  # for the last words to arrive over a network, by whatever path
_NICE = 5  # so that agent and conductor, who have little to do, are never behind the workers


class Member:
    """One member from its start to its end."""

    def __init__(self, context: WorkerContext, args: TrainArgs, job: Job) -> None:
        assert context.orders_fd is not None
        self._args, self._inputs = args, open_inputs(args, job, 0.0)
        check_survivable(job.layout)
        self.number = context.member if context.member >= 0 else context.rank
        self._orders = Orders(context.orders_fd)
        pulse = None if context.pulse_fd is None else PulseWriter(context.pulse_fd, self.number)
        self._events = Events(context.event_fd, self.number)
        self._fabric = Fabric(
            self.number,
            self._orders,
            context.secret,
            tuple(context.hosts),
            on_gone=lambda peer: self._events.emit(Kind.PEER_GONE, peer=peer),
            pulse=pulse,
            on_links=lambda: links.tell(),
        )
        self._events.fabric = self._fabric
        links = LinkReports(self._fabric.network, self._events)
        faults = Faults(self.number, Fault.all_from(args.faults), self._corrupt)
        self._watch = Watch(self._fabric, pulse, faults, links)
        self._stop = StopFlag(lambda: self._orders.stop)
        self._shadow = Shadow(self._fabric, job.optimizer, self._watch.shadow, self._tell_cost)
        self._second_hand = False  # the state is that of a shadow
        self._keeper: Keeper | None = None
        self._loop: TrainLoop | None = None
        self._set_job(job)
        # A hook of autograd on what is saved would stay behind where it is cut short.
        if job.layout.offload not in ("activations", "both"):
            signal.signal(signal.SIGIO, self._watch.on_order)
            self._orders.announce()
        self._peak_flops = 0.0
        self._first_step = first_step(args.resume_from)
        self._came_by: str | None = None  # the folder in memory that it began from
        self._going = False  # in the steps
        self._fabric.in_place = self._go_on_in_place

    def run(self) -> None:
        """Until the run is over, or the orders are to stop."""
        os.nice(_NICE)
        self._events.emit(Kind.MEMBER_UP, addresses=self._fabric.addresses)
        table = self._fabric.await_table()
        met: Met | None = None
        while table is not None:
            self._watch.computing = False  # before the fabric may interrupt again
            if met is None:
                self._fabric.enter(table, keep_inside=self._is_whole(table))
                self._fit(table)
            try:
                if self._fabric.rank >= 0:
                    self._take_part(met)
                    self._fabric.settle(_SETTLE_S)
                    return
                self._get_ready()
                self._shadow.begin()
                table = self._fabric.await_table()
            except Interrupted as interrupted:
                table, met = interrupted.table, None
            except Met as rejoin:
                met = rejoin

    def _is_whole(self, table: Table) -> bool:
        """Whether nobody of this rank's replica is replaced by `table`."""
        rank = table.rank_of(self.number)
        same = rank == self._fabric.rank and len(table.members) == self._world
        through = table.through
        if through is not None and (through["saving"] or through["folder"] != self._came_by):
            return False
        if not self._blocks or rank is None or not same:
            return False
        return not self._blocks[rank].intersection(table.lost)

    def _fit(self, table: Table) -> None:
        """Take on the size of `table`: only the number of replicas changes, unless all have gone
        through memory."""
        self._take_layout(table.through)
        old = self._job.layout
        if len(table.members) == old.world:
            self._keep(table)
            return
        replicas = len(table.members) * old.dp_replicate // old.world
        layout = old.model_copy(update={"dp_replicate": replicas})
        asked = layout if table.resize is None else Layout.model_validate(table.resize["layout"])
        if layout != asked or layout.world != len(table.members):
            raise RunError(
                f"a table of {len(table.members)} ranks as {asked.label} does not follow on "
                f"{old.label}: only dp_replicate may change; start the run anew"
            )
        self._fabric.forget_channels()
        self._set_job(self._job.model_copy(update={"layout": layout}))
        self._keep(table)

    def _take_layout(self, through: Mapping[str, Any] | None) -> None:
        """What went `through` memory begins from there, if this member has not yet."""
        if through is None or through["saving"] or self._came_by == through["folder"]:
            return
        self._came_by, self._first_step = through["folder"], through["step"]
        commit = latest(Path(through["folder"]))
        resume_from = None if commit is None else str(commit.path)
        self._args = replace(self._args, resume_from=resume_from)
        self._loop = self._keeper = None
        layout = Layout.model_validate(through["layout"])
        self._fabric.forget_channels()
        self._set_job(self._job.model_copy(update={"layout": layout}))

    def _keep(self, table: Table) -> None:
        """Know who keeps whose state."""
        job, shadowed = self._job, bool(table.shadows)
        experts, kind = bool(job.model.n_experts), job.resilience.redundancy
        self._keeping = best_keeping(job.layout, kind, experts, table.nodes, shadowed)

    def _set_job(self, job: Job) -> None:
        self._job, self._world = job, job.layout.world
        self._blocks = blocks(job.layout, bool(job.model.n_experts))
        self._recovery = FabricGroup(self._fabric, tuple(range(self._world)), _RECOVERY_CHANNEL)
        self._shadow.held.clear()
        self._spares: dict[int, Trainer] = {}  # made in advance, by rank

    def _get_ready(self) -> None:
        """To take any rank."""
        self._loop = self._keeper = self._watch.guard = None
        self._watch.enter(Phase.IDLE)
        if not self._spares:
            self._spares = warm_up(self._args, self._job, self._mesh)
        self._events.emit(Kind.SPARE_READY)

    def _take_part(self, met: Met | None) -> None:
        """Rejoin the others, whom this rank may have `met` already, and train to the end."""
        self._watch.enter(Phase.TAKEOVER)
        if met is None:
            if self._loop is not None:
                self._keeper = self._arm(self._loop.trainer)
            self._from_shadow()
            met = self._meet(intact=self._is_intact())
        self._peak_flops = met.settled.peak_flops
        goes_on = self._fabric.rank in met.settled.going_on
        if not goes_on:
            self._fabric.leave_inside()
            if self._loop is not None:
                self._loop.trainer.abandon()
        if met.must_start(self._keeping, self._first_step):
            self._loop = None
            nobody = [Standing(one.rank, fresh=True) for one in met.standings]
            met, loop = Met(nobody, met.settled), self._start()
        else:
            loop = self._rejoin(met)
        self._loop = loop
        through = self._fabric.table.through
        if through is not None and through["saving"]:
            self._hold(loop, Path(through["folder"]))
        self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=goes_on)
        self._keep_again(met)
        self._going = True
        try:
            loop.go_on()
        finally:
            self._going = False

    def _hold(self, loop: TrainLoop, folder: Path) -> None:
        """Save the state for another layout, and wait for the table that begins it. Raises
        Interrupted when it comes; returns if the run is to stop instead."""
        error = None
        try:
            loop.save_into(folder)
        except CheckpointError as failed:
            error = str(failed)
        self._events.emit(Kind.HELD, step=loop.progress.step, error=error)
        if (table := self._fabric.await_table()) is not None:
            raise Interrupted(table)

    def _go_on_in_place(self, table: Table) -> bool:
        """Somebody of another replica is replaced while this rank is at what it shares with its own
        alone: meet the others, give what they lack, and go on. False: it must be interrupted.

        Raises Interrupted if another table says so, Met if the step is to be repeated.
        """
        loop = self._loop
        going = self._going and loop is not None and loop.trainer.inside
        if not going or loop is None or not self._is_whole(table):
            return False
        self._going = False  # not while this lasts
        with self._watch.set_aside():
            while not self._is_met(loop, table):
                newest = self._orders.newest
                assert newest is not None
                table = newest
        self._going = True
        return True

    def _is_met(self, loop: TrainLoop, table: Table) -> bool:
        """Whether all went well; false if there is a newer table, by which it can be tried again.
        Raises as `_go_on_in_place`."""
        self._fabric.enter(table, keep_inside=True)
        self._keep(table)
        self._keeper = self._arm(loop.trainer)
        try:
            met = self._meet(intact=True)
            starts = met.must_start(self._keeping, self._first_step)
            if starts or self._fabric.rank not in met.settled.going_on:
                raise met
            share_said(self._recovery, met.standings, loop)
            self._handing.give(loop, met)
            loop.trainer.data.sum_again()
            self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=True)
            self._keep_again(met)
        except Interrupted as interrupted:
            if not self._is_whole(interrupted.table):
                raise
            return False
        return True

    def _meet(self, intact: bool) -> Met:
        """Where all ranks stand, and what follows from it."""
        standings = meet(self._recovery, self._standing(intact))
        settled = settle(standings, self._blocks, lambda steps: something_follows(self._job, steps))
        return Met(standings, settled)

    def _is_intact(self) -> bool:
        """Whether nothing that this rank shares with its replica has been cut short."""
        loop = self._loop
        return loop is not None and not loop.trainer.inside and not self._second_hand

    def _arm(self, trainer: Trainer) -> Keeper | None:
        return arm(trainer, self._keeping, self._fabric, self._keeper, self._shadow_differs)

    def _from_shadow(self) -> None:
        """Who has shadowed its rank has what that has lost."""
        self._second_hand = self._second_hand and self._loop is not None
        if self._loop is None and self._fabric.rank in self._shadow.held:
            loop = self._new_loop()
            kept = take_over(self._shadow, self._fabric.rank, loop)
            if self._keeper is not None:
                self._keeper.kept.update(kept)
            self._loop, self._second_hand = loop, True
        self._shadow.held.clear()

    def _shadow_differs(self, step: int) -> None:
        rank = self._fabric.rank
        what = f"the shadow of rank {rank} differed and has got its state anew"
        mended = {"suspects": [], "members": [], "certain": True, "redo": False}
        self._events.emit(Kind.CORRUPT, step=step, what=what, **mended)

    def _standing(self, intact: bool) -> Standing:
        rank = self._fabric.rank
        if self._loop is None:
            return Standing(rank, fresh=True, peak_flops=self._measured_peak(rank))
        trainer, progress = self._loop.trainer, self._loop.progress
        resized = trainer.mesh.layout != self._job.layout
        return Standing(
            rank=rank,
            fresh=False,
            applied=trainer.applied,
            agreed=trainer.agreed,
            reduced=trainer.reduced,
            evaluated=progress.evaluated,
            saved=progress.saved,
            checked=progress.checked,
            peak_flops=self._peak_flops,
            intact=intact and not resized,
            keeps=() if self._keeper is None or resized else self._keeper.wards,
            second_hand=self._second_hand,
        )

    def _measured_peak(self, rank: int) -> float:
        """Of one rank while the others wait; only at the start."""
        if rank or self._peak_flops or self._fabric.table.lost:
            return self._peak_flops
        dtype = COMPUTE_DTYPES[self._job.layout.precision]
        return measure_peak_flops(dtype, torch.device("cpu"), self._world)

    def _start(self) -> TrainLoop:
        """Nobody has any state: the first weights, or those of a checkpoint."""
        loop = self._new_loop()
        step = start(loop.trainer, self._args.resume_from)
        loop.trainer.applied = step
        loop.progress, loop.noted = Progress(step, step, step, step), step
        if self._came_by is not None and self._args.resume_from is not None:
            loop.said = list(Reader(Path(self._args.resume_from)).meta["said"])
        peak = self._peak_flops if self._fabric.rank == 0 else None
        self._events.emit(Kind.RANK_READY, step=step, peak_flops_per_chip=peak)
        return loop

    @property
    def _handing(self) -> Handing:
        return Handing(self._fabric, self._recovery, self._keeping, self._keeper)

    def _keep_again(self, met: Met) -> None:
        """Have keepers that lack the state of a ward get it."""
        if self._keeper is not None:
            self._keeper.exchange(met.lacking(self._keeping), self._fabric.rank)

    def _rejoin(self, met: Met) -> TrainLoop:
        """Go on with those that have state."""
        loop, settled = self._loop, met.settled
        if loop is None:
            loop = self._new_loop()
            self._handing.take(loop, met)
            loop.trainer.agreed, loop.noted = settled.agreed, settled.steps
            loop.say_again()
        else:
            self._catch_up(loop, settled)
            share_said(self._recovery, met.standings, loop)
            if loop.trainer.mesh.layout != self._job.layout:
                loop = self._reseat(loop)
            self._handing.give(loop, met)
        self._second_hand = False
        if loop.trainer.stale:
            loop.trainer.refresh()
        ending = settled.agreed is not None and settled.agreed[1].stop
        loop.progress = Progress(
            settled.steps, settled.evaluated, settled.saved, settled.checked, ending
        )
        return loop

    def _catch_up(self, loop: TrainLoop, settled: Settled) -> None:
        """Apply and speak of a step that counts, if that has not been done here."""
        if settled.agreed is None:
            return
        step, agreed = settled.agreed
        if self._fabric.rank in settled.late:
            loop.trainer.agreed = settled.agreed
            loop.trainer.apply(step, agreed)
        loop.note(step + 1, agreed)

    def _reseat(self, old: TrainLoop) -> TrainLoop:
        """The same place of the model in a layout of another size: the state is the same."""
        loop = self._new_loop()
        ours, theirs = loop.trainer, old.trainer
        for place, x in zip(state_tensors(ours), state_tensors(theirs), strict=True):
            place.copy_(x)
        set_words(ours, state_words(theirs))
        ours.agreed = theirs.agreed
        loop.said, loop.noted = old.said, old.noted
        self._loop = loop
        if old.mesh.rank:
            loop.say_again()
        return loop

    def _new_loop(self) -> TrainLoop:
        rank = self._fabric.rank
        trainer = self._spares.pop(rank, None)
        if trainer is None:
            device = torch.device("cpu")
            trainer = Trainer(self._job, self._mesh(rank), device, self._args.end_of_text)
        self._spares = {}
        inputs = replace(self._inputs, peak_flops=self._peak_flops)
        trainer.mesh.clock.watch = self._watch
        if self._blocks:
            trainer.data.keep_own_sums(self._fabric.undisturbed)
        self._keeper = None
        self._keeper = self._arm(trainer)
        loop = TrainLoop(trainer, inputs, self._events, self._stop)
        loop.begin_step, loop.also_report = self._watch.begin_step, self._report_redundancy
        loop.feed.idle = self._fabric.look
        twins = self._keeping.twins[rank]
        self._watch.guard = stand_guard(loop, self._fabric, twins, self._events.emit)
        return loop

    def _report_redundancy(self) -> None:
        """What it costs on this rank; twins cost nothing."""
        self._tell_cost(Cost() if self._keeper is None else self._keeper.take_cost())

    def _tell_cost(self, cost: Cost) -> None:
        guard = self._watch.guard
        self._events.emit(
            Kind.REDUNDANCY,
            kind_of=self._keeping.kind,
            bytes=cost.held_bytes,
            seconds=cost.seconds,
            wire_bytes=cost.wire_bytes,
            check_seconds=0.0 if guard is None else guard.take_cost(),
        )

    def _mesh(self, rank: int) -> Mesh:
        """That of `rank`, whose groups go by the table at hand."""
        clock = Clock()
        new_group = Groups(self._fabric, self._blocks[rank] if self._blocks else frozenset())
        mesh = build_mesh(self._job.layout, rank, clock, new_group, new_group.after)
        everyone = list(range(self._world))
        if len(everyone) > 1:
            world = Axis(tuple(everyone), rank, new_group.after(everyone), clock)
            mesh = replace(mesh, world=world)
        return mesh

    def _corrupt(self, fault: Fault) -> None:
        """Do the harm of a faulty chip; on a spare, to what it shadows."""
        if self._loop is not None:
            corrupt(self._loop.trainer, fault)
        else:
            flip(next(iter(self._shadow.held.values())).kept.groups[0].master, fault.element)
