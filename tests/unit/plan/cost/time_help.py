"""What tests of step time share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.catalog.load import cluster
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.step import StepTime, step_time
from meshwright.plan.cost.workload import Workload


def work(
    model: str | ModelSpec, seq_len: int, batch: int, name: str = "megatron", **more: Any
) -> Workload:
    """A workload in bf16 unless `more` says otherwise."""
    spec = preset(model) if isinstance(model, str) else model
    keys = {"precision": "bf16", **more}
    return Workload(spec, seq_len, batch, framework=framework(name), **keys)


def timed(job: Workload, ref: str, extra: Path | None = None, **layout: Any) -> StepTime:
    """One layout of `job` on `ref`."""
    return step_time(job, cluster(ref, extra), Candidates.of(1, **layout))


def speed(job: Workload, ref: str, extra: Path | None = None, **layout: Any) -> float:
    """Tokens/s of one chip."""
    c = Candidates.of(1, **layout)
    found = step_time(job, cluster(ref, extra), c)
    return float((job.tokens / found.step_s / c.world).item())
