"""What the plan says a rank holds is what the trainer builds for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from train_groups import mesh_of

from meshwright.plan.describe import describe_plan
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout
from meshwright.train.assembly import assemble
from meshwright.train.parallel.flat import FlatGroup
from meshwright.train.parallel.slots import is_expert

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 96, "ffn_hidden": 48}
EXPERTS = {"n_experts": 8, "top_k": 2, "expert_ffn_hidden": 24, "first_dense_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama-tied": {"family": "llama", "tie_embeddings": True},
    "gpt2": {"family": "gpt2", "max_seq_len": 40},
    "gpt2-tied": {"family": "gpt2", "max_seq_len": 40, "tie_embeddings": True},
    "qwen3_moe": {"family": "qwen3_moe", "kv_heads": 2, **EXPERTS},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "head_dim": 12,
        "q_lora_rank": 8,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "n_shared_experts": 2,
        **EXPERTS,
    },
}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 3},
    {"tp": 2, "pp": 2, "dp_shard": 2},
    {"pp": 2, "schedule": "zbv", "dp_replicate": 2, "sp": False},
    {"zero": 1, "dp_shard": 3, "cp": 2},
]
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "ep": 2, "expert_replicas": 2, "rebalance_above": 1e9},
    {"tp": 2, "dp_shard": 2, "ep": 4, "pp": 2},
    {"tp": 2, "dp_shard": 4, "ep": 2, "etp": 2},
]


def job_of(model: str, layout: dict[str, Any]) -> Job:
    return resolve_job(
        {
            "job": {"steps": 1},
            "model": {**SHAPE, **MODELS[model]},
            "data": {"seq_len": 24, "global_batch": 12},
            "layout": layout,
            "cluster": {"ref": f"local:{Layout(**layout).world}"},
        }
    )


def masters(groups: Sequence[FlatGroup]) -> int:
    """Numbers of `groups`, which share their axes, of which this rank keeps the master."""
    shards = {group.shards.size for group in groups}
    return -(-sum(group.used for group in groups) // max(shards, default=1))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, layout) for model in MODELS for layout in LAYOUTS),
        *((model, layout) for model in MODELS if "v3" in model for layout in EXPERT_LAYOUTS),
    ],
    ids=str,
)
def test_params_and_layers_of_each_rank(model: str, layout: dict[str, Any]) -> None:
    job = job_of(model, layout)
    plan = describe_plan(job)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(job.layout.world))
    for rank in plan["ranks"]:
        parts = assemble(job, mesh_of(job.layout, rank["rank"]), torch.device("cpu"), None)
        stages = parts.stages.values()
        experts = [group for group in parts.data.groups if is_expert(group.slots[0])]
        others = [group for group in parts.data.groups if group not in experts]
        assert rank["params"] == masters(others) + masters(experts)
        assert rank["layers"] == tuple(chain.from_iterable(stage.blocks for stage in stages))
        ends = {"embed": any(s.first for s in stages), "head": any(s.last for s in stages)}
        assert rank["holds"] == tuple(name for name, held in ends.items() if held)


def test_one_process_holds_the_model() -> None:
    plan = describe_plan(job_of("deepseek_v3", {}))
    model = job_of("deepseek_v3", {}).model
    assert plan["ranks"][0]["params"] == plan["model_params"] == model.params
    assert plan["active_params"] == model.active_params < model.params
    assert plan["flops_per_token"] == model.flops_per_token(24)
    assert plan["stage_balance"] == 1.0


def test_balance_is_that_of_the_stages_taken() -> None:
    even = describe_plan(job_of("llama", {"pp": 2}))["stage_balance"]
    uneven = describe_plan(job_of("llama", {"pp": 2, "stages": [1, 3]}))["stage_balance"]
    assert 0.5 < uneven < even <= 1.0
