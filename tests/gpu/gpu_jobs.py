"""The jobs of the GPU tests: small, with sizes that GPU kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec
from meshwright.plan.data_section import DataSection
from meshwright.plan.job import Job, JobSection, OptimizerSection
from meshwright.plan.layout import Layout

SEQ_LEN, BATCH, VOCAB = 64, 4, 128
LLAMA: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 128,
    "vocab": VOCAB,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "family": "qwen3_moe",
    "n_experts": 4,
    "top_k": 2,
    "expert_ffn_hidden": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "moe": MOE,
    "mla": {
        **MOE,
        "family": "deepseek_v3",
        "kv_heads": 4,
        "head_dim": 32,
        "v_head_dim": 16,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "n_shared_experts": 1,
        "first_dense_layers": 1,
        "gate": "sigmoid",
        "bias_update_rate": 0.01,
    },
}


def job(
    model: str,
    steps: int,
    layout: dict[str, Any],
    changes: dict[str, Any] | None = None,
    packed: bool = False,
    seq_len: int = SEQ_LEN,
) -> Job:
    """A job of two micro-batches a step."""
    return Job(
        job=JobSection(steps=steps),
        model=ModelSpec(**MODELS[model] | (changes or {})),
        data=DataSection(
            seq_len=seq_len, global_batch=BATCH, packing="documents" if packed else "stream"
        ),
        layout=Layout(micro_batch=BATCH // 2, **layout),
        optimizer=OptimizerSection(lr=1e-3),
    )


def tokens(what: Job, step: int) -> Tensor:
    """Tokens [micro_batches, micro_batch, seq_len + 1] of one step."""
    draw = torch.Generator().manual_seed(step)
    shape = (2, what.layout.micro_batch, what.data.seq_len + 1)
    return torch.randint(0, what.model.vocab, shape, generator=draw)
