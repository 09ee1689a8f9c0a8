"""The training loop of one rank: steps, evaluations, checkpoints, and what it says about them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from meshwright.base.errors import RunError
from meshwright.base.events import Kind, Metrics, RankProfile
from meshwright.base.pulse import Phase
from meshwright.checkpoint.opening import StoreAt
from meshwright.data.held_out import HeldOut
from meshwright.data.order import MixedRows
from meshwright.plan.job import Job
from meshwright.train.bad_samples import BadSampleWords
from meshwright.train.batches import held_out_batches, step_batches
from meshwright.train.feeding import StepFeed
from meshwright.train.gradients import Vote
from meshwright.train.optim import learning_rate
from meshwright.train.saving import Due, Saver
from meshwright.train.state import owned_state, save, trainer_meta
from meshwright.train.trainer import Trainer

_PROFILE_EVERY = 20  # steps between two reports of a rank's time split


@dataclass(frozen=True)
class RunInputs:
    """What a run reads and writes besides the job. `attempt` names this incarnation of it, `begun`
    numbers the last record of its branch before it."""

    train: MixedRows
    held_out: HeldOut
    checkpoints: StoreAt
    attempt: str
    baselines: dict[str, float]
    peak_flops: float
    predicted_step_time_s: float | None = None
    replay: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    begun: int | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)


class StopFlag:
    """Set by SIGTERM: the run ends after the step under way."""

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        """`also` says whether it has been asked for in another way."""
        self._asked, self._also = False, also
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, _signal: int, _frame: object) -> None:
        self._asked = True

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self._asked or self._also()


class Says(Protocol):
    """Where what a rank says goes: see `base.events.EventWriter`."""

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Say it."""


@dataclass
class Progress:
    """The steps that have been taken, and up to which has been done what follows on a step.
    `ending`: the last vote was to stop."""

    step: int
    evaluated: int
    saved: int
    checked: int
    ending: bool = False


class TrainLoop:
    """Drives a `Trainer` from its first step of this incarnation to the last."""

    def __init__(
        self, trainer: Trainer, inputs: RunInputs, events: Says, stop: StopFlag | None = None
    ) -> None:
        self.trainer, self.inputs, self.events = trainer, inputs, events
        self.job, self.mesh = trainer.job, trainer.mesh
        self.stop = stop or StopFlag()
        self.progress = Progress(0, 0, 0, 0)
        self.begin_step: Callable[[int], object] = lambda _: None  # told of each step, from 1
        self.check: Callable[[int], object] = lambda _: None  # all ranks, after some steps
        self.also_report: Callable[[], object] = lambda: None
        # Since the last checkpoint but one, since the last may still fail; it keeps them.
        self.said: list[dict[str, object]] = []
        self._said_before = 0  # how many of them the last checkpoint has
        self.saver = Saver(self.job, self.mesh, inputs.checkpoints, inputs.attempt, inputs.begun)
        self.noted = 0  # the last step that has been spoken of
        self.feed = StepFeed(
            lambda step: step_batches(self.job, self.mesh, inputs.train, step),
            inputs.replay,
            inputs.train.far,
        )
        self.bad = BadSampleWords(self.mesh, inputs.train, self.job.data)
        self._begun_s = time.perf_counter()
        self._profile = _ProfileSums()

    def run(self, first_step: int) -> None:
        """Take steps `first_step` + 1 to the last. Raises RunError if the loss is not finite."""
        self.trainer.applied = first_step
        self.progress = Progress(first_step, first_step, first_step, first_step)
        self.go_on()

    def go_on(self) -> None:
        """From what `progress` says has been done, to the end. It may be called again after an
        exception, once the trainer is between two steps and `progress` says which."""
        try:
            self._go_on()
        finally:  # the loop may be dropped; if not, reading begins anew where it is needed
            self.feed.close()
        step = self.progress.step
        self.saver.finish(step, self.events.emit)
        if self.mesh.rank == 0 and step < self.job.job.steps:
            self.events.emit(Kind.RUN_INTERRUPTED, step=step)

    def _go_on(self) -> None:
        while True:
            step = self.progress.step
            self._follow_up(step)
            if self._over(step):
                return
            self.progress.ending = self._step(step + 1).stop
            self.progress.step = step + 1

    def _over(self, step: int) -> bool:
        return step >= self.job.job.steps or self.progress.ending

    def _follow_up(self, step: int) -> None:
        """What is due after `step` and has not been done."""
        job, done = self.job, self.progress
        self.bad.refuse_too_many(self.trainer.bad_samples, step)
        if step > done.evaluated and (step % job.job.eval_every == 0 or step == job.job.steps):
            self._evaluate(step)
        done.evaluated = max(done.evaluated, step)
        if step > done.saved and (due := self._due(step)):
            self._save(step, due)
        self.saver.report(self.events.emit)
        done.saved = max(done.saved, step)
        every = job.resilience.recheck_every
        if every and step > done.checked and step % every == 0:
            self.check(step)
        done.checked = max(done.checked, step)
        if self._profile.steps and (step % _PROFILE_EVERY == 0 or self._over(step)):
            self._report_profile(step)

    def _due(self, step: int) -> Due:
        """How `step` is to be saved: as all have agreed when they voted on it."""
        if self._over(step):
            return Due.WHOLE
        agreed = self.trainer.agreed
        if agreed is None or agreed[0] != step - 1:
            return Due.NOT
        return Due.agreed(agreed[1].save)

    def _step(self, step: int) -> Vote:
        self.events.emit(Kind.PROGRESS, step=step)
        self.begin_step(step)
        clock, self._begun_s = self.mesh.clock, time.perf_counter()
        clock.take()
        with clock.phase("data"):
            batches = self.feed.take(step - 1)
        for sample, what in self.bad.found(batches, step - 1):
            self.events.emit(Kind.BAD_SAMPLE, step=step, sample=sample, what=what)
        asked = self.saver.asks(step)
        agreed = self.trainer.gradients(batches, self.stop.requested, step - 1, asked)
        if not agreed.finite and not self.trainer.may_skip:
            raise RunError(
                f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}; "
                "nothing was updated: lower optimizer.lr or resume from a checkpoint before it"
            )
        with clock.phase("optimizer"):
            moves = self.trainer.update(step - 1, agreed)
        self.note(step, agreed)
        if self._speaks_for_stage:
            for move in moves:
                self.events.emit(Kind.EXPERTS_MOVED, step=step, **asdict(move))
        return agreed

    def note(self, step: int, agreed: Vote) -> None:
        """Say how `step`, which counts, went; once."""
        if step <= self.noted:
            return
        self.noted = step
        wall_s, spent = time.perf_counter() - self._begun_s, self.mesh.clock.take()
        self._profile.add(wall_s, spent)
        if agreed.bad:
            total = self.trainer.bad_samples
            self._say(Kind.BAD_SAMPLES, step=step, bad=agreed.bad, total=total)
        if not agreed.finite:
            scale = self.trainer.loss_scale.scale
            self._say(Kind.STEP_SKIPPED, step=step, loss_scale=scale)
        else:
            self._report_step(step, agreed, wall_s, spent)

    @property
    def _speaks_for_stage(self) -> bool:
        """Whether this rank reports what all ranks of its pipeline stages know."""
        at = self.mesh.at
        return not any((at.dp_replicate, at.dp_shard, at.cp, at.tp))

    def _report_step(self, step: int, agreed: Vote, wall_s: float, spent: dict[str, float]) -> None:
        tokens_per_s = agreed.tokens / wall_s
        flops = self.job.model.flops_per_token(self.job.data.seq_len) * tokens_per_s
        metrics = Metrics(
            step=step,
            loss=agreed.loss,
            tokens=agreed.tokens,
            tokens_per_s=tokens_per_s,
            step_time_s=wall_s,
            mfu=flops / (self.job.layout.world * (self.inputs.peak_flops or math.inf)),
            grad_norm=agreed.grad_norm,
            lr=learning_rate(self.job.optimizer, step - 1, self.job.job.steps),
            data_wait_s=spent.get("data", 0.0),
            comm_wait_s=spent.get("comm", 0.0),
            predicted_step_time_s=self.inputs.predicted_step_time_s,
            router_loss=agreed.router_loss,
        )
        self._say(Kind.METRICS, **asdict(metrics))

    def _say(self, kind: Kind, **fields: Any) -> None:
        """Keep on every rank, and emit on the first, what a resumed run would miss if the conductor
        or that rank died before it was written down."""
        self.said.append({"kind": kind, **fields})
        if self.mesh.rank == 0:
            self.events.emit(kind, **fields)

    def say_again(self) -> None:
        """After another member was the first rank: what that may have kept to itself."""
        if self.mesh.rank == 0:
            for kept in self.said:
                self.events.emit(Kind(str(kept["kind"])), **_fields(kept))

    def _evaluate(self, step: int) -> None:
        self.mesh.clock.enter(Phase.EVALUATE)
        found = self.trainer.evaluate(held_out_batches(self.job, self.mesh, self.inputs.held_out))
        self._say(Kind.EVALUATED, step=step, **asdict(found), **self.inputs.baselines)

    def _save(self, step: int, due: Due) -> None:
        self.mesh.clock.enter(Phase.CHECKPOINT)
        self.saver.save(step, self.trainer, self._meta(step, due), due)
        if due is Due.WHOLE:
            del self.said[: self._said_before]
            self._said_before = len(self.said)

    def save_into(self, at: StoreAt) -> None:
        """Commit the state as it is to another store, all ranks together, after what is due at this
        step; it may have been there before."""
        step = self.progress.step
        self._follow_up(step)
        save(at, step, self.mesh, owned_state(self.trainer), self._meta(step, Due.WHOLE))

    def _meta(self, step: int, due: Due) -> dict[str, object]:
        # A change has what was said of its own step; those before it have the rest.
        said = [one for one in self.said if due is Due.WHOLE or one.get("step") == step]
        return {
            "seed": self.job.job.seed,
            "data_position": step * self.job.data.global_batch,
            "data": self.inputs.train.state(step * self.job.data.global_batch),
            "drawn": self._drawn(step * self.job.data.global_batch),
            "layout": self.job.layout.label,
            "job": self.job.model_dump(mode="json"),
            "plan": self.inputs.plan,
            **self.inputs.made_with,
            "said": said,
            **trainer_meta(self.trainer),
        }

    def _drawn(self, samples: int) -> dict[str, int]:
        """How many of the first samples of the run came from each source."""
        counts = self.inputs.train.order.mixture.drawn(samples).tolist()
        return dict(zip((one.path for one in self.job.data.sources), counts, strict=True))

    def _report_profile(self, step: int) -> None:
        profile = self._profile.report(self.mesh.rank, step)
        self._profile = _ProfileSums()
        wire, plain = self.trainer.data.take_compressed_bytes()
        profile = replace(profile, grad_wire_bytes=wire, grad_plain_bytes=plain)
        self.events.emit(Kind.RANK_PROFILE, **asdict(profile))
        self.also_report()
        if told := self.feed.advice():
            self.events.emit(Kind.ADVICE, step=step, advice=told)
        if self._speaks_for_stage:
            for load in self.trainer.routing.loads(step):
                self.events.emit(Kind.EXPERT_LOAD, **asdict(load))


def something_follows(job: Job, step: int) -> bool:
    """Whether all ranks take part in something between `step` and the next one."""
    every = (job.job.eval_every, job.resilience.recheck_every)
    return step == job.job.steps or any(n and step % n == 0 for n in every)


def _fields(said: dict[str, object]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key != "kind"}


@dataclass
class _ProfileSums:
    """Where this rank's time went since the last report, in seconds."""

    steps: int = 0
    wall_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def add(self, wall_s: float, spent: Mapping[str, float]) -> None:
        """Count one step."""
        self.steps += 1
        self.wall_s += wall_s
        for phase, seconds in spent.items():
            self.spent[phase] = self.spent.get(phase, 0.0) + seconds

    def report(self, rank: int, step: int) -> RankProfile:
        """The sums; what is neither waiting nor optimizer is computing."""
        waits = {name: self.spent.get(name, 0.0) for name in ("comm", "data", "optimizer")}
        return RankProfile(
            rank=rank,
            step=step,
            steps=self.steps,
            wall_s=self.wall_s,
            compute_s=self.wall_s - sum(waits.values()),
            comm_wait_s=waits["comm"],
            data_wait_s=waits["data"],
            optimizer_s=waits["optimizer"],
        )
