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
from typing import Any

import torch

from meshwright.base.errors import CheckpointError
from meshwright.base.events import Kind, WorkerContext
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.checkpoint.opening import StoreAt
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import blocks, check_survivable
from meshwright.train.backing import Backing
from meshwright.train.device import measure_peak_flops
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.fabric.orders import Interrupted, Orders, Table
from meshwright.train.faults import Fault, Faults
from meshwright.train.following import Events, Watch
from meshwright.train.giving import Handing, Met
from meshwright.train.harm import corrupt
from meshwright.train.inputs import TrainArgs, begins_from, first_step, open_inputs, start
from meshwright.train.keepers import share_said
from meshwright.train.link_reports import LinkReports
from meshwright.train.loop import Progress, StopFlag, TrainLoop, something_follows
from meshwright.train.mesh import Mesh
from meshwright.train.meshing import mesh_on
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.recovery import Settled, Standing, copy_state, meet, settle
from meshwright.train.resizing import resized_layout
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
            pulse=pulse,
            on_links=lambda: links.tell(),
        )
        self._events.fabric = self._fabric
        links = LinkReports(self._fabric.network, self._events)
        faults = Faults(self.number, Fault.all_from(args.faults), self._corrupt)
        self._watch = Watch(self._fabric, pulse, faults, links)
        self._stop = StopFlag(lambda: self._orders.stop)
        self._backing = Backing(self._fabric, self._events, self._watch, job.optimizer)
        self._loop: TrainLoop | None = None
        self._set_job(job)
        # A hook of autograd on what is saved would stay behind where it is cut short.
        if job.layout.offload not in ("activations", "both"):
            signal.signal(signal.SIGIO, self._watch.on_order)
            self._orders.announce()
        self._peak_flops = 0.0
        self._first_step = first_step(args)
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
                self._backing.shadow.begin()
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
            self._backing.follow(self._job, table)
            return
        layout = resized_layout(old, table)
        self._fabric.forget_channels()
        self._set_job(self._job.model_copy(update={"layout": layout}))
        self._backing.follow(self._job, table)

    def _take_layout(self, through: Mapping[str, Any] | None) -> None:
        """What went `through` memory begins from there, if this member has not yet."""
        if through is None or through["saving"] or self._came_by == through["folder"]:
            return
        self._came_by, self._first_step = through["folder"], through["step"]
        at = self._memory(through)
        commit = at.head()
        resume_from = None if commit is None else at.where(commit)
        self._args = replace(self._args, resume_from=resume_from)
        self._loop = self._backing.keeper = None
        layout = Layout.model_validate(through["layout"])
        self._fabric.forget_channels()
        self._set_job(self._job.model_copy(update={"layout": layout}))

    def _set_job(self, job: Job) -> None:
        self._job, self._world = job, job.layout.world
        self._blocks = blocks(job.layout, bool(job.model.n_experts))
        self._recovery = FabricGroup(self._fabric, tuple(range(self._world)), _RECOVERY_CHANNEL)
        self._backing.forget()
        self._spares: dict[int, Trainer] = {}  # made in advance, by rank

    def _get_ready(self) -> None:
        """To take any rank."""
        self._loop = self._backing.keeper = self._watch.guard = None
        self._backing.witness.forget()
        self._watch.enter(Phase.IDLE)
        if not self._spares:
            self._spares = warm_up(self._args, self._job, self._mesh)
        self._events.emit(Kind.SPARE_READY)

    def _take_part(self, met: Met | None) -> None:
        """Rejoin the others, whom this rank may have `met` already, and train to the end."""
        self._watch.enter(Phase.TAKEOVER)
        if met is None:
            if self._loop is not None:
                self._backing.arm(self._loop.trainer)
            self._from_shadow()
            met = self._meet(intact=self._is_intact())
        self._peak_flops = met.settled.peak_flops
        goes_on = self._fabric.rank in met.settled.going_on
        if not goes_on:
            self._fabric.leave_inside()
            if self._loop is not None:
                self._loop.trainer.abandon()
        if met.must_start(self._backing.keeping, self._first_step):
            self._loop = None
            nobody = [Standing(one.rank, fresh=True) for one in met.standings]
            met, loop = Met(nobody, met.settled), self._start()
        else:
            loop = self._rejoin(met)
        self._loop = loop
        through = self._fabric.table.through
        if through is not None and through["saving"]:
            self._hold(loop, self._memory(through))
        self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=goes_on)
        self._backing.keep_again(met)
        self._going = True
        try:
            loop.go_on()
        finally:
            self._going = False

    def _memory(self, through: Mapping[str, Any]) -> StoreAt:
        """Where the state lies in memory while the layout changes."""
        return StoreAt(through["folder"], encrypt=self._job.checkpoint.encrypt)

    def _hold(self, loop: TrainLoop, at: StoreAt) -> None:
        """Save the state for another layout, and wait for the table that begins it. Raises
        Interrupted when it comes; returns if the run is to stop instead."""
        error = None
        try:
            loop.save_into(at)
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
        self._backing.follow(self._job, table)
        self._backing.arm(loop.trainer)
        try:
            met = self._meet(intact=True)
            starts = met.must_start(self._backing.keeping, self._first_step)
            if starts or self._fabric.rank not in met.settled.going_on:
                raise met
            self._catch_up(loop, met.settled)  # what is said of a step goes with its state
            share_said(self._recovery, met.standings, loop)
            self._handing.give(loop, met)
            loop.trainer.data.sum_again()
            self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=True)
            self._backing.keep_again(met)
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
        return loop is not None and not loop.trainer.inside and not self._backing.second_hand

    def _from_shadow(self) -> None:
        """Who has shadowed its rank has what that has lost."""
        backing = self._backing
        backing.second_hand = backing.second_hand and self._loop is not None
        if self._loop is None and self._fabric.rank in backing.shadow.held:
            self._loop = self._new_loop()
            backing.fill(self._loop)
        backing.shadow.held.clear()

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
            checked=progress.checked,
            peak_flops=self._peak_flops,
            intact=intact and not resized,
            keeps=() if resized else self._backing.wards,
            second_hand=self._backing.second_hand,
            seen=None if resized else self._backing.witness.seen,
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
        step = start(loop.trainer, self._args)
        loop.trainer.applied = step
        loop.progress, loop.noted = Progress(step, step, step, step), step
        if self._came_by is not None and (reader := begins_from(self._args)) is not None:
            loop.said = list(reader.meta["said"])
        peak = self._peak_flops if self._fabric.rank == 0 else None
        self._events.emit(Kind.RANK_READY, step=step, peak_flops_per_chip=peak)
        return loop

    @property
    def _handing(self) -> Handing:
        return Handing(self._fabric, self._recovery, self._backing.keeping, self._backing.keeper)

    def _rejoin(self, met: Met) -> TrainLoop:
        """Go on with those that have state."""
        loop, settled = self._loop, met.settled
        saved = settled.steps - 1 if loop is None else loop.progress.saved
        if loop is None:
            loop = self._new_loop()
            self._backing.expect(met)
            self._handing.take(loop, met)
            loop.trainer.agreed, loop.noted = settled.agreed, settled.steps
            loop.say_again()
        else:
            if self._backing.second_hand:
                self._backing.expect(met)
            self._catch_up(loop, settled)
            share_said(self._recovery, met.standings, loop)
            if loop.trainer.mesh.layout != self._job.layout:
                loop = self._reseat(loop)
            self._handing.give(loop, met)
        self._backing.second_hand = False
        if loop.trainer.stale:
            loop.trainer.refresh()
        ending = settled.agreed is not None and settled.agreed[1].stop
        loop.progress = Progress(settled.steps, settled.evaluated, saved, settled.checked, ending)
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
        copy_state(loop.trainer, old.trainer)
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
        self._backing.keeper = None
        self._backing.arm(trainer)
        loop = TrainLoop(trainer, inputs, self._events, self._stop)
        loop.begin_step, loop.also_report = self._watch.begin_step, self._backing.report
        loop.feed.idle = loop.saver.idle = self._fabric.look
        twins, witness = self._backing.keeping.twins[rank], self._backing.witness
        self._watch.guard = stand_guard(loop, self._fabric, twins, self._events.emit, witness)
        return loop

    def _mesh(self, rank: int) -> Mesh:
        block = self._blocks[rank] if self._blocks else frozenset()
        return mesh_on(self._fabric, self._job.layout, rank, block)

    def _corrupt(self, fault: Fault) -> None:
        """Do the harm of a faulty chip; on a spare, to what it shadows."""
        if self._loop is not None:
            corrupt(self._loop.trainer, fault)
        else:
            self._backing.corrupt(fault)
