"""The training loop of one rank: steps, evaluations, checkpoints, and what it says about them."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.base.errors import RunError
from meshwright.base.events import EventWriter, Kind, Metrics, RankProfile
from meshwright.checkpoint import store
from meshwright.data.windows import TrainSamples, Windows
from meshwright.train.batches import held_out_batches, step_batches
from meshwright.train.gradients import Vote
from meshwright.train.optim import learning_rate
from meshwright.train.state import owned_state, save, trainer_meta
from meshwright.train.trainer import Trainer

_PROFILE_EVERY = 20  # steps between two reports of a rank's time split


@dataclass(frozen=True)
class RunInputs:
    """What a run reads and writes besides the job."""

    train: TrainSamples
    held_out: Windows
    checkpoints: Path
    baselines: dict[str, float]
    peak_flops: float


class StopFlag:
    """Set by SIGTERM: the run ends after the step under way."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, _signal: int, _frame: object) -> None:
        self.requested = True


class TrainLoop:
    """Drives a `Trainer` from its first step of this incarnation to the last."""

    def __init__(self, trainer: Trainer, inputs: RunInputs, events: EventWriter) -> None:
        self.trainer, self.inputs, self.events = trainer, inputs, events
        self.job, self.mesh = trainer.job, trainer.mesh
        self.stop = StopFlag()
        self._profile = _ProfileSums()
        self._said: list[dict[str, object]] = []  # since the last checkpoint, which keeps it

    def run(self, first_step: int) -> None:
        """Take steps `first_step` + 1 to the last. Raises RunError if the loss is not finite."""
        steps = self.job.job.steps
        for step in range(first_step + 1, steps + 1):
            agreed = self._step(step)
            last = step == steps or agreed.stop
            if step % self.job.job.eval_every == 0 or step == steps:
                self._evaluate(step)
            if step % self.job.checkpoint.every == 0 or last:
                self._save(step)
            if step % _PROFILE_EVERY == 0 or last:
                self._report_profile(step)
            if agreed.stop and step < steps:
                if self.mesh.rank == 0:
                    self.events.emit(Kind.RUN_INTERRUPTED, step=step)
                return

    def _step(self, step: int) -> Vote:
        self.events.emit(Kind.PROGRESS, step=step)
        clock, start = self.mesh.clock, time.perf_counter()
        clock.take()
        with clock.phase("data"):
            batches = step_batches(self.job, self.mesh, self.inputs.train, step - 1)
        agreed = self.trainer.gradients(batches, self.stop.requested, step - 1)
        if not agreed.finite and not self.trainer.may_skip:
            raise RunError(
                f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}; "
                "nothing was updated: lower optimizer.lr or resume from a checkpoint before it"
            )
        with clock.phase("optimizer"):
            moves = self.trainer.update(step - 1, agreed)
        wall_s = time.perf_counter() - start
        spent = clock.take()
        self._profile.add(wall_s, spent)
        if self.mesh.rank == 0 and not agreed.finite:
            scale = self.trainer.loss_scale.scale
            self._say(Kind.STEP_SKIPPED, step=step, loss_scale=scale)
        elif self.mesh.rank == 0:
            self._report_step(step, agreed, wall_s, spent)
        if self._speaks_for_stage:
            for move in moves:
                self.events.emit(Kind.EXPERTS_MOVED, step=step, **asdict(move))
        return agreed

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
            mfu=flops / (self.job.layout.world * self.inputs.peak_flops),
            grad_norm=agreed.grad_norm,
            lr=learning_rate(self.job.optimizer, step - 1, self.job.job.steps),
            data_wait_s=spent.get("data", 0.0),
            comm_wait_s=spent.get("comm", 0.0),
            predicted_step_time_s=None,
            router_loss=agreed.router_loss,
        )
        self._say(Kind.METRICS, **asdict(metrics))

    def _say(self, kind: Kind, **fields: Any) -> None:
        """Emit what a resumed run would miss if the conductor died before it was written down."""
        self._said.append({"kind": kind, **fields})
        self.events.emit(kind, **fields)

    def _evaluate(self, step: int) -> None:
        found = self.trainer.evaluate(held_out_batches(self.job, self.mesh, self.inputs.held_out))
        if self.mesh.rank == 0:
            self._say(Kind.EVALUATED, step=step, **asdict(found), **self.inputs.baselines)

    def _save(self, step: int) -> None:
        start, root = time.perf_counter(), self.inputs.checkpoints
        saved = save(root, step, self.mesh, owned_state(self.trainer), self._meta(step))
        self._said = []
        if saved is not None:
            store.retain(root, self.job.checkpoint.keep)
            self.events.emit(
                Kind.CHECKPOINT_COMMITTED,
                step=step,
                path=str(saved.path),
                save_s=time.perf_counter() - start,
            )

    def _meta(self, step: int) -> dict[str, object]:
        return {
            "seed": self.job.job.seed,
            "data_position": step * self.job.data.global_batch,
            "layout": self.job.layout.label,
            "said": self._said,
            **trainer_meta(self.trainer),
        }

    def _report_profile(self, step: int) -> None:
        profile = self._profile.report(self.mesh.rank, step)
        self._profile = _ProfileSums()
        wire, plain = self.trainer.data.take_compressed_bytes()
        profile = replace(profile, grad_wire_bytes=wire, grad_plain_bytes=plain)
        self.events.emit(Kind.RANK_PROFILE, **asdict(profile))
        if self._speaks_for_stage:
            for load in self.trainer.routing.loads(step):
                self.events.emit(Kind.EXPERT_LOAD, **asdict(load))


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
