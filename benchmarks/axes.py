"""What each axis costs: its step against as many ranks that do the same work and talk to nobody.

Under a layout of n ranks each does 1/n of the work of a step. Beside it the same processes each
take a step of a 1/n of the batch on a whole model of their own, so that both sides share the
machine alike; steps of the two sides alternate. The difference is split into waiting for others,
computing (copies, smaller matrices, bubbles do not count here: a rank in a bubble waits), and the
optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
import torch
from axes_worker import PHASES
from workload import Load, build_job

from meshwright.conduct import conductor
from meshwright.conduct.conductor import Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.models.spec import ModelSpec
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.stages import balance, predicted_costs, stage_layers

SEQ_LEN = 256
MICRO_BATCHES = 8  # of the pipelines

EVERY = object()  # stands for the number of ranks

AXES: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": EVERY},
    "zero 1": {"dp_shard": EVERY, "zero": 1},
    "zero 2": {"dp_shard": EVERY, "zero": 2},
    "zero 3": {"dp_shard": EVERY},
    "tp": {"tp": EVERY, "sp": False},
    "tp + sp": {"tp": EVERY},
    "cp, ring": {"cp": EVERY},
    "cp, ulysses": {"cp": EVERY, "cp_method": "ulysses"},
    "pp, 1f1b": {"pp": EVERY},
    "pp, interleaved": {"pp": EVERY, "vpp": 2, "schedule": "interleaved"},
    "pp, zbv": {"pp": EVERY, "schedule": "zbv"},
    "ep": {"dp_replicate": EVERY, "ep": EVERY},
}
MOE = {"n_experts": 8, "top_k": 2, "expert_ffn_hidden": 256}


@dataclass(frozen=True)
class Cost:
    """Median seconds of a step, mean over ranks, by phase."""

    layout: dict[str, float]
    alone: dict[str, float]

    def row(self, axis: str, ranks: int) -> list[str]:
        """One line of the table, in milliseconds."""
        more = {phase: (self.layout[phase] - self.alone[phase]) * 1e3 for phase in PHASES}
        return [
            axis,
            str(ranks),
            f"{self.alone['wall'] * 1e3:.0f}",
            f"{self.layout['wall'] * 1e3:.0f}",
            f"**{self.layout['wall'] / self.alone['wall']:.2f}**",
            f"{more['comm']:+.0f}",
            f"{more['compute']:+.0f}",
            f"{more['optimizer']:+.0f}",
        ]


def model(axis: str) -> ModelSpec:
    """Eight layers, and heads that four ranks can share."""
    shape: dict[str, Any] = {"layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4}
    spec = {"family": "llama", "ffn_hidden": 768, "vocab": 1024, "max_seq_len": 4096, **shape}
    return ModelSpec.model_validate({**spec, **(MOE if axis == "ep" else {})})


def jobs(axis: str, ranks: int) -> tuple[Job, Job]:
    """The job under the axis, and the one of a rank on its own with a 1 / `ranks` of its work."""
    keys = {key: ranks if value is EVERY else value for key, value in AXES[axis].items()}
    batch = MICRO_BATCHES if "pp" in keys else ranks
    micro = 1 if "pp" in keys or "dp_replicate" in keys or "dp_shard" in keys else ranks
    layout = Layout.model_validate({**keys, "micro_batch": micro})
    own = batch // ranks
    alone = Layout(micro_batch=1)
    spec = model(axis)
    whole = build_job(Load("tiny", batch, SEQ_LEN), layout, 1000).model_copy(update={"model": spec})
    part = build_job(Load("tiny", own, SEQ_LEN), alone, 1000).model_copy(update={"model": spec})
    return whole, part


def measure(engine: LocalEngine, axis: str, ranks: int, rounds: int, scratch: Path) -> Cost:
    """Run both sides on `ranks` processes."""
    found = run_ranks(engine, *jobs(axis, ranks), rounds, scratch)

    def mean(side: str) -> dict[str, float]:
        return {phase: statistics.mean(one[side][phase] for one in found) for phase in PHASES}

    return Cost(mean("layout"), mean("alone"))


def run_ranks(
    engine: LocalEngine, whole: Job, part: Job, rounds: int, scratch: Path
) -> list[dict[str, dict[str, float]]]:
    """Medians of each rank of `whole`, by side and phase; `part` is what one does alone."""
    ranks = whole.layout.world
    out = Path(tempfile.mkdtemp(dir=scratch))
    args = {
        "job": whole.model_dump(mode="json"),
        "alone": part.model_dump(mode="json"),
        "rounds": rounds,
        "out": str(out),
    }
    with RunDir.create_at(out / "run") as rundir:
        outcome = conductor.run(
            engine, rundir, "axes_worker:main", ranks, args, lambda _: None, lambda: 0
        )
    if outcome.status is not Status.FINISHED:
        raise SystemExit(f"{whole.layout.label}: {outcome.error}")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def stage_balance(engine: LocalEngine, rounds: int, scratch: Path) -> list[list[str]]:
    """Mean / max computing time of the two ranks of a pipeline whose head costs some layers: cut
    into equal halves, and as the trainer cuts it."""
    spec = ModelSpec.model_validate({**model("pp").model_dump(), "layers": 16, "vocab": 16384})
    rows = []
    for name, stages in (("equal halves", [8, 8]), ("by cost", [])):
        layout = Layout(pp=2, stages=stages)
        job = build_job(Load("tiny", MICRO_BATCHES, SEQ_LEN), layout, 1000)
        job = job.model_copy(update={"model": spec})
        ranges = stage_layers(spec, layout, SEQ_LEN)
        found = run_ranks(engine, job, job.model_copy(update={"layout": Layout()}), rounds, scratch)
        busy = [rank["layout"]["compute"] for rank in found]
        predicted = balance(ranges, predicted_costs(spec, SEQ_LEN), layout)
        cut = " + ".join(str(len(stage)) for stage in ranges)
        measured = statistics.mean(busy) / max(busy)
        rows.append([name, cut, f"{predicted:.3f}", f"**{measured:.3f}**"])
    return rows


def report(rows: list[list[str]], balances: list[list[str]]) -> str:
    """The section of RESULTS.md."""
    facts = {
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": results.command(),
        "load of the machine at the end": results.busy(),
    }
    header = [
        "axis",
        "ranks",
        "alone, ms",
        "layout, ms",
        "ratio",
        "waiting",
        "compute",
        "optimizer",
    ]
    body = (
        "Eight layers of width 256, sequences of 256 tokens, fp32, one thread a rank, gloo. "
        "`alone`: each\nrank by itself does as much work. The last three columns say where the "
        "difference goes, in ms,\nmean over ranks. Ranks beyond the cores of the machine share "
        "them on both sides. Pipelines run\n"
        f"{MICRO_BATCHES} micro-batches; a bubble is time spent waiting.\n\n"
    )
    stages = (
        "\nStage balance: mean / max computing time of two stages of a model whose head costs as "
        "much as some\nlayers (16 layers of width 256, 16,384 tokens in the vocabulary).\n\n"
        + results.table(["cut", "layers", "predicted", "measured"], balances)
    )
    return results.section(
        "What each axis costs", facts, body + results.table(header, rows) + stages
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    rows = []
    with LocalEngine.start("axes_worker") as engine, tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            for axis in options.axes:
                cost = measure(engine, axis, ranks, options.rounds, Path(scratch))
                rows.append(cost.row(axis, ranks))
                print(*rows[-1], sep="  ", file=sys.stderr)
        balances = stage_balance(engine, options.rounds, Path(scratch))
    text = report(rows, balances)
    print(text)
    if options.write:
        results.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
