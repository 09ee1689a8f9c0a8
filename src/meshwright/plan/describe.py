"""`plan.json`: the layout of a job on its chips, as data for people and for the console."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.models.spec import ModelSpec
from meshwright.plan.job import Job
from meshwright.plan.layout import coordinates, stage_layers


@dataclass(frozen=True)
class RankPlan:
    """One rank: its chip, its coordinates, and what it holds. `params` counts the weights it keeps
    between steps: its pipeline stage's, cut over tp and dp_shard."""

    rank: int
    chip: str
    node: str
    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    layers: tuple[int, int]  # first and last
    holds: tuple[str, ...]
    params: int


def describe_plan(job: Job) -> dict[str, Any]:
    """The plan of `job` as plain JSON. The chip's peak is filled in once it has been measured."""
    return {
        "layout": job.layout.model_dump(),
        "label": job.layout.label,
        "model_params": job.model.params,
        "flops_per_token": job.model.flops_per_token(job.data.seq_len),
        "peak_flops_per_chip": None,
        "peak_source": "measured at start: best of 5 products of 1024 x 1024 matrices; "
        "workers that share cores share their peak",
        "ranks": [asdict(rank_plan(job, rank)) for rank in range(job.layout.world)],
        "assumptions": [
            "model FLOPs: 6 per weight of every matrix product and causal attention, "
            "no recomputation",
            "chips are processes of this machine",
        ],
    }


def rank_plan(job: Job, rank: int) -> RankPlan:
    """What `rank` of `job` is and holds."""
    layout, where = job.layout, coordinates(job.layout, rank)
    layers = stage_layers(job.model.layers, layout.pp)[where.pp]
    ends = [("embed", where.pp == 0), ("head", where.pp == layout.pp - 1)]
    holds = tuple(name for name, here in ends if here)
    return RankPlan(
        rank=rank,
        chip=f"cpu:{rank}",
        node="local",
        **asdict(where),
        layers=(layers[0], layers[-1]),
        holds=holds,
        params=-(-_stage_params(job.model, len(layers), holds, layout.tp) // layout.dp_shard),
    )


def _stage_params(spec: ModelSpec, layers: int, holds: tuple[str, ...], tp: int) -> int:
    """Weights of a tp slice of a stage; norms and the biases behind a row split are kept whole."""
    norm = spec.hidden if spec.family == "llama" else 2 * spec.hidden
    whole = 2 * norm if spec.family == "llama" else 2 * norm + 2 * spec.hidden
    params = layers * ((spec.layer_params - whole) // tp + whole)
    table = spec.vocab * spec.hidden // tp
    if "embed" in holds:
        params += table + spec.embedding_params - spec.vocab * spec.hidden
    if "head" in holds:
        shares_table = spec.tie_embeddings and "embed" in holds
        params += norm + (0 if shares_table else table)
    return params
