"""The parity check for jobs of a test's own, with one reference for each job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from parity_jobs import Tokens, on_layout

from meshwright.cli.check import CHECK_WORKER, Tracing, trace
from meshwright.conduct.local import LocalEngine
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.train.compare import Comparison, Limits, compare


@dataclass
class Gate:
    """Traces `steps` steps of jobs and compares them."""

    engine: LocalEngine
    tokens: Path
    root: Path
    steps: int = 2
    _traced: dict[str, Path] = field(default_factory=dict)

    def against_one_process(
        self, base: Job, how: Layout, entry: str = f"{CHECK_WORKER}:main"
    ) -> Comparison:
        """`how`, whose workers run `entry`, beside one process."""
        key = base.model_dump_json()
        if key not in self._traced:
            self._traced[key] = self.trace(base, Layout(micro_batch=base.data.global_batch))
        return compare(self._traced[key], self.trace(base, how, entry), Limits())

    def trace(self, base: Job, how: Layout, entry: str = f"{CHECK_WORKER}:main") -> Path:
        """The folder of the trace of `base` under `how`."""
        folder = Path(mkdtemp(dir=self.root)) / "run"
        checked = on_layout(base, how)
        shared = Tracing(self.engine, Tokens(self.tokens), self.steps, lambda: 0)
        trace(checked, how, shared, folder, entry)
        return folder


def ratios(found: Comparison) -> dict[str, float]:
    """The norm ratio of every gradient by parameter."""
    return {one.name: one.norm_ratio for one in found.tensors if one.what == "gradient"}


def wrong(found: Comparison, what: str = "gradient") -> dict[str, float]:
    """The norm ratios of the tensors that are out of bounds."""
    return {t.name: t.norm_ratio for t in found.tensors if t.what == what and not t.equal}
