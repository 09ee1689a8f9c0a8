"""The engine on a lab, in the service's place: it starts an attempt, and looks again and again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab import Lab

from meshwright.control.engines.engine import ClusterOrder, NodeReport, RunOrder, RunReport
from meshwright.control.engines.slurm import SlurmEngine
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import RunState

LIMIT_S = 120.0  # of anything a test waits for: a guard against hanging, not a measure
CHIPS = 8

_JOB = """\
[job]
name = "small"
steps = {steps}
eval_every = 1000000

[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn_hidden = 64
vocab = 320
max_seq_len = 64

[data]
source = {source}
seq_len = 32
global_batch = 8

[layout]
dp_replicate = {dp}
tp = {tp}
pp = {pp}
micro_batch = 2

[cluster]
ref = "local:{ranks}"
spares = {spares}

[optimizer]
lr = 3e-3

[checkpoint]
every = {every}

[resilience]
redundancy = "{redundancy}"
longest_stall_s = {stall_s}
on_no_spare = "{on_no_spare}"
"""


@dataclass(frozen=True)
class Size:
    """What a job of a test is like."""

    steps: int = 12
    dp: int = 2
    tp: int = 1
    pp: int = 1
    spares: int = 0
    every: int = 2
    redundancy: str = "none"
    stall_s: float = 30.0
    on_no_spare: str = "shrink"

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass
class Bench:
    """One cluster in a lab."""

    lab: Lab
    root: Path
    corpus: Path
    engine: SlurmEngine = field(init=False)
    cluster: ClusterOrder = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.new_engine()
        spec = ClusterSpec(
            name="lab",
            engine="slurm",
            nodes=len(self.lab.names),
            chips_per_node=CHIPS,
            partition=self.lab.partition,
        )
        home = self.root / "cluster"
        home.mkdir()
        self.cluster = ClusterOrder("c1", spec, CHIPS, home, time.time())

    def new_engine(self) -> SlurmEngine:
        """As a service that has just been started makes one."""
        return SlurmEngine(self.lab.env)

    def order(self, size: Size, nodes: Sequence[int], name: str = "j1") -> RunOrder:
        """The first attempt at a job on some nodes: chips as they come, spares on the last."""
        job_file = self.root / f"{name}.toml"
        words = {**vars(size), "ranks": size.ranks, "source": json.dumps(str(self.corpus))}
        job_file.write_text(_JOB.format(**words))
        chips = _chips(size.ranks + size.spares, nodes)
        run_dir = self.root / name
        return RunOrder(name, 1, run_dir, job_file, chips, size.ranks, time.time())

    def start(self, order: RunOrder) -> RunOrder:
        """Start it; the order with its handle."""
        return replace(order, handle=self.engine.start(self.cluster, order))

    def again(self, order: RunOrder, nodes: Sequence[int]) -> RunOrder:
        """Start the next attempt, on other nodes."""
        chips = _chips(len(order.chips), nodes)
        number = order.attempt + 1
        return self.start(replace(order, attempt=number, chips=chips, started_s=time.time()))

    def look(self, order: RunOrder) -> RunReport:
        return self.engine.look(self.cluster, order)

    def until(
        self,
        order: RunOrder,
        what: RunState | Callable[[RunReport], object],
        never: tuple[RunState, ...] = (RunState.FAILED, RunState.LOST),
    ) -> RunReport:
        """Look at it until it is so."""
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            report = self.look(order)
            if report.state is what or (callable(what) and what(report)):
                return report
            wrong = report.state in never and report.state is not what
            if wrong or time.monotonic() > deadline_s:
                raise AssertionError(f"{report}, not {what}\n{self.words(order)}")
            time.sleep(0.2)

    def until_step(self, order: RunOrder, step: int) -> None:
        """Look at it until it has done a step."""
        self.until(order, lambda _: self.steps(order)[-1:] >= [step])

    def node(self, number: int) -> NodeReport:
        """What the engine sees of a node."""
        return self.engine.observe(self.cluster, time.time()).nodes[number]

    def kill_conductor(self, order: RunOrder) -> None:
        """SIGKILL to it and to who started it."""
        mark = self.cluster.home / "runs" / order.job_id / f"lead-{order.attempt}.begun"
        pids = [json.loads(mark.read_text())["pid"]]
        pids.append(json.loads((order.run_dir / "conductor.json").read_text())["pid"])
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def steps(self, order: RunOrder) -> list[int]:
        """Those with metrics, as they were written."""
        return [line["step"] for line in _lines(order.run_dir / "metrics.jsonl")]

    def events(self, order: RunOrder, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [e for e in _lines(order.run_dir / "events.jsonl") if e["kind"] == kind]

    def words(self, order: RunOrder) -> str:
        """All that may tell why something went wrong."""
        folder = self.cluster.home / "runs" / order.job_id
        logs = [*folder.rglob("*.log"), *(order.run_dir / "logs").glob("*.log")]
        said = [f"--- {log.name}: {log.read_text()[-1500:]}" for log in logs]
        events = _lines(order.run_dir / "events.jsonl")[-8:]
        marks = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        reasons = self.lab.ask("sinfo", "-h", "-N", "-o", "%N %E")
        state = f"{self.lab.states()} {reasons}\n{self.lab.jobs()}\n{marks}\n{events}"
        return "\n".join([state, *said, self.lab.logs()])

    def close(self) -> None:
        """End what is left."""
        self.lab.wait(lambda: self._destroyed(), "jobs do not end")
        self.engine.close()

    def _destroyed(self) -> bool:
        self.engine.destroy(self.cluster)
        return True


def _chips(count: int, nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """So many chips, spread evenly over nodes."""
    return tuple((nodes[i * len(nodes) // count], i) for i in range(count))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
