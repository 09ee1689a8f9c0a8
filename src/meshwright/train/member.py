"""A worker of a run that survives: a rank's trainer, or a spare that could be one in a moment.

It goes by the tables of its orders. At each new one the members that hold ranks meet, settle what
counts, give state to those who have none (`recovery.py`) and go on; a member without a rank keeps
itself warm.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import check_survivable, keeping
from meshwright.train.agreement import checksum, disagreements, gather
from meshwright.train.comm import Axis, Clock
from meshwright.train.device import measure_peak_flops
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup, Groups
from meshwright.train.fabric.orders import Interrupted, Orders, Table
from meshwright.train.faults import Fault, Faults
from meshwright.train.inputs import TrainArgs, first_step, open_inputs, start
from meshwright.train.link_reports import LinkReports
from meshwright.train.loop import Progress, StopFlag, TrainLoop
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.precision.apply import COMPUTE_DTYPES
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
from meshwright.train.redundancy import Mirror
from meshwright.train.trainer import Trainer
from meshwright.train.warm import warm_up

_RECOVERY_CHANNEL, _MIRROR_CHANNEL = 2, 4  # what groups take for themselves are hashes
_CHECK_CHANNEL = 1 << 20  # and one for each step that is checked
_SETTLE_S = 10.0  # for the last words to arrive over a network, by whatever path
_NICE = 5  # so that agent and conductor, who have little to do, are never behind the workers


class Member:
    """One member from its start to its end."""

    def __init__(self, context: WorkerContext, args: TrainArgs, job: Job) -> None:
        assert context.orders_fd is not None
        self._args, self._inputs = args, open_inputs(args, job, 0.0)
        check_survivable(job.layout)
        self._set_job(job)
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
        self._mirror: Mirror | None = None
        self._loop: TrainLoop | None = None
        # A hook of autograd on what is saved would stay behind where it is cut short.
        if job.layout.offload not in ("activations", "both"):
            signal.signal(signal.SIGIO, self._watch.on_order)
            self._orders.announce()
        self._peak_flops = 0.0

    def run(self) -> None:
        """Until the run is over, or the orders are to stop."""
        os.nice(_NICE)
        self._events.emit(Kind.MEMBER_UP, addresses=self._fabric.addresses)
        table = self._fabric.await_table()
        while table is not None:
            self._watch.computing = False  # before the fabric may interrupt again
            self._fabric.enter(table)
            self._fit(table)
            try:
                if self._fabric.rank >= 0:
                    self._take_part()
                    self._fabric.settle(_SETTLE_S)
                    return
                self._get_ready()
                table = self._fabric.await_table()
            except Interrupted as interrupted:
                table = interrupted.table

    def _fit(self, table: Table) -> None:
        """Take on the size of `table`: only the number of replicas changes."""
        old = self._job.layout
        if len(table.members) == old.world:
            return
        replicas = len(table.members) * old.dp_replicate // old.world
        layout = old.model_copy(update={"dp_replicate": replicas})
        asked = layout if table.resize is None else Layout.model_validate(table.resize["layout"])
        if layout != asked or layout.world != len(table.members):
            raise RunError(
                f"a table of {len(table.members)} ranks as {asked.label} does not follow on "
                f"{old.label}: only dp_replicate may change; start the run anew"
            )
        self._set_job(self._job.model_copy(update={"layout": layout}), resized=True)

    def _set_job(self, job: Job, resized: bool = False) -> None:
        self._job, self._world = job, job.layout.world
        experts = bool(job.model.n_experts)
        kind = job.resilience.redundancy
        try:
            self._keeping = keeping(job.layout, kind, experts)
        except ConfigError:
            if not resized:
                raise
            self._keeping = keeping(job.layout, "auto", experts)  # the best that is left
        self._spares: dict[int, Trainer] = {}  # made in advance, by rank

    def _get_ready(self) -> None:
        """To take any rank."""
        self._loop = self._mirror = None
        self._watch.enter(Phase.IDLE)
        if not self._spares:
            self._spares = warm_up(self._args, self._job, self._mesh)
        self._events.emit(Kind.SPARE_READY)

    def _take_part(self) -> None:
        """Rejoin the others, and train to the end."""
        self._watch.enter(Phase.TAKEOVER)
        loop = self._loop
        if loop is not None:
            loop.trainer.abandon()
        world = FabricGroup(self._fabric, tuple(range(self._world)), _RECOVERY_CHANNEL)
        standings = meet(world, self._standing())
        settled = settle(standings)
        self._peak_flops = settled.peak_flops
        if self._must_start(standings, settled):
            self._loop = None
            standings = [Standing(one.rank, fresh=True) for one in standings]
            loop = self._start()
        else:
            loop = self._rejoin(world, standings, settled)
        self._loop = loop
        self._events.emit(Kind.EXECUTING, step=loop.progress.step)
        self._mirror_again(standings)
        loop.go_on()

    def _standing(self) -> Standing:
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
            keeps=() if self._mirror is None or resized else tuple(self._mirror.kept),
        )

    def _measured_peak(self, rank: int) -> float:
        """Of one rank while the others wait; only at the start."""
        if rank or self._fabric.table.lost:
            return 0.0
        dtype = COMPUTE_DTYPES[self._job.layout.precision]
        return measure_peak_flops(dtype, torch.device("cpu"), self._world)

    def _start(self) -> TrainLoop:
        """Nobody has any state: the first weights, or those of a checkpoint."""
        loop = self._new_loop()
        step = start(loop.trainer, self._args.resume_from)
        loop.trainer.applied = step
        loop.progress = Progress(step, step, step, step)
        peak = self._peak_flops if self._fabric.rank == 0 else None
        self._events.emit(Kind.RANK_READY, step=step, peak_flops_per_chip=peak)
        return loop

    def _rejoin(self, world: FabricGroup, standings: list[Standing], settled: Settled) -> TrainLoop:
        """Go on with those that have state."""
        rank, loop = self._fabric.rank, self._loop
        sources = self._sources(standings, settled)
        if loop is None:
            loop = self._new_loop()
            source = sources[rank]
            assert source is not None
            loop.said = take_state(loop.trainer, world, source)["said"]
            loop.trainer.agreed, loop.noted = settled.agreed, settled.steps
            loop.say_again()
        else:
            self._catch_up(loop, settled)
            if loop.trainer.mesh.layout != self._job.layout:
                loop = self._reseat(loop)
            for fresh, source in sources.items():
                if source == rank:
                    given = self._given(loop.trainer, fresh)
                    give_state(world, fresh, given, {"said": loop.said})
        loop.trainer.data.refresh()
        ending = settled.agreed is not None and settled.agreed[1].stop
        loop.progress = Progress(
            settled.steps, settled.evaluated, settled.saved, settled.checked, ending
        )
        return loop

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
        if lost and settled.steps > first_step(self._args.resume_from):
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
        if self._keeping.keepers:
            everyone = FabricGroup(self._fabric, tuple(range(self._world)), _MIRROR_CHANNEL)
            keeper, wards = self._keeping.keepers[rank], self._keeping.wards(rank)
            self._mirror = trainer.redundancy = Mirror(trainer, everyone, keeper, wards)
        loop = TrainLoop(trainer, inputs, self._events, self._stop)
        loop.begin_step, loop.also_report = self._watch.begin_step, self._report_redundancy
        loop.check = self._check
        return loop

    def _check(self, step: int) -> None:
        """Whether all who hold the same weights agree on them."""
        assert self._loop is not None
        twins = self._keeping.twins
        if not any(twins):
            return
        world = FabricGroup(self._fabric, tuple(range(self._world)), _CHECK_CHANNEL + 2 * step)
        sums = gather(world, checksum(self._loop.trainer))
        for found in disagreements(sums, twins):
            if self._fabric.rank == found.ranks[0]:
                what = f"the weights of ranks {list(found.ranks)} differ"
                suspects = list(found.odd or found.ranks)
                self._events.emit(Kind.CORRUPT, step=step, what=what, suspects=suspects)

    def _report_redundancy(self) -> None:
        """What it costs on this rank; twins cost nothing."""
        held, seconds = (0, 0.0) if self._mirror is None else self._mirror.take_cost()
        kind = self._keeping.kind
        self._events.emit(Kind.REDUNDANCY, kind_of=kind, bytes=held, seconds=seconds)

    def _mesh(self, rank: int) -> Mesh:
        """That of `rank`, whose groups go by the table at hand."""
        clock, new_group = Clock(), Groups(self._fabric)
        mesh = build_mesh(self._job.layout, rank, clock, new_group)
        everyone = list(range(self._world))
        if len(everyone) > 1:
            world = Axis(tuple(everyone), rank, new_group(everyone), clock)
            mesh = replace(mesh, world=world)
        return mesh

    def _corrupt(self, fault: Fault) -> None:
        """Flip a bit, as a faulty chip does."""
        assert self._loop is not None
        group = self._loop.trainer.data.groups[0]
        flat = group.master if fault.what == "weight" else group.grad
        flat.view(torch.int32)[fault.element] ^= 1 << 29


@dataclass
class _Watch:
    """Follows what the trainer is at: for the agent, for faults, and to hear of a new table."""

    fabric: Fabric
    pulse: PulseWriter | None
    faults: Faults
    links: LinkReports
    step: int = 0
    computing: bool = False  # whatever is under way may be cut short anywhere

    def on_order(self, _signal: int, frame: FrameType | None) -> None:
        """There are orders: a long computation need not end first. Raises Interrupted."""
        if self.computing and not _imports(frame):
            self.fabric.hear()

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, begins."""
        self.step, self.computing = step, False
        if self.pulse is not None:
            self.pulse.step(self.fabric.epoch, step)
        self.links.begin_step()
        self.faults.enter(step, Phase.DATA)

    def enter(self, phase: Phase) -> None:
        """See `comm.Watch`. Raises Interrupted, but not in the middle of a takeover."""
        self.computing = False
        if self.pulse is not None:
            self.pulse.enter(phase)
        self.faults.enter(self.step, phase)
        if phase not in (Phase.TAKEOVER, Phase.OPTIMIZER):
            self.fabric.look()
        self.computing = phase in (Phase.FORWARD, Phase.BACKWARD)


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
