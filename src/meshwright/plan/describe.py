"""`plan.json`: the layout of a job on its chips, as data for people and for the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from typing import Any

from meshwright.models.spec import ModelSpec
from meshwright.plan.auto import question_of
from meshwright.plan.calibration import calibrated
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout, coordinates, expert_grid
from meshwright.plan.prediction import predict
from meshwright.plan.schedule import stages_of
from meshwright.plan.search_traffic import placed
from meshwright.plan.stages import balance, predicted_costs, stage_layers


@dataclass(frozen=True)
class RankPlan:
    """One rank: its chip, its coordinates, and what it holds. `layers` are the numbers of the
    layers of all its pipeline stages; `params` counts the weights whose master it keeps."""

    rank: int
    chip: str
    node: str
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    layers: tuple[int, ...]
    holds: tuple[str, ...]
    params: int


def describe_plan(job: Job) -> dict[str, Any]:
    """The plan of `job` as plain JSON, with what is predicted for it from what is known of its
    cluster. The chip's peak is filled in once it has been measured."""
    seq_len = job.data.seq_len
    question = question_of(job, calibrated(job.cluster.ref))
    prediction = predict(question, job.layout).document()
    ranges = stage_layers(job.model, job.layout, seq_len)

    @cache
    def held(layers: tuple[int, ...], holds: tuple[str, ...]) -> int:  # the same for many ranks
        return _held_params(job.model, layers, holds, job.layout)

    return {
        "layout": job.layout.model_dump(),
        "label": job.layout.label,
        "model_params": job.model.params,
        "active_params": job.model.active_params,
        "flops_per_token": job.model.flops_per_token(seq_len),
        "stage_balance": balance(ranges, predicted_costs(job.model, seq_len), job.layout),
        "prediction": {key: prediction[key] for key in prediction if key != "layout"},
        "placement_seconds": placed(question, job.layout).terms,
        "peak_flops_per_chip": None,
        "peak_source": "measured at start: best of 5 products of 1024 x 1024 matrices; "
        "workers that share cores share their peak",
        "ranks": [asdict(_rank_plan(job, rank, ranges, held)) for rank in range(job.layout.world)],
        "assumptions": [
            "model FLOPs: 6 per weight of every matrix product and causal attention, "
            "of the experts that a token goes to; no recomputation",
            "stage_balance: mean / max FLOPs of a pipeline rank",
            "chips are processes of this machine",
        ],
    }


def _rank_plan(
    job: Job,
    rank: int,
    ranges: list[range],
    held: Callable[[tuple[int, ...], tuple[str, ...]], int],
) -> RankPlan:
    layout, where = job.layout, coordinates(job.layout, rank)
    stages = stages_of(where.pp, layout.schedule, layout.pp, layout.chunks)
    ends = (("embed", 0), ("head", layout.virtual_stages - 1))
    holds = tuple(name for name, stage in ends if stage in stages)
    layers = tuple(chain.from_iterable(ranges[stage] for stage in stages))
    return RankPlan(
        rank=rank,
        chip=f"cpu:{rank}",
        node="local",
        **asdict(where),
        layers=layers,
        holds=holds,
        params=held(layers, holds),
    )


def _held_params(
    spec: ModelSpec, layers: tuple[int, ...], holds: tuple[str, ...], layout: Layout
) -> int:
    """Masters of one rank: tp slices and shards of its stages, and its share of the experts."""
    grid = expert_grid(layout)
    places = (spec.n_experts + layout.expert_replicas) // grid.ep
    experts = sum(spec.is_moe(layer) for layer in layers) * places * spec.expert_params
    dense = sum(_dense_layer_params(spec, layer, layout.tp) for layer in layers)
    table = spec.vocab * spec.hidden // layout.tp
    if "embed" in holds:
        dense += table + spec.embedding_params - spec.vocab * spec.hidden
    if "head" in holds:
        shares_table = spec.tie_embeddings and layout.virtual_stages == 1
        dense += _norm_params(spec) + (0 if shares_table else table)
    shards = layout.dp_shard * layout.cp if layout.zero_stage else 1
    return -(-dense // shards) + -(-experts // (layout.etp * grid.shards))


def _dense_layer_params(spec: ModelSpec, layer: int, tp: int) -> int:
    """A tp slice of a layer without its routed experts; what every tp rank holds whole (norms,
    routers, down projections of latents, biases behind a row split) is not divided."""
    total = spec.params_of_layer(layer)
    total -= spec.n_experts * spec.expert_params if spec.is_moe(layer) else 0
    whole = _whole_params(spec, layer)
    return (total - whole) // tp + whole


def _norm_params(spec: ModelSpec) -> int:
    return (2 if spec.family == "gpt2" else 1) * spec.hidden


def _whole_params(spec: ModelSpec, layer: int) -> int:
    whole = 2 * _norm_params(spec)
    if spec.family == "gpt2":
        whole += 2 * spec.hidden
    if spec.qk_norm:
        whole += 2 * spec.head_dim
    if spec.latent_attention:
        latents = spec.q_lora_rank + spec.kv_lora_rank
        whole += latents + spec.hidden * (latents + spec.rope_dim)
    return whole + (spec.hidden * spec.n_experts if spec.is_moe(layer) else 0)
