"""Synthetic run directories for the tests of `watch`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout, coordinates
from meshwright.plan.schedule import stages_of
from meshwright.plan.stages import stage_layers

START_TS = 1_750_000_000.0
SEQ_LEN = 64
EXPERTS = {"n_experts": 8, "top_k": 2, "expert_ffn_hidden": 32}


def write_run(
    path: Path,
    *,
    layout: Layout | None = None,
    steps: int = 40,
    metrics: Iterable[dict[str, Any]] | None = None,
    events: Iterable[dict[str, Any]] | None = None,
    plan: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Path:
    """A run directory of `steps` steps, by default complete and finished."""
    layout = layout or Layout(dp_replicate=2, tp=2, pp=2)
    path.mkdir(parents=True, exist_ok=True)
    (path / "job.toml").write_text(job_text(layout, steps, model))
    (path / "plan.json").write_text(json.dumps(plan or plan_of(layout)))
    if metrics is None:
        metrics = [metric(step) for step in range(1, steps + 1)]
    if events is None:
        events = finished_events(layout, steps)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return path


def model_of(layout: Layout, **changes: Any) -> ModelSpec:
    """A small model that `layout` can hold."""
    layers = max(4, layout.virtual_stages)
    sizes: dict[str, Any] = {"layers": layers, "hidden": 64, "heads": 8, "vocab": 512}
    return ModelSpec(family="llama", **sizes, **changes)


def job_text(layout: Layout, steps: int, model: dict[str, Any] | None = None) -> str:
    """A job file that resolves for `layout`; `model` has keys beyond the dense sizes."""
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": "synthetic", "steps": steps},
        "model": model_of(layout, **(model or {})).model_dump(exclude_defaults=True),
        "data": {"seq_len": SEQ_LEN, "global_batch": layout.dp * 8},
        "layout": layout.model_dump(exclude_defaults=True),
        "cluster": {"ref": f"local:{layout.world}"},
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def plan_of(layout: Layout, **changes: Any) -> dict[str, Any]:
    """A `plan.json` for `layout`."""
    stages = stage_layers(model_of(layout), layout, SEQ_LEN)
    return {
        "layout": layout.model_dump(),
        "label": layout.label,
        "model_params": 1_234_567,
        "active_params": 1_234_567,
        "flops_per_token": 7.4e6,
        "stage_balance": 0.97,
        "peak_flops_per_chip": 4.5e10,
        "peak_source": "measured fp32 matmul on this machine",
        "ranks": [place(layout, rank, stages) for rank in range(layout.world)],
        "assumptions": ["links between processes are shared memory"],
        **changes,
    }


def place(layout: Layout, rank: int, ranges: list[range]) -> dict[str, Any]:
    """One entry of `ranks` of a `plan.json`."""
    where = coordinates(layout, rank)
    stages = stages_of(where.pp, layout.schedule, layout.pp, layout.chunks)
    ends = (("embed", 0), ("head", layout.virtual_stages - 1))
    return {
        "rank": rank,
        "chip": f"cpu:{rank}",
        "node": "local",
        **asdict(where),
        "layers": [layer for stage in stages for layer in ranges[stage]],
        "holds": [name for name, stage in ends if stage in stages],
        "params": 154_321,
    }


def metric(step: int, **changes: Any) -> dict[str, Any]:
    """One line of `metrics.jsonl`, on a plausible curve."""
    wobble = math.sin(step * 12.9898) * 0.5
    return {
        "step": step,
        "loss": 2.9 + 3.4 * math.exp(-step / 60) + 0.08 * wobble,
        "tokens": 4096,
        "tokens_per_s": 12_300 + 900 * wobble,
        "step_time_s": 0.333 - 0.02 * wobble,
        "mfu": 0.31 + 0.02 * wobble,
        "grad_norm": 0.6 + 2 * math.exp(-step / 20) + 0.2 * abs(wobble),
        "lr": 3e-4 * min(1.0, step / 20),
        "data_wait_s": 0.004,
        "comm_wait_s": 0.06,
        "predicted_step_time_s": 0.31,
        **changes,
    }


def event(kind: Kind, seq: int, **fields: Any) -> dict[str, Any]:
    """One line of `events.jsonl`; `seq` also sets the time."""
    fields.setdefault("ts", START_TS + seq)
    return {"seq": seq, "run": "synthetic", "incarnation": 0, "kind": kind, **fields}


def profile(rank: int, seq: int, step: int, **changes: Any) -> dict[str, Any]:
    """A `RANK_PROFILE` over ten steps."""
    wait_s = 0.4 + 0.05 * (rank % 5)
    fields = {
        "steps": 10,
        "wall_s": 3.33,
        "compute_s": 2.5 - wait_s + 0.2,
        "comm_wait_s": wait_s,
        "data_wait_s": 0.06,
        "optimizer_s": 0.35,
        **changes,
    }
    return event(Kind.RANK_PROFILE, seq, rank=rank, step=step, **fields)


def evaluated(seq: int, step: int, loss: float, **changes: Any) -> dict[str, Any]:
    """An `EVALUATED` event."""
    fields = {"tokens": 8192, "bigram_loss": 3.6, "unigram_loss": 5.1, **changes}
    return event(Kind.EVALUATED, seq, step=step, loss=loss, **fields)


def expert_load(seq: int, step: int, layer: int, **changes: Any) -> dict[str, Any]:
    """An `EXPERT_LOAD` event of eight experts, of which expert 5 is the fullest."""
    fields = {
        "imbalance": 1.6,
        "chip_imbalance": 1.2,
        "hottest": 5,
        "counts": [90, 90, 90, 90, 90, 200, 150, 200],
        **changes,
    }
    return event(Kind.EXPERT_LOAD, seq, rank=0, step=step, layer=layer, **fields)


def experts_moved(seq: int, step: int, layer: int, **changes: Any) -> dict[str, Any]:
    """An `EXPERTS_MOVED` event."""
    fields = {"moved": 4, "before": 1.8, "after": 1.1, **changes}
    return event(Kind.EXPERTS_MOVED, seq, rank=0, step=step, layer=layer, **fields)


def started(seq: int, layout: Layout, **changes: Any) -> dict[str, Any]:
    """A `RUN_STARTED` event."""
    fields = {"world": layout.world, "layout": layout.label, "resumed_from": None, **changes}
    return event(Kind.RUN_STARTED, seq, **fields)


def finished_events(layout: Layout, steps: int) -> list[dict[str, Any]]:
    """The events of a run that went well."""
    ranks = range(layout.world)
    half = max(1, steps // 2)
    return [
        started(0, layout),
        *(event(Kind.RANK_READY, 1, rank=rank) for rank in ranks),
        *(profile(rank, 2, half) for rank in ranks),
        evaluated(3, half, 3.9),
        event(Kind.CHECKPOINT_COMMITTED, 4, step=half, path="checkpoints/half", save_s=0.12),
        *(profile(rank, 5, steps) for rank in ranks),
        evaluated(6, steps, 3.3),
        event(Kind.RUN_FINISHED, 7, step=steps, wall_s=141.5),
    ]
