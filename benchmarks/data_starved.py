"""A trainer on storage that became ten times as slow: what it waits, and what it is told.

Steps of a small model, each after its batch; reading a batch takes as long as said, and copies
rows besides. Exits 1 if a wait that could be hidden was not, or one that could not was not told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import results
import torch
from torch import Tensor

from meshwright.data.rows import open_rows
from meshwright.data.store import write_store
from meshwright.plan.job import Job, resolve_job
from meshwright.train.batches import step_batches
from meshwright.train.comm import Clock
from meshwright.train.feeding import StepFeed
from meshwright.train.mesh import Mesh, build_mesh
from meshwright.train.trainer import Trainer

_VOCAB, _END = 257, 256
_LIMIT = 0.05  # of a step
_READ_SHARE = 0.2  # of a step, before storage becomes ten times as slow


@dataclass(frozen=True)
class Case:
    """Storage whose reads take `times` as long as usual, side by side or one after another."""

    name: str
    times: float
    one_by_one: bool
    hidden: bool  # whether readers enough could hide it


_CASES = (
    Case("as usual", 1.0, False, True),
    Case("each read ten times as slow", 10.0, False, True),
    Case("ten times as slow, and one read at a time", 10.0, True, False),
)


@dataclass
class Storage:
    """Reads that take `read_s` each."""

    read_s: float
    pipe: threading.Lock | None
    steps: list[float] = field(default_factory=list)

    def wait(self) -> None:
        """As long as a read does."""
        if self.pipe is None:
            time.sleep(self.read_s)
            return
        with self.pipe:
            time.sleep(self.read_s)


def job() -> Job:
    """What is trained."""
    return resolve_job(
        {
            "job": {"steps": 1000},
            "model": {"preset": "tiny", "vocab": _VOCAB},
            "data": {"seq_len": 128, "global_batch": 2, "packing": "best-fit"},
        }
    )


def measure(trainer: Trainer, prefix: Path, case: Case, step_s: float, steps: int) -> list[str]:
    """A row of the table: share of waiting in the last half of `steps`, readers, advice."""
    rows = open_rows([prefix], trainer.job.data, 0, _END)
    pipe = threading.Lock() if case.one_by_one else None
    storage = Storage(case.times * _READ_SHARE * step_s, pipe)

    def read(step: int) -> Tensor:
        storage.wait()
        return step_batches(trainer.job, trainer.mesh, rows, step)

    feed, told = StepFeed(read), ""
    waited_s, begun = 0.0, time.perf_counter()
    for step in range(steps):
        if step == steps // 2:
            waited_s, begun = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batches = feed.take(step)
        waited_s += time.perf_counter() - asked
        trainer.update(step, trainer.gradients(batches, step=step))
        told = told or (step % 20 == 0 and feed.advice()) or ""
    share, readers = waited_s / (time.perf_counter() - begun), str(feed.readers)
    feed.close()
    ok = share < _LIMIT and not told if case.hidden else share > _LIMIT and bool(told)
    return [
        case.name,
        f"{storage.read_s / step_s:.1f}",
        f"{share:.1%}",
        str(readers),
        told,
        _ok(ok),
    ]


def _ok(met: bool) -> str:
    return "met" if met else "MISSED"


def step_time_s(trainer: Trainer, mesh: Mesh, prefix: Path) -> float:
    """Of a step whose batch is there: median."""
    rows, took = open_rows([prefix], trainer.job.data, 0, _END), []
    for step in range(15):
        batches = step_batches(trainer.job, mesh, rows, step)
        begun = time.perf_counter()
        trainer.update(step, trainer.gradients(batches, step=step))
        took.append(time.perf_counter() - begun)
    return float(np.median(took[5:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether what should hold does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=160, help="of each case")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    here, mesh = job(), build_mesh(job().layout, 0, Clock())
    trainer = Trainer(here, mesh, torch.device("cpu"), _END)
    trainer.initialise()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "train"
        draw = np.random.default_rng(0)
        with write_store(prefix, _VOCAB, _END) as store:
            for _ in range(4000):
                store.add(draw.integers(0, _END, draw.integers(20, 400)))
                store.end_document()
        step_s = step_time_s(trainer, mesh, prefix)
        found = [measure(trainer, prefix, case, step_s, options.steps) for case in _CASES]
    header = [
        "storage",
        "a read, steps",
        "wait",
        "readers",
        "advice",
        f"wait < {_LIMIT:.0%} or told",
    ]
    facts = {"command": results.command(), "load of the machine at the end": results.busy()}
    text = f"Steps of {step_s * 1e3:.0f} ms; waits are those of the last half.\n\n"
    section = results.section(
        "Reading data: storage that became slow", facts, text + results.table(header, found)
    )
    print(section)
    if options.write:
        results.write(section)
    return 0 if all(row[-1] == _ok(True) for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
