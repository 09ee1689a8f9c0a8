"""A layout and the size of a model in words. The live view and the report share these."""

from __future__ import annotations

from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.watch.formats import si


def layout_facts(job: Job, stage_balance: float | None) -> list[str]:
    """What the label of a layout does not say, and is not plain: `schedule zbv, 2 stages a rank`,
    `stage balance 0.97`, `ZeRO stage 1`, `ep 4, etp 1`, `fp16`, ..."""
    layout, facts = job.layout, []
    if layout.pp > 1:
        facts.append(_schedule(layout))
        if stage_balance is not None:
            facts.append(f"stage balance {stage_balance:.2f}")
    if layout.zero_stage:
        facts.append(f"ZeRO stage {layout.zero_stage}")
    if layout.cp > 1:
        facts.append(f"context parallelism by {layout.cp_method}")
    if job.model.n_experts:
        facts.append(f"ep {layout.ep}, etp {layout.etp}")
    if layout.expert_replicas:
        facts.append(f"{layout.expert_replicas} extra places for experts")
    if layout.domain:
        facts.append(f"{layout.domain} replicas a domain")
    return facts + _means(layout)


def _schedule(layout: Layout) -> str:
    words = f"schedule {layout.schedule}"
    return words if layout.chunks == 1 else f"{words}, {layout.chunks} stages a rank"


def _means(layout: Layout) -> list[str]:
    """How numbers are kept and memory is saved, where that differs from the plain way."""
    scaling = f" scaled by {layout.fp8_scaling}" if layout.precision == "fp8" else ""
    compressed = layout.grad_compression
    return [
        words
        for words, plain in (
            (layout.precision + scaling, layout.precision == "fp32"),
            (f"recompute {layout.recompute}", layout.recompute == "none"),
            (f"gradients sent in {compressed}", compressed == "none"),
            (f"offload {layout.offload}", layout.offload == "none"),
        )
        if not plain
    ]


def model_size(params: int, active_params: int | None) -> str:
    """`1.23 M parameters`; with `, 400 k active` where a token meets only some of them."""
    words = f"{si(params)} parameters"
    return words if active_params in (None, params) else f"{words}, {si(active_params)} active"
