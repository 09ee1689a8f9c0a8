"""A worker of a run that survives: a rank's trainer, or a spare that could be one in a moment.

It goes by the tables of its orders. At each new one the members that hold ranks meet, settle what
counts, give state to those who have none (`recovery.py`) and go on; a member without a rank keeps
itself warm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import latest
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import blocks, check_survivable, keeping
from meshwright.train.agreement import Guard
from meshwright.train.comm import Axis, Clock
from meshwright.train.device import measure_peak_flops
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup, Groups
from meshwright.train.fabric.orders import Interrupted, Orders, Table
from meshwright.train.faults import Fault, Faults
from meshwright.train.harm import corrupt, flip
from meshwright.train.inputs import TrainArgs, first_step, open_inputs, start
from meshwright.train.keepers import Keeper, arm, share_said, take_over, takes_from
from meshwright.train.link_reports import LinkReports
from meshwright.train.loop import Progress, StopFlag, TrainLoop, something_follows
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.parity import Parity
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.rebuild import help_rebuild, rebuild
from meshwright.train.recovery import (
    Given,
    Settled,
    Standing,
    give_state,
    meet,
    set_words,
    settle,
    state_tensors,
    state_words,
    take_state,
)
from meshwright.train.redundancy import Cost
from meshwright.train.shadow import Shadow
from meshwright.train.trainer import Trainer
from meshwright.train.vigil import stand_guard
from meshwright.train.warm import warm_up

_RECOVERY_CHANNEL = 2  # what groups take for themselves are hashes
_SETTLE_S = 10.0  # for the last words to arrive over a network, by whatever path
_NICE = 5  # so that agent and conductor, who have little to do, are never behind the workers


class _Rejoin(Exception):  # noqa: N818 (no error: the way out of a step that is repeated)
    """The others have met, and this rank must come back to where all begin again."""

    def __init__(self, standings: list[Standing], settled: Settled) -> None:
        super().__init__(f"step {settled.steps}")
        self.standings, self.settled = standings, settled


class Member:
    """One member from its start to its end."""

    def __init__(self, context: WorkerContext, args: TrainArgs, job: Job) -> None:
        assert context.orders_fd is not None
        self._args, self._inputs = args, open_inputs(args, job, 0.0)
        check_survivable(job.layout)
        self.number = context.member if context.member >= 0 else context.rank
        self._orders = Orders(context.orders_fd)
        pulse = None if context.pulse_fd is None else PulseWriter(context.pulse_fd, self.number)
        self._events = _Events(context.event_fd, self.number)
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
        self._watch = _Watch(self._fabric, pulse, faults, links)
        self._stop = StopFlag(lambda: self._orders.stop)
        self._shadow = Shadow(self._fabric, job.optimizer, self._watch.shadow, self._tell_cost)
        self._second_hand = False  # the state is that of a shadow
        self._mirror: Keeper | None = None
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
        met: _Rejoin | None = None
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
            except _Rejoin as rejoin:
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
        self._loop = self._mirror = None
        layout = Layout.model_validate(through["layout"])
        self._fabric.forget_channels()
        self._set_job(self._job.model_copy(update={"layout": layout}))

    def _keep(self, table: Table) -> None:
        """Know who keeps whose state."""
        job, shadowed = self._job, bool(table.shadows)
        experts, kind = bool(job.model.n_experts), job.resilience.redundancy
        try:
            self._keeping = keeping(job.layout, kind, experts, table.nodes, shadowed)
        except ConfigError:  # of a smaller size: the best that is left
            self._keeping = keeping(job.layout, "auto", experts, table.nodes)

    def _set_job(self, job: Job) -> None:
        self._job, self._world = job, job.layout.world
        self._blocks = blocks(job.layout, bool(job.model.n_experts))
        self._recovery = FabricGroup(self._fabric, tuple(range(self._world)), _RECOVERY_CHANNEL)
        self._shadow.held.clear()
        self._spares: dict[int, Trainer] = {}  # made in advance, by rank

    def _get_ready(self) -> None:
        """To take any rank."""
        self._loop = self._mirror = self._watch.guard = None
        self._watch.enter(Phase.IDLE)
        if not self._spares:
            self._spares = warm_up(self._args, self._job, self._mesh)
        self._events.emit(Kind.SPARE_READY)

    def _take_part(self, met: _Rejoin | None) -> None:
        """Rejoin the others, whom this rank may have `met` already, and train to the end."""
        self._watch.enter(Phase.TAKEOVER)
        if met is None:
            if self._loop is not None:
                self._mirror = self._arm(self._loop.trainer)
            self._from_shadow()
            met = self._meet(intact=self._is_intact())
        standings, settled = met.standings, met.settled
        self._peak_flops = settled.peak_flops
        goes_on = self._fabric.rank in settled.going_on
        if not goes_on:
            self._fabric.leave_inside()
            if self._loop is not None:
                self._loop.trainer.abandon()
        if self._must_start(standings, settled):
            self._loop = None
            standings = [Standing(one.rank, fresh=True) for one in standings]
            loop = self._start()
        else:
            loop = self._rejoin(standings, settled)
        self._loop = loop
        through = self._fabric.table.through
        if through is not None and through["saving"]:
            self._hold(loop, Path(through["folder"]))
        self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=goes_on)
        self._mirror_again(standings)
        self._going = True
        try:
            loop.go_on()
        finally:
            self._going = False

    def _hold(self, loop: TrainLoop, folder: Path) -> None:
        """Save the state for another layout, and wait for the table that begins it. Raises
        Interrupted when it comes; returns if the run is to stop instead."""
        loop.save_into(folder)
        self._events.emit(Kind.HELD, step=loop.progress.step)
        if (table := self._fabric.await_table()) is not None:
            raise Interrupted(table)

    def _go_on_in_place(self, table: Table) -> bool:
        """Somebody of another replica is replaced while this rank is at what it shares with its own
        alone: meet the others, give what they lack, and go on. False: it must be interrupted.

        Raises Interrupted if another table says so, _Rejoin if the step is to be repeated.
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
        self._mirror = self._arm(loop.trainer)
        try:
            met = self._meet(intact=True)
            starts = self._must_start(met.standings, met.settled)
            if starts or self._fabric.rank not in met.settled.going_on:
                raise met
            share_said(self._recovery, met.standings, loop)
            self._give(loop, met.standings, met.settled)
            loop.trainer.data.sum_again()
            self._events.emit(Kind.EXECUTING, step=loop.progress.step, kept=True)
            self._mirror_again(met.standings)
        except Interrupted as interrupted:
            if not self._is_whole(interrupted.table):
                raise
            return False
        return True

    def _meet(self, intact: bool) -> _Rejoin:
        """Where all ranks stand, and what follows from it."""
        standings = meet(self._recovery, self._standing(intact))
        settled = settle(standings, self._blocks, lambda steps: something_follows(self._job, steps))
        return _Rejoin(standings, settled)

    def _is_intact(self) -> bool:
        """Whether nothing that this rank shares with its replica has been cut short."""
        loop = self._loop
        return loop is not None and not loop.trainer.inside and not self._second_hand

    def _arm(self, trainer: Trainer) -> Keeper | None:
        return arm(trainer, self._keeping, self._fabric, self._mirror, self._shadow_differs)

    def _from_shadow(self) -> None:
        """Who has shadowed its rank has what that has lost."""
        self._second_hand = self._second_hand and self._loop is not None
        if self._loop is None and self._fabric.rank in self._shadow.held:
            loop = self._new_loop()
            kept = take_over(self._shadow, self._fabric.rank, loop)
            if self._mirror is not None:
                self._mirror.kept.update(kept)
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
            saved=progress.saved - (rank > 0 and trainer.applied <= progress.saved),
            checked=progress.checked,
            peak_flops=self._peak_flops,
            intact=intact and not resized,
            keeps=() if self._mirror is None or resized else self._mirror.wards,
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

    def _rejoin(self, standings: list[Standing], settled: Settled) -> TrainLoop:
        """Go on with those that have state."""
        loop = self._loop
        if loop is None:
            loop = self._new_loop()
            source = self._sources(standings, settled)[self._fabric.rank]
            assert source is not None
            if takes_from(self._keeping, self._fabric.rank, source):
                loop.said = take_state(loop.trainer, self._recovery, source)["said"]
            else:
                assert isinstance(self._mirror, Parity)
                loop.said = rebuild(self._fabric, self._keeping, self._mirror, loop)
            loop.trainer.agreed, loop.noted = settled.agreed, settled.steps
            loop.say_again()
        else:
            self._catch_up(loop, settled)
            share_said(self._recovery, standings, loop)
            if loop.trainer.mesh.layout != self._job.layout:
                loop = self._reseat(loop)
            self._give(loop, standings, settled)
        self._second_hand = False
        if loop.trainer.stale:
            loop.trainer.refresh()
        ending = settled.agreed is not None and settled.agreed[1].stop
        loop.progress = Progress(
            settled.steps, settled.evaluated, settled.saved, settled.checked, ending
        )
        return loop

    def _give(self, loop: TrainLoop, standings: list[Standing], settled: Settled) -> None:
        """Do this rank's part in that the fresh ranks get their state."""
        for fresh, source in self._sources(standings, settled).items():
            assert source is not None
            if not takes_from(self._keeping, fresh, source):
                assert isinstance(self._mirror, Parity)
                help_rebuild(self._fabric, self._keeping, fresh, self._mirror, loop)
            elif source == self._fabric.rank:
                given = self._given(loop.trainer, fresh)
                give_state(self._recovery, fresh, given, {"said": loop.said})

    def _sources(self, standings: list[Standing], settled: Settled) -> dict[int, int | None]:
        """Who can give each fresh rank its state."""
        kept = {one.rank: one.keeps for one in standings if not one.fresh}
        return {rank: self._keeping.source(rank, kept) for rank in settled.fresh}

    def _must_start(self, standings: list[Standing], settled: Settled) -> bool:
        """Whether all begin anew: nobody has any state, or what is lost can be made again. Raises
        RunError if the state of a rank is lost for good."""
        if settled.from_nothing:
            return True
        sources = self._sources(standings, settled)
        lost = [rank for rank, source in sources.items() if source is None]
        if lost and settled.steps > self._first_step:
            raise RunError(
                f"rank {lost[0]} is lost, and with it everybody who kept its state; "
                "resume from the last checkpoint"
            )
        return bool(lost)

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

    def _given(self, trainer: Trainer, fresh: int) -> Given:
        """The state of `fresh`, from its copy here or because it equals this rank's own."""
        words = state_words(trainer)
        kept = None if self._mirror is None else self._mirror.kept.get(fresh)
        if kept is not None and fresh not in self._keeping.twins[self._fabric.rank]:
            return Given(kept.state(), words, kept.router.counts)
        return Given(state_tensors(trainer), words)

    def _mirror_again(self, standings: list[Standing]) -> None:
        """Have keepers that lack the state of a ward get it."""
        if self._mirror is None:
            return
        pairs = [
            (ward, keeper)
            for ward, keeper in self._keeping.keepers.items()
            if standings[keeper].fresh or ward not in standings[keeper].keeps
        ]
        self._mirror.exchange(pairs, self._fabric.rank)

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
        self._mirror = None
        self._mirror = self._arm(trainer)
        loop = TrainLoop(trainer, inputs, self._events, self._stop)
        loop.begin_step, loop.also_report = self._watch.begin_step, self._report_redundancy
        loop.feed.idle = self._fabric.look
        twins = self._keeping.twins[rank]
        self._watch.guard = stand_guard(loop, self._fabric, twins, self._events.emit)
        return loop

    def _report_redundancy(self) -> None:
        """What it costs on this rank; twins cost nothing."""
        self._tell_cost(Cost() if self._mirror is None else self._mirror.take_cost())

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


@dataclass
class _Watch:
    """Follows what the trainer is at: for the agent, for faults, and to hear of a new table."""

    fabric: Fabric
    pulse: PulseWriter | None
    faults: Faults
    links: LinkReports
    step: int = 0
    phase: Phase = Phase.IDLE
    computing: bool = False  # whatever is under way may be cut short anywhere
    guard: Guard | None = None

    def on_order(self, _signal: int, frame: FrameType | None) -> None:
        """There are orders: a long computation need not end first. Raises Interrupted."""
        if self.computing and not _imports(frame):
            self.fabric.hear()

    def shadow(self, step: int, phase: Phase) -> None:
        """A spare is at `phase` of `step`, from 1, for a rank that it shadows."""
        if self.pulse is not None:
            self.pulse.enter(phase)
        self.faults.enter(step, phase)

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, begins."""
        self.step, self.phase, self.computing = step, Phase.DATA, False
        if self.pulse is not None:
            self.pulse.step(self.fabric.epoch, step)
        self.links.begin_step()
        self.faults.enter(step, Phase.DATA)

    def enter(self, phase: Phase) -> None:
        """See `comm.Watch`. Raises Interrupted, but not in the middle of a takeover."""
        self.computing = False
        self._tell(phase)
        self.faults.enter(self.step, phase)
        if phase not in (Phase.TAKEOVER, Phase.OPTIMIZER):
            self.fabric.look()
        if phase is Phase.CHECKPOINT and self.guard is not None:
            self.guard.verify(self.step - 1)
        self.computing = phase in (Phase.FORWARD, Phase.BACKWARD)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A takeover in the midst of a phase, which goes on after it; or else it ends there."""
        phase, computing = self.phase, self.computing
        self.computing = False
        self._tell(Phase.TAKEOVER)
        yield
        self._tell(phase)
        self.computing = computing

    def _tell(self, phase: Phase) -> None:
        self.phase = phase
        if self.pulse is not None:
            self.pulse.enter(phase)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported there, which would be left half made."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@dataclass
class _Events:
    """Writes to the agent, in the name of the rank that the member holds; -1 for none."""

    fd: int
    member: int
    fabric: Fabric | None = None

    def emit(self, kind: Kind, **fields: Any) -> None:
        """See `base.events.EventWriter`."""
        rank, epoch = (-1, 0) if self.fabric is None else (self.fabric.rank, self.fabric.epoch)
        named = {"member": self.member, "epoch": epoch, **fields}
        EventWriter(self.fd, rank).emit(kind, **named)
