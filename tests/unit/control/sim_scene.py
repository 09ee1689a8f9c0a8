"""A simulated cluster with a clock that tests turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.control.engines.engine import ClusterOrder, ClusterReport, Fault, RunOrder
from meshwright.control.engines.simulated import SimulatedEngine
from meshwright.control.figures import FIGURE_NAMES
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind

BEGIN_S = 1_000_000.0
JOB = """
[job]
name = "{name}"
steps = {steps}

[model]
preset = "{preset}"

[data]
source = "python-stdlib"
seq_len = {seq_len}
global_batch = {batch}

[layout]
dp_replicate = {dp}
tp = 4
micro_batch = 1
precision = "bf16"

[cluster]
ref = "local:{ranks}"
spares = {spares}

[checkpoint]
every = 5

[resilience]
redundancy = "{redundancy}"
on_no_spare = "{on_no_spare}"
"""


@dataclass
class Clock:
    """Seconds since the epoch, by hand."""

    now_s: float = BEGIN_S

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Time passes for nobody else."""
        self.now_s += seconds


@dataclass
class Scene:
    """One cluster, one engine, and what the service would know."""

    root: Path
    spec: ClusterSpec = field(default_factory=lambda: ClusterSpec(name="sim", spares=0, seed=3))
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.engine = SimulatedEngine(self.clock, self.clock.sleep)
        self.order = ClusterOrder(
            id="c1",
            spec=self.spec,
            chips_per_node=self.engine.chips_per_node(self.spec),
            home=self.root / "home",
            created_s=BEGIN_S,
        )

    def crash(self) -> None:
        """Another process makes another engine."""
        self.engine = SimulatedEngine(self.clock, self.clock.sleep)

    def run(self, ranks: int = 16, attempt: int = 1, **changes: Any) -> RunOrder:
        """Start a job on the first `ranks` chips, and its spares on the next ones."""
        words = {
            "name": "job",
            "steps": 1000,
            "preset": "llama3-8b",
            "seq_len": 8192,
            "batch": 32,
            "dp": ranks // 4,
            "ranks": ranks,
            "spares": 0,
            "redundancy": "none",
            "on_no_spare": "shrink",
            **changes,
        }
        file = self.root / f"{words['name']}.toml"
        file.write_text(JOB.format(**words))
        per_node = self.order.chips_per_node
        chips = tuple(divmod(chip, per_node) for chip in range(ranks + words["spares"]))
        run_dir = self.root / str(words["name"])
        job = str(words["name"])
        run = RunOrder(job, attempt, run_dir, file, chips, ranks, self.clock.now_s)
        self.engine.start(self.order, run)
        self.order = replace(self.order, runs=(*self.order.runs, run))
        return run

    def fault(
        self,
        kind: FaultKind,
        node: int = 0,
        chip: int | None = None,
        severity: float = 0.5,
        seconds: float | None = None,
    ) -> Fault:
        """Inject one, now."""
        now_s = self.clock.now_s
        until_s = None if seconds is None else now_s + seconds
        number = f"f{len(self.order.faults)}"
        fault = Fault(number, kind, node, chip, severity, now_s, until_s)
        self.order = replace(self.order, faults=(*self.order.faults, fault))
        self.engine.inject(self.order, fault)
        return fault

    def after(self, seconds: float) -> ClusterReport:
        """What is seen so many seconds later."""
        self.clock.now_s += seconds
        return self.engine.observe(self.order, self.clock.now_s)


def figure(report: ClusterReport, name: str) -> Any:
    """One figure of all chips."""
    assert report.sample is not None
    return report.sample[:, FIGURE_NAMES.index(name)]


def lines(run: RunOrder, name: str) -> list[Mapping[str, Any]]:
    """A file of a run."""
    return [json.loads(line) for line in (run.run_dir / name).read_text().splitlines()]


def kinds(run: RunOrder) -> list[str]:
    """The kinds of its events, those of ranks that get ready left out."""
    found = [line["kind"] for line in lines(run, "events.jsonl")]
    return [kind for kind in found if kind not in ("rank_ready", "spare_ready")]
