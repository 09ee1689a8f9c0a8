"""One rank of the axes benchmark: steps under a layout, and steps that talk to nobody, in turn."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.plan.job import Job
from meshwright.train.comm import Clock
from meshwright.train.mesh import build_mesh
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined

_WARM_UP = 2  # rounds
PHASES = ("wall", "comm", "optimizer", "compute")


@dataclass(frozen=True)
class Side:
    """A trainer and the tokens of its steps."""

    trainer: Trainer
    tokens: Tensor

    def step(self, number: int) -> dict[str, float]:
        """Seconds of one step by phase; computing is what is neither waiting nor optimizer."""
        clock = self.trainer.mesh.clock
        clock.take()
        start = time.perf_counter()
        agreed = self.trainer.gradients(self.tokens)
        with clock.phase("optimizer"):
            self.trainer.update(number, agreed)
        wall = time.perf_counter() - start
        spent = clock.take()
        waits = {name: spent.get(name, 0.0) for name in ("comm", "optimizer")}
        return {"wall": wall, **waits, "compute": wall - sum(waits.values())}


def main(context: WorkerContext) -> None:
    """Take `args["rounds"]` steps of each side; medians by side and phase go to `args["out"]`."""
    args = context.args
    job, alone = Job.model_validate(args["job"]), Job.model_validate(args["alone"])
    torch.set_num_threads(1)
    with joined(context, job) as mesh:
        apart = build_mesh(alone.layout, 0, Clock())
        sides = {
            "layout": _side(Trainer(job, mesh, torch.device("cpu")), job),
            "alone": _side(Trainer(alone, apart, torch.device("cpu")), alone),
        }
        times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(_WARM_UP + args["rounds"]):
            for name in sorted(sides, reverse=number % 2 == 1):
                mesh.wait_for_all()
                times[name].append(sides[name].step(number))
        mesh.wait_for_all()
        medians = {
            name: {p: statistics.median(t[p] for t in found[_WARM_UP:]) for p in PHASES}
            for name, found in times.items()
        }
        (Path(args["out"]) / f"{context.rank}.json").write_text(json.dumps(medians))


def _side(trainer: Trainer, job: Job) -> Side:
    trainer.initialise()
    layout, data = job.layout, job.data
    per_rank = data.global_batch // (layout.dp * layout.micro_batch)
    shape = (per_rank, layout.micro_batch, data.seq_len + 1)
    draw = torch.Generator().manual_seed(1)
    return Side(trainer, torch.randint(job.model.vocab, shape, generator=draw))
