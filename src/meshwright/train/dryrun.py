"""The dry run: one rank's real trainer takes a step on tensors without memory, among absent peers.

Everything is built and executed as in a run: stages, flat groups, hooks, schedule, update. Tensors
are fake (shapes and types only), collectives are written down instead of executed, and what the
trainer would read from the chip is assumed (`ASSUMPTIONS`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from meshwright.base.errors import ConfigError
from meshwright.plan.job import Job
from meshwright.train.dryrun_axes import Ledger, recording_mesh
from meshwright.train.dryrun_chip import Kernels, standing_in
from meshwright.train.dryrun_recorder import Recorder
from meshwright.train.trainer import Trainer

ASSUMPTIONS = (
    "tokens are spread evenly over experts, and each rank's rows over the ranks of ep",
    "a step in the middle of a run: loads of experts are known, no experts move",
    "bytes are those that tensors ask for; an allocator's rounding, the runtime and the library of "
    "collectives come on top",
    "FLOPs: 2 for each pair of numbers multiplied in matrix products; attention counts its causal "
    "half, and backward twice the forward",
    "wire bytes: ring for all-reduce and all-gather, pairwise for exchanges and reduce-scatters",
)
_KERNELS = {
    "fused": "RMS norms and attention as fused GPU kernels keep them, layers not compiled",
    "cpu": "operators of the CPU",
}


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind on one axis in a step; see `dryrun_axes.Traffic`."""

    axis: str
    kind: str
    ranks: int
    count: int
    payload_bytes: int
    wire_bytes: float


@dataclass(frozen=True)
class DryRun:
    """One step of one rank. `parts_bytes` are those of the moment of the peak and add up to
    `peak_bytes`; `host_bytes` is the most that lay in the host's memory, `flops` by phase."""

    rank: int
    world: int
    peak_bytes: int
    parts_bytes: dict[str, int]
    host_bytes: int
    flops: dict[str, int]
    traffic: tuple[Traffic, ...]
    assumptions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def dry_run(job: Job, rank: int = 0, kernels: Kernels = "fused") -> DryRun:
    """Take one step of `rank` of `job`. Raises ConfigError if there is no such rank."""
    layout = job.layout
    if not 0 <= rank < layout.world:
        raise ConfigError("--rank", rank, f"the job has ranks 0 to {layout.world - 1}")
    recorder = Recorder()
    ledger = Ledger(seen=recorder.travels)
    mesh = recording_mesh(layout, rank, ledger)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        recorder.resizing(),
        standing_in(recorder, routed_rows(job), kernels),
    ):
        end_of_text = 0 if job.data.inside_documents else None
        trainer = Trainer(job, mesh, torch.device("cpu"), end_of_text)
        _observe(trainer, recorder)
        batches = _batches(job)
        recorder.keep("other")
        recorder.restart_peak()
        agreed = trainer.gradients(batches)
        trainer.update(0, agreed)
    return _report(job, rank, recorder, ledger, kernels)


def routed_rows(job: Job) -> int:
    """Rows that a rank sends to experts in one micro-batch, those without room left out."""
    model, layout, seq_len = job.model, job.layout, job.data.seq_len
    parts = layout.cp * (layout.tp if layout.tp > 1 and layout.etp == 1 else 1)
    rows = layout.micro_batch * seq_len // parts * model.top_k
    if model.capacity_factor:
        room = math.ceil(model.capacity_factor * seq_len * model.top_k / model.n_experts)
        rows = min(rows, layout.micro_batch * room * model.n_experts // parts)
    return rows


def _batches(job: Job) -> torch.Tensor:
    layout, data = job.layout, job.data
    count = data.global_batch // (layout.dp * layout.micro_batch)
    return torch.zeros(count, layout.micro_batch, data.seq_len + 1, dtype=torch.int64)


def _observe(trainer: Trainer, recorder: Recorder) -> None:
    """Tell `recorder` what is what, and when a pass is over."""
    trainer.routing.seeded = True
    offloaded = trainer.job.layout.offload in ("optimizer", "both")
    groups = trainer.data.groups
    for group, moments in zip(groups, trainer.optimizer.moments, strict=True):
        aliased = group.weights.buffer is group.master
        recorder.mark("weights", group.weights.buffer)
        recorder.mark("host" if offloaded and not aliased else "masters", group.master)
        recorder.mark("host" if offloaded else "moments", *moments)
        recorder.mark("gradients", group.grad)
        _mark_whole_gradients(group.sums, recorder)
    for model in trainer.stages.values():
        model.reach(trainer.job.data.seq_len, torch.device("cpu"))
    _follow_phases(trainer.pipeline, recorder)


def _mark_whole_gradients(sums: Any, recorder: Recorder) -> None:
    """The full gradient that a group makes while it lives is a gradient too."""
    make = sums._whole

    def whole() -> torch.Tensor:
        found: torch.Tensor = make()
        recorder.mark("gradients", found)
        return found

    sums._whole = whole


def _follow_phases(pipeline: Any, recorder: Recorder) -> None:
    execute, flush = pipeline._execute, pipeline._later.flush

    @wraps(execute)
    def followed(state: Any, i: int, action: Any, batches: torch.Tensor) -> None:
        recorder.phase = "forward" if action.kind == "forward" else "backward"
        execute(state, i, action, batches)
        recorder.keep()

    @wraps(flush)
    def flushed(key: object) -> None:
        before, recorder.flushing = recorder.flushing, True
        try:
            flush(key)
        finally:
            recorder.flushing = before

    pipeline._execute, pipeline._later.flush = followed, flushed


def _report(job: Job, rank: int, recorder: Recorder, ledger: Ledger, kernels: Kernels) -> DryRun:
    parts = recorder.parts()
    traffic = tuple(
        Traffic(axis, kind, t.ranks, t.count, t.payload_bytes, t.wire_bytes)
        for (axis, kind), t in sorted(ledger.traffic.items())
    )
    return DryRun(
        rank=rank,
        world=job.layout.world,
        peak_bytes=sum(parts.values()),
        parts_bytes=parts,
        host_bytes=recorder.host_peak,
        flops={phase: recorder.flops[phase] for phase in ("forward", "backward", "recompute")},
        traffic=traffic,
        assumptions=(*ASSUMPTIONS, f"kernels: {_KERNELS[kernels]}"),
    )
