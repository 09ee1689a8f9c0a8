"""The training loop of one rank: steps, evaluations, checkpoints, and what it says about them."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.base.events import EventWriter, Kind, Metrics, RankProfile
from meshwright.checkpoint import store
from meshwright.data.windows import TrainSamples, Windows
from meshwright.plan.job import Job
from meshwright.train.gradients import Vote
from meshwright.train.loss import IGNORE
from meshwright.train.mesh import Mesh
from meshwright.train.optim import learning_rate
from meshwright.train.state import owned_state
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
        agreed = self.trainer.gradients(batches, self.stop.requested)
        if not math.isfinite(agreed.grad_norm) or not math.isfinite(agreed.loss):
            raise RunError(
                f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}; "
                "nothing was updated: lower optimizer.lr or resume from a checkpoint before it"
            )
        with clock.phase("optimizer"):
            self.trainer.update(step - 1, agreed)
        wall_s = time.perf_counter() - start
        spent = clock.take()
        self._profile.add(wall_s, spent)
        if self.mesh.rank == 0:
            self._report_step(step, agreed, wall_s, spent)
        return agreed

    def _held_out_batches(self) -> Tensor:
        """This data-parallel rank's share of the evaluation windows, shaped as
        by `step_batches`; ranks
        that come up short fill up with sequences whose targets do not count."""
        layout, held_out = self.job.layout, self.inputs.held_out
        windows = held_out.spread(self.job.job.eval_sequences)
        unit = layout.dp * layout.micro_batch
        places = np.arange(-(-len(windows) // unit) * unit)
        mine = places.reshape(-1, layout.dp, layout.micro_batch)[:, self.mesh.dp_index]
        samples = held_out.read(windows[np.minimum(mine, len(windows) - 1)].ravel())
        samples[mine.ravel() >= len(windows)] = IGNORE
        batches: Tensor = torch.from_numpy(samples).unflatten(0, mine.shape)
        return batches

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
        )
        self.events.emit(Kind.METRICS, **asdict(metrics))

    def _evaluate(self, step: int) -> None:
        found = self.trainer.evaluate(self._held_out_batches())
        if self.mesh.rank == 0:
            self.events.emit(Kind.EVALUATED, step=step, **asdict(found), **self.inputs.baselines)

    def _save(self, step: int) -> None:
        start, root, leads = time.perf_counter(), self.inputs.checkpoints, self.mesh.rank == 0
        if leads:
            store.begin(root, step)
        self.mesh.wait_for_all()
        store.write_rank(store.pending_dir(root, step), self.mesh.rank, owned_state(self.trainer))
        self.mesh.wait_for_all()
        if leads:
            saved = store.commit(root, step, self._meta(step), self.job.layout.world)
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
        }

    def _report_profile(self, step: int) -> None:
        profile = self._profile.take(self.mesh.rank, step)
        self.events.emit(Kind.RANK_PROFILE, **asdict(profile))


def step_batches(job: Job, mesh: Mesh, samples: TrainSamples, step: int) -> Tensor:
    """This data-parallel rank's tokens of step `step` (from 0):
    [micro_batches, micro_batch, seq_len + 1]."""
    layout, batch = job.layout, job.data.global_batch
    place = np.arange(batch).reshape(-1, layout.dp, layout.micro_batch)[:, mesh.dp_index]
    tokens = samples.read(step * batch + place.ravel())
    batches: Tensor = torch.from_numpy(tokens).unflatten(0, place.shape)
    return batches


class _ProfileSums:
    """Where this rank's time went since the last report."""

    def __init__(self) -> None:
        self._steps, self._wall_s, self._spent = 0, 0.0, dict[str, float]()

    def add(self, wall_s: float, spent: dict[str, float]) -> None:
        self._steps += 1
        self._wall_s += wall_s
        for phase, seconds in spent.items():
            self._spent[phase] = self._spent.get(phase, 0.0) + seconds

    def take(self, rank: int, step: int) -> RankProfile:
        named = {name: self._spent.get(name, 0.0) for name in ("comm", "data", "optimizer")}
        profile = RankProfile(
            rank=rank,
            step=step,
            steps=self._steps,
            wall_s=self._wall_s,
            compute_s=self._wall_s - sum(named.values()),
            comm_wait_s=named["comm"],
            data_wait_s=named["data"],
            optimizer_s=named["optimizer"],
        )
        self.__init__()  # type: ignore[misc]
        return profile
