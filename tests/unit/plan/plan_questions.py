"""Questions that several tests of the planner ask."""

from __future__ import annotations

from typing import Any

from meshwright.models.spec import ModelSpec
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.search_question import Question, Wishes, ask

TINY = ModelSpec(
    family="llama", layers=4, hidden=64, heads=4, kv_heads=4, ffn_hidden=128, vocab=512
)
TINY_MOE = ModelSpec(
    family="qwen3_moe", layers=4, hidden=64, heads=4, kv_heads=2, vocab=512, n_experts=8, top_k=2,
    expert_ffn_hidden=64,
)  # fmt: skip


def question(model: str, cluster: str, **wishes: Any) -> Question:
    """The question about a preset, with the shipped constants."""
    return ask(model, cluster, Wishes(**wishes))[0]


def job(spec: ModelSpec = TINY, chips: int = 8, batch: int = 16, **layout: Any) -> Job:
    """A job for our own trainer; without a layout all chips are replicas."""
    return resolve_job(
        {
            "job": {"steps": 10},
            "model": spec.model_dump(exclude_defaults=True),
            "data": {"seq_len": 256, "global_batch": batch},
            "layout": layout or {"dp_replicate": chips},
            "cluster": {"ref": f"local:{chips}"},
        }
    )
