"""The numbers of a workload that its time depends on; each one value, or one for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.workload import Workload

OPERAND_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}


@dataclass(frozen=True)
class Shapes:
    """Sizes in channels, counts or tokens; `operand_bytes` of one element in a matrix product.

    `latent_*` are 0 without latent attention; then `qkv` is the width of the one input projection.
    `scores` is the width that attention works on: of queries and values together. `trained` is 0
    where there is no backward, else 1.
    """

    layers: ArrayLike
    moe_layers: ArrayLike
    hidden: ArrayLike
    heads: ArrayLike
    qkv: ArrayLike
    attention_out: ArrayLike
    scores: ArrayLike
    kv: ArrayLike
    latent_down: ArrayLike
    latent_q: ArrayLike
    latent_kv: ArrayLike
    latent_q_out: ArrayLike
    latent_kv_out: ArrayLike
    ffn: ArrayLike
    ffn_matrices: ArrayLike
    vocab: ArrayLike
    tied: ArrayLike
    experts: ArrayLike
    top_k: ArrayLike
    expert_ffn: ArrayLike
    shared_ffn: ArrayLike
    embedding_params: ArrayLike
    attention_params: ArrayLike
    seq_len: ArrayLike
    global_batch: ArrayLike
    operand_bytes: ArrayLike
    score_share: ArrayLike
    imbalance: ArrayLike
    trained: ArrayLike = 1.0

    @classmethod
    def of(cls, work: Workload) -> Self:
        """The numbers of `work`."""
        spec = work.spec
        return cls(
            layers=spec.layers,
            moe_layers=work.moe_layers,
            hidden=spec.hidden,
            heads=spec.heads,
            scores=spec.query_dim + spec.value_dim,
            attention_out=spec.value_dim,
            **_projections(spec),
            ffn=spec.ffn_hidden,
            ffn_matrices=work.ffn_matrices,
            vocab=spec.vocab,
            tied=float(spec.tie_embeddings),
            experts=spec.n_experts,
            top_k=spec.top_k,
            expert_ffn=spec.expert_ffn_hidden,
            shared_ffn=spec.n_shared_experts * spec.expert_ffn_hidden,
            embedding_params=spec.embedding_params,
            attention_params=spec.attention_matmul_params,
            seq_len=work.seq_len,
            global_batch=work.global_batch,
            operand_bytes=OPERAND_BYTES[work.precision],
            score_share=work.attention_share * (0.5 if work.causal and work.flash_attention else 1),
            imbalance=work.imbalance,
            trained=float(work.trained),
        )

    @classmethod
    def stack(cls, shapes: Sequence[Self]) -> Self:
        """Shapes of as many candidates, each with a workload of its own."""
        return cls(
            **{
                field.name: np.array([getattr(one, field.name) for one in shapes], float)
                for field in fields(cls)
            }
        )


def _projections(spec: ModelSpec) -> dict[str, float]:
    """Widths of attention's input projections."""
    names = ("latent_down", "latent_q", "latent_kv", "latent_q_out", "latent_kv_out")
    if not spec.latent_attention:
        width = spec.query_dim + 2 * spec.kv_dim
        return {"qkv": width, "kv": 2 * spec.kv_dim, **dict.fromkeys(names, 0.0)}
    keys = spec.heads * (spec.head_dim - spec.rope_dim)
    direct = 0.0 if spec.q_lora_rank else float(spec.query_dim)
    return {
        "qkv": direct,
        "kv": spec.query_dim + spec.value_dim,
        "latent_down": spec.q_lora_rank + spec.kv_lora_rank + spec.rope_dim,
        "latent_q": spec.q_lora_rank,
        "latent_kv": spec.kv_lora_rank,
        "latent_q_out": spec.query_dim if spec.q_lora_rank else 0.0,
        "latent_kv_out": keys + spec.value_dim,
    }
