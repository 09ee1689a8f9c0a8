"""Which parts of which layers keep their activations, and which are run again.

Bytes are counted from the tensors that the trainer's layers save for their backward pass; what
frameworks add on top (fragmentation, buffers of collectives) is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from meshwright.base.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout
from meshwright.plan.schedule import build, stages_of
from meshwright.plan.stages import stage_layers
from meshwright.plan.timeline import Costs, simulate

if TYPE_CHECKING:
    from meshwright.plan.job import Job

Part = Literal["attention", "mlp"]
Parts = frozenset[Part]
PARTS: tuple[Part, ...] = ("attention", "mlp")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class PartCost:
    """What one part of a layer keeps for one micro-batch on one rank, and what making it again
    costs. `input_bytes` is what is kept even when it is recomputed."""

    kept_bytes: float
    input_bytes: float
    flops: float


def recompute_plan(job: Job) -> list[Parts]:
    """For each layer the parts that are recomputed. Raises ConfigError if a budget cannot be met.

    `budget` recomputes as few FLOPs as will do on each rank, taking parts by FLOPs per byte saved.
    """
    layout, layers = job.layout, job.model.layers
    if layout.recompute == "budget":
        return _within_budget(job)
    chosen: dict[str, Parts] = {
        "none": frozenset(),
        "selective": frozenset(layout.recompute_parts),
        "full": frozenset(PARTS),
    }
    return [chosen[layout.recompute]] * layers


def part_costs(spec: ModelSpec, layer: int, layout: Layout, seq_len: int) -> dict[Part, PartCost]:
    """Costs of both parts of `layer` for a micro-batch of `layout`."""
    size = BYTES[layout.precision]
    tokens = layout.micro_batch * seq_len / layout.cp
    outside = tokens / (layout.tp if layout.sequence_parallel else 1) * spec.hidden * size
    gathered = tokens * spec.hidden * size if layout.tp > 1 else 0.0
    heads = 2 * spec.query_dim + spec.kv_dim + 2 * spec.value_dim
    flops = _forward_flops(spec, layer, seq_len)
    inside = {"attention": heads * size / layout.tp, "mlp": _mlp_bytes(spec, layer, layout, size)}
    return {
        part: PartCost(
            kept_bytes=2 * outside + gathered + tokens * inside[part],
            input_bytes=outside,
            flops=tokens * flops[part] / layout.tp,
        )
        for part in PARTS
    }


def _forward_flops(spec: ModelSpec, layer: int, seq_len: int) -> dict[Part, float]:
    """FLOPs of a token's forward through each part of `layer`."""
    matmul = spec.matmul_params_of_layer(layer, active=True)
    mlp = 2.0 * (matmul - spec.attention_matmul_params)
    return {"attention": spec.layer_flops(layer, seq_len) / 3 - mlp, "mlp": mlp}


def _mlp_bytes(spec: ModelSpec, layer: int, layout: Layout, size: int) -> float:
    """Bytes that a token leaves inside a feed-forward half: gate, up, their product and its cut."""
    if not spec.is_moe(layer):
        return 4 * spec.ffn_hidden * size / layout.tp
    routed = spec.top_k * (2 * spec.hidden + 4 * spec.expert_ffn_hidden / layout.etp)
    shared = 4 * spec.n_shared_experts * spec.expert_ffn_hidden / layout.tp
    return (routed / (layout.tp // layout.etp) + shared) * size


def layer_bytes(costs: dict[Part, PartCost], recomputed: Parts) -> float:
    """What a layer keeps: recomputed parts their inputs, of which two in a row share one."""
    kept = sum(cost.kept_bytes for part, cost in costs.items() if part not in recomputed)
    inputs = sum(costs[part].input_bytes for part in recomputed)
    return kept + (inputs if len(recomputed) < len(PARTS) else inputs / len(PARTS))


def _within_budget(job: Job) -> list[Parts]:
    layout, seq_len = job.layout, job.data.seq_len
    orders = build(layout.schedule, layout.pp, layout.chunks, _micro_batches(job))
    timeline = simulate(orders, layout.schedule, layout.pp, Costs.even(layout.virtual_stages))
    ranges = stage_layers(job.model, layout, seq_len)
    plan: list[Parts] = [frozenset()] * job.model.layers
    for rank, peak in enumerate(timeline.peak_in_flight):
        stages = stages_of(rank, layout.schedule, layout.pp, layout.chunks)
        mine = list(chain.from_iterable(ranges[stage] for stage in stages))
        copies = peak / layout.chunks
        _fit(job, plan, mine, layout.activation_gib * 2**30 / max(copies, 1))
    return plan


def _fit(job: Job, plan: list[Parts], layers: list[int], budget: float) -> None:
    """Recompute parts of `layers` in `plan` until they keep no more than `budget` bytes."""
    costs = {i: part_costs(job.model, i, job.layout, job.data.seq_len) for i in layers}

    def total() -> float:
        return sum(layer_bytes(costs[i], plan[i]) for i in layers)

    def price(choice: tuple[int, Part]) -> float:
        cost = costs[choice[0]][choice[1]]
        return cost.flops / (cost.kept_bytes - cost.input_bytes)

    for layer, part in sorted(((i, part) for i in layers for part in PARTS), key=price):
        if total() <= budget:
            return
        plan[layer] |= {part}
    if total() > budget:
        least = total() / budget * job.layout.activation_gib
        raise ConfigError(
            "layout.activation_gib",
            job.layout.activation_gib,
            f"recomputing everything still keeps {least:.3g} GiB on a rank; raise it, "
            "or lower micro_batch",
        )


def _micro_batches(job: Job) -> int:
    return job.data.global_batch // (job.layout.dp * job.layout.micro_batch)
