"""The layouts on which the prediction of a step is compared with the step itself."""

from __future__ import annotations

from math import prod
from typing import Any

from meshwright.plan.job import Job, resolve_job

_SHAPE = {"hidden": 256, "heads": 4, "vocab": 512, "max_seq_len": 1024}
_MOE = {"n_experts": 8, "top_k": 2, "expert_ffn_hidden": 256}
_MLA = {"head_dim": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2, "ffn_hidden": 704},
    "tied": {"family": "llama", "kv_heads": 4, "ffn_hidden": 704, "tie_embeddings": True},
    "narrow": {"family": "llama", "kv_heads": 2, "ffn_hidden": 704, "vocab": 16},
    "gpt2": {"family": "gpt2", "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_dim": 32, "ffn_hidden": 512},
    "mixtral": {"family": "mixtral", "kv_heads": 2, **_MOE, "aux_loss": 0.02},
    "qwen3_moe": {"family": "qwen3_moe", "kv_heads": 2, **_MOE, "aux_loss": 1e-3, "z_loss": 1e-3},
    "capacity": {"family": "mixtral", "kv_heads": 2, **_MOE, "capacity_factor": 1.25},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "ffn_hidden": 512,
        **_MOE,
        **_MLA,
        "q_lora_rank": 128,
        "n_shared_experts": 1,
        "first_dense_layers": 1,
        "gate": "sigmoid",
        "expert_groups": 4,
        "top_k_groups": 2,
        "seq_aux_loss": 1e-4,
        "bias_update_rate": 1e-3,
    },
}
_BF16 = {"precision": "bf16"}
# Model, layout, and the rank where it is not the first one.
ROWS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 0),
    ("llama", {**_BF16}, 0),
    ("llama", {**_BF16, "grad_precision": "bf16"}, 0),
    ("llama", {**_BF16, "dp_replicate": 2}, 0),
    ("llama", {**_BF16, "dp_replicate": 4, "domain": 2}, 1),
    ("llama", {**_BF16, "dp_shard": 2, "zero": 1}, 1),
    ("llama", {**_BF16, "dp_shard": 4, "zero": 2}, 0),
    ("llama", {"dp_shard": 4, "zero": 3}, 3),
    ("narrow", {**_BF16, "dp_shard": 2, "zero": 3, "recompute": "full"}, 0),
    ("llama", {**_BF16, "dp_replicate": 2, "dp_shard": 2}, 2),
    ("llama", {**_BF16, "offload": "optimizer"}, 0),
    ("llama", {"tp": 2, "sp": False}, 0),
    ("llama", {**_BF16, "tp": 2}, 1),
    ("llama", {"cp": 2}, 1),
    ("llama", {**_BF16, "cp": 4, "zero": 1}, 0),
    ("llama", {**_BF16, "cp": 2, "cp_method": "ulysses"}, 0),
    ("llama", {**_BF16, "cp": 4, "cp_method": "ulysses"}, 0),
    ("llama", {"pp": 2}, 1),
    ("llama", {**_BF16, "pp": 4, "schedule": "gpipe"}, 2),
    ("llama", {**_BF16, "pp": 2, "vpp": 2, "schedule": "interleaved"}, 0),
    ("llama", {**_BF16, "pp": 2, "schedule": "zbv"}, 0),
    ("llama", {"pp": 2, "schedule": "dualpipev", "dp_shard": 2}, 1),
    ("llama", {**_BF16, "recompute": "full"}, 0),
    ("narrow", {**_BF16, "recompute": "full"}, 0),
    ("llama", {**_BF16, "recompute": "selective"}, 0),
    ("llama", {"recompute": "selective", "recompute_parts": ["mlp"]}, 0),
    ("llama", {**_BF16, "loss_chunk": 128}, 0),
    ("tied", {**_BF16, "pp": 2, "dp_shard": 2, "zero": 1}, 3),
    ("tied", {**_BF16, "tp": 2}, 0),
    ("gpt2", {}, 0),
    ("gpt2", {**_BF16, "tp": 2, "pp": 2}, 2),
    ("gpt2", {**_BF16, "dp_shard": 2, "cp": 2}, 0),
    ("qwen3", {}, 0),
    ("qwen3", {**_BF16, "tp": 2, "cp": 2}, 3),
    ("qwen3", {**_BF16, "dp_shard": 2, "pp": 2}, 0),
    ("mixtral", {}, 0),
    ("mixtral", {**_BF16, "dp_shard": 2, "ep": 2}, 0),
    ("mixtral", {**_BF16, "tp": 2, "ep": 2}, 0),
    ("mixtral", {**_BF16, "dp_replicate": 2, "tp": 2, "etp": 2, "ep": 2}, 1),
    ("mixtral", {**_BF16, "dp_replicate": 4}, 0),
    ("qwen3_moe", {**_BF16, "dp_shard": 4, "ep": 4}, 0),
    (
        "qwen3_moe",
        {
            **_BF16,
            "dp_replicate": 2,
            "tp": 2,
            "cp": 2,
            "pp": 2,
            "ep": 4,
            "recompute": "full",
            "zero": 1,
        },
        9,
    ),
    ("capacity", {**_BF16, "tp": 2}, 0),
    ("deepseek_v3", {}, 0),
    ("deepseek_v3", {**_BF16, "dp_replicate": 2, "ep": 2, "recompute": "full"}, 0),
    ("deepseek_v3", {**_BF16, "tp": 2, "pp": 2, "ep": 2, "schedule": "zbv"}, 0),
    (
        "deepseek_v3",
        {
            **_BF16,
            "dp_shard": 2,
            "tp": 2,
            "pp": 2,
            "ep": 4,
            "schedule": "dualpipev",
            "recompute": "selective",
        },
        5,
    ),
    ("deepseek_v3", {**_BF16, "cp": 2, "ep": 2}, 0),
]


def table_job(model: str, layout: dict[str, Any], seq_len: int = 512, sequences: int = 2) -> Job:
    """A job of `model` on `layout`: two layers and `sequences` micro-batches a rank, in a pipeline
    four of each."""
    axes = {name: layout.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    piped = axes["pp"] > 1
    count = max(sequences, 4 if piped else 1)
    return resolve_job(
        {
            "job": {"steps": 10},
            "model": {**_SHAPE, "layers": 4 if piped else 2, **MODELS[model]},
            "data": {
                "seq_len": seq_len,
                "global_batch": count * axes["dp_replicate"] * axes["dp_shard"],
            },
            "layout": layout,
            "cluster": {"ref": f"local:{prod(axes.values())}"},
        }
    )
