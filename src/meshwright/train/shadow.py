"""Spares that hold the state of ranks, and so take one over without being given anything.

Before the vote on a step a rank sends its shadow the redo log (see `redundancy.py`), and votes only
once the shadow has said that all of it is there: so whatever has been voted on can be made by the
shadow too. After the vote it tells the shadow how, which makes the same update. What the shadow has
not been told of the last vote when its rank is lost, the other ranks know.

At each table a rank tells its shadow where all stand; the shadow follows, or asks for the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright.base.pulse import Phase
from meshwright.plan.job import OptimizerSection
from meshwright.train.agreement import state_bits
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.line import Line
from meshwright.train.gradients import Vote
from meshwright.train.recovery import set_words, state_tensors, state_words
from meshwright.train.redundancy import Cost, Kept, own_log, seed, size_of
from meshwright.train.trainer import Trainer

_CHANNEL = 6
_REPORT_EVERY = 20  # steps between two reports of what it takes
_COMPARE_EVERY = 10  # steps between two looks at whether a shadow equals its rank


class Shadowed:
    """What a rank does with the member at `place`, which shadows it. See `trainer.Redundancy`.

    `kept` is what this rank holds of others, until all have their state. `differs` hears of a step
    before which the shadow was found to differ.
    """

    def __init__(
        self,
        trainer: Trainer,
        fabric: Fabric,
        place: int,
        kept: dict[int, Kept],
        differs: Callable[[int], object],
        before: object = None,
    ) -> None:
        """`before` did the same until the table at hand."""
        self._trainer = trainer
        self._line = Line(fabric, place, _CHANNEL)
        self.kept, self._differs = kept, differs
        self._logged: int | None = None  # the step whose log the shadow has
        self._last: dict[str, Any] | None = None  # how the last step went
        if isinstance(before, Shadowed):
            self._last = before._last
        self.cost = Cost()

    def log(self) -> None:
        """Send this rank's log and wait until its shadow has it."""
        trainer = self._trainer
        trainer.mesh.clock.enter(Phase.MIRROR)
        start = time.perf_counter()
        step = trainer.reduced
        assert step is not None
        # Had the step not begun, nothing would have seeded the routers in it.
        words = {**state_words(trainer), "seeded": trainer.seeded_before}
        asked: dict[str, Any] = {"step": step, "words": words}
        if (step + 1) % _COMPARE_EVERY == 0:
            asked["sum"] = state_bits(trainer.data.groups, trainer.optimizer.moments)
        log = own_log(trainer)
        while not self._is_there(asked, log):
            self._differs(step)
            self._seed()
        self._logged = step
        self.cost.seconds += time.perf_counter() - start

    def _is_there(self, asked: dict[str, Any], log: list[torch.Tensor]) -> bool:
        sent = [self._line.say(asked), self._line.send(log)]
        self.cost.wire_bytes += size_of(log)
        has = self._has_it()
        for op in sent:
            op.wait()
        return has

    def apply(self, rate: float | None, divisor: float) -> bool:
        """Tell the shadow how the step went."""
        for kept in self.kept.values():
            kept.apply(rate, divisor)
        trainer = self._trainer
        assert trainer.agreed is not None
        step, vote = trainer.agreed
        self._last = {
            "step": step,
            "rate": rate,
            "divisor": divisor,
            "vote": asdict(vote),
            "words": state_words(trainer),
        }
        if self._logged == step:
            self._logged = None
            self._line.say(self._last)
        self.cost.steps += 1
        return False

    def exchange(self, _pairs: list[tuple[int, int]], _rank: int) -> None:
        """Have the shadow hold what this rank does; nobody needs what this one held of others."""
        self.kept = {}
        told = self._line.say({"steps": self._trainer.applied, "last": self._last})
        has = self._has_it()
        told.wait()
        if not has:
            self._seed()

    def _has_it(self) -> bool:
        answer = torch.zeros(1, dtype=torch.int64)
        self._line.receive([answer]).wait()
        return bool(answer)

    def _seed(self) -> None:
        trainer = self._trainer
        shapes, state = seed(trainer)
        said = {"shapes": shapes, "words": state_words(trainer)}
        for op in [self._line.say(said), self._line.send(state)]:
            op.wait()

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose state can be had from here."""
        return tuple(self.kept)

    def take_cost(self) -> Cost:
        """What it has taken since it was last asked; what the shadow holds, that tells itself."""
        return self.cost.take(sum(kept.n_bytes for kept in self.kept.values()))


@dataclass
class Held:
    """The state of a rank at its shadow, `applied` steps old; of the step `logged` its log is here
    too. `words` are those of `recovery.state_words`, `last` is how the last step went."""

    kept: Kept
    words: dict[str, Any]
    applied: int
    logged: int | None = None
    last: dict[str, Any] | None = None

    def follow(self, last: dict[str, Any] | None) -> None:
        """Make the step that `last` tells of, if it is the one of the log."""
        if last is not None and last["step"] == self.applied == self.logged:
            self.kept.apply(last["rate"], last["divisor"])
            self.applied, self.logged = self.applied + 1, None
            self.last, self.words = last, last["words"]

    @property
    def checksum(self) -> int:
        """Of masters and moments."""
        return state_bits(self.kept.groups, self.kept.optimizer.moments)

    def fill(self, trainer: Trainer) -> None:
        """Make `trainer` stand where the lost rank stood, with the log of the step under way if
        there is one."""
        kept = self.kept
        for place, x in zip(state_tensors(trainer), kept.state(), strict=True):
            place.copy_(x)
        if kept.router.counts is not None:
            trainer.routing.learn_from(kept.router.counts)
        words = {**self.words, "updates": kept.optimizer.updates_done, "applied": self.applied}
        set_words(trainer, words)
        if self.last is not None:
            trainer.agreed = (self.last["step"], Vote(**self.last["vote"]))
        if self.logged == self.applied:
            for group, own in zip(trainer.data.groups, kept.groups, strict=True):
                group.grad.copy_(own.grad)
            for router, x in zip(trainer.routing.state().values(), kept.coming, strict=True):
                router.copy_(x)
            if kept.has_counts:
                trainer.routing.expect(kept.counts)
            trainer.reduced = self.logged


class Shadow:
    """A spare's part: everything happens in the turns of the fabric, whoever waits for what.

    `busy` hears of a step, from 1, and what is done for it; `report` now and then of what it takes.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: OptimizerSection,
        busy: Callable[[int, Phase], object],
        report: Callable[[Cost], object],
    ) -> None:
        self.held: dict[int, Held] = {}
        self.cost = Cost()
        self._fabric, self._settings = fabric, settings
        self._busy, self._report = busy, report

    def begin(self) -> None:
        """Shadow the ranks that the table at hand says, until there is another."""
        table = self._fabric.table
        wards = [rank for rank, member in table.shadows.items() if member == self._fabric.member]
        self.held = {rank: held for rank, held in self.held.items() if rank in wards}
        for ward in wards:
            _Ward(self, self._fabric, ward).begin()

    def promote(self, rank: int) -> tuple[Held, dict[int, Kept]]:
        """What it holds of `rank`, which it takes, and of others that are as far."""
        mine, others, self.held = self.held.pop(rank), self.held, {}
        told = [held.last for held in (mine, *others.values()) if held.last is not None]
        last = max(told, key=lambda one: one["step"], default=None)
        for held in (mine, *others.values()):
            held.follow(last)
        alike = {ward: held.kept for ward, held in others.items() if held.applied == mine.applied}
        return mine, alike

    def new_kept(self, shapes: dict[str, Any]) -> Kept:
        """Room for a state of these shapes."""
        return Kept(shapes, self._settings)

    def busy(self, step: int, phase: Phase) -> None:
        """It is at work for `step`, from 0."""
        self._busy(step + 1, phase)

    def followed(self, ward: int, step: int, seconds: float) -> None:
        """It has made `step` of a ward, from 0."""
        self.cost.seconds += seconds
        if ward != max(self.held):
            return
        self.cost.steps += 1
        if (step + 1) % _REPORT_EVERY == 0:
            self._report(self.cost.take(sum(held.kept.n_bytes for held in self.held.values())))


class _Ward:
    """What goes on between a shadow and one of its ranks while a table lasts."""

    def __init__(self, shadow: Shadow, fabric: Fabric, rank: int) -> None:
        self._shadow, self._rank = shadow, rank
        self._line = Line(fabric, rank, _CHANNEL)
        self._answer = torch.zeros(1, dtype=torch.int64)

    def begin(self) -> None:
        """Hear where the ranks stand."""
        self._line.hear(self._on_summons)

    @property
    def _held(self) -> Held:
        return self._shadow.held[self._rank]

    def _on_summons(self, said: dict[str, Any]) -> None:
        held = self._shadow.held.get(self._rank)
        if held is not None:
            held.follow(said["last"])
        if held is not None and held.applied == said["steps"]:
            held.logged = None
            self._reply(True, self._await_log)
        else:
            self._reply(False, self._await_seed)

    def _await_seed(self) -> None:
        self._line.hear(self._on_seed)

    def _on_seed(self, said: dict[str, Any]) -> None:
        kept, words = self._shadow.new_kept(said["shapes"]), said["words"]

        def come() -> None:
            self._shadow.held[self._rank] = Held(kept, words, words["applied"])
            self._await_log()

        self._shadow.held.pop(self._rank, None)
        self._line.receive(kept.state(), come)

    def _await_log(self) -> None:
        self._line.hear(self._on_log)

    def _on_log(self, said: dict[str, Any]) -> None:
        self._shadow.busy(said["step"], Phase.MIRROR)
        self._line.receive(self._held.kept.log(), lambda: self._log_is_there(said))

    def _log_is_there(self, said: dict[str, Any]) -> None:
        held = self._held
        same = "sum" not in said or said["sum"] == held.checksum
        if same:
            held.logged, held.words = said["step"], said["words"]
        self._shadow.busy(said["step"], Phase.IDLE)
        self._reply(same, self._await_verdict if same else self._await_seed)

    def _await_verdict(self) -> None:
        self._line.hear(self._on_verdict)

    def _on_verdict(self, said: dict[str, Any]) -> None:
        self._shadow.busy(said["step"], Phase.OPTIMIZER)
        start = time.perf_counter()
        self._held.follow(said)
        self._shadow.followed(self._rank, said["step"], time.perf_counter() - start)
        self._shadow.busy(said["step"], Phase.IDLE)
        self._await_log()

    def _reply(self, has: bool, then: Callable[[], object]) -> None:
        self._answer = torch.tensor([int(has)])
        self._line.send([self._answer])
        then()
