"""The model as Megatron-LM's arguments; `read.megatron_model` is the way back."""

from __future__ import annotations

from math import gcd
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.models.spec import ModelSpec

Arguments = dict[str, Any]
# What `--use-rope-scaling` has fixed; only the factor is an argument.
_LLAMA3_ROPE = {"rope_low_freq": 1.0, "rope_high_freq": 4.0, "rope_original_len": 8192}


def model_arguments(spec: ModelSpec, tp: int) -> Arguments:
    """Arguments by name, True for a flag. Raises ConfigError for what Megatron has no word for."""
    found: Arguments = {
        "num-layers": spec.layers,
        "hidden-size": spec.hidden,
        "ffn-hidden-size": spec.ffn_hidden,
        "num-attention-heads": spec.heads,
        "max-position-embeddings": spec.max_seq_len,
        "norm-epsilon": spec.norm_eps,
        "attention-dropout": 0.0,
        "hidden-dropout": spec.dropout,
        **_vocabulary(spec, tp),
    }
    if not spec.tie_embeddings:
        found["untie-embeddings-and-output-weights"] = True
    if spec.family == "gpt2":
        return {**found, "position-embedding-type": "learned_absolute"}
    found |= {"normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True}
    found |= _rope(spec) | _attention(spec)
    return found | (_experts(spec) if spec.n_experts else {})


def _vocabulary(spec: ModelSpec, tp: int) -> Arguments:
    """Megatron pads the table to a multiple of this x tp: one that leaves it as it is."""
    return {
        "vocab-size": spec.vocab,
        "make-vocab-size-divisible-by": gcd(spec.vocab // tp, 128),
    }


def _rope(spec: ModelSpec) -> Arguments:
    if spec.rope_theta != int(spec.rope_theta):
        raise _no_word("rope_theta", spec.rope_theta, "--rotary-base is a whole number")
    found: Arguments = {
        "position-embedding-type": "rope",
        "rotary-base": int(spec.rope_theta),
        "rotary-percent": 1.0,
    }
    if spec.rope_scaling == "llama3":
        for key, fixed in _LLAMA3_ROPE.items():
            if getattr(spec, key) != fixed:
                raise _no_word(key, getattr(spec, key), f"--use-rope-scaling has {fixed} fixed")
        found |= {"use-rope-scaling": True, "rope-scaling-factor": spec.rope_factor}
    elif spec.rope_scaling == "yarn":
        if not spec.latent_attention:
            raise _no_word("rope_scaling", "yarn", "only with --multi-latent-attention")
        found |= _yarn(spec)
    elif spec.latent_attention:
        # It stretches positions unless told otherwise; its fused kernel asks for this type of them.
        found |= {"rope-type": "yarn", "rotary-scaling-factor": 1.0}
    return found


def _yarn(spec: ModelSpec) -> Arguments:
    fixed = {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_original_len": 4096}
    for key, value in fixed.items():
        if getattr(spec, key) != value:
            raise _no_word(key, getattr(spec, key), f"--rope-type yarn has {value} fixed")
    mscale, all_dim = spec.rope_mscale, spec.rope_mscale_all_dim
    if all_dim and not mscale:
        raise _no_word("rope_mscale", mscale, f"--mscale-all-dim {all_dim} divides by its own")
    return {
        "rope-type": "yarn",
        "rotary-scaling-factor": spec.rope_factor,
        "mscale": mscale if all_dim else 1.0,  # alone it does not count here, but does there
        "mscale-all-dim": all_dim,
    }


def _attention(spec: ModelSpec) -> Arguments:
    if spec.latent_attention:
        queries = {"q-lora-rank": spec.q_lora_rank} if spec.q_lora_rank else {}
        return {
            "multi-latent-attention": True,
            "qk-layernorm": True,
            **queries,
            "kv-lora-rank": spec.kv_lora_rank,
            "qk-head-dim": spec.head_dim - spec.qk_rope_head_dim,
            "qk-pos-emb-head-dim": spec.qk_rope_head_dim,
            "v-head-dim": spec.value_head_dim,
        }
    found: Arguments = {"kv-channels": spec.head_dim}
    if spec.kv_heads != spec.heads:
        found |= {"group-query-attention": True, "num-query-groups": spec.kv_heads}
    if spec.qk_norm:
        found["qk-layernorm"] = True
    return found


def _experts(spec: ModelSpec) -> Arguments:
    found: Arguments = {
        "num-experts": spec.n_experts,
        "moe-router-topk": spec.top_k,
        "moe-ffn-hidden-size": spec.expert_ffn_hidden,
        "moe-router-score-function": spec.gate,
        "moe-router-dtype": "fp32",
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": True,
        **_balance(spec),
    }
    if spec.n_shared_experts:
        found["moe-shared-expert-intermediate-size"] = (
            spec.n_shared_experts * spec.expert_ffn_hidden
        )
    if dense := spec.first_dense_layers:
        found["moe-layer-freq"] = f"([0]*{dense}+[1]*{spec.layers - dense})"
    found |= _gate(spec)
    if spec.routed_scaling != 1.0:
        found["moe-router-topk-scaling-factor"] = spec.routed_scaling
    if spec.expert_groups > 1:
        found["moe-router-num-groups"] = spec.expert_groups
        found["moe-router-group-topk"] = spec.top_k_groups
    if spec.capacity_factor:
        found["moe-expert-capacity-factor"] = spec.capacity_factor
    return found


def _gate(spec: ModelSpec) -> Arguments:
    """Whether the weights of the chosen experts add up to 1. Sigmoids are divided by their sum
    where there are several, and only there; a softmax over a single one is refused."""
    if spec.gate == "sigmoid":
        if spec.norm_top_k != (spec.top_k > 1):
            raise _no_word(
                "norm_top_k", spec.norm_top_k, "sigmoids add up to 1 if top_k is above 1"
            )
        return {}
    if spec.norm_top_k and spec.top_k == 1:
        raise _no_word("norm_top_k", True, "top_k = 1 needs --moe-router-pre-softmax; set false")
    return {} if spec.norm_top_k else {"moe-router-pre-softmax": True}


def _balance(spec: ModelSpec) -> Arguments:
    losses = {"aux_loss": spec.aux_loss, "seq_aux_loss": spec.seq_aux_loss}
    used = {name: weight for name, weight in losses.items() if weight}
    found: Arguments = {"moe-router-load-balancing-type": " ".join(used) or "none"}
    if used:
        found["moe-aux-loss-coeff"] = " ".join(map(str, used.values()))
    if spec.z_loss:
        found["moe-z-loss-coeff"] = spec.z_loss
    if spec.bias_update_rate:
        found["moe-router-enable-expert-bias"] = True
        found["moe-router-bias-update-rate"] = spec.bias_update_rate
    return found


def _no_word(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"model.{key}", value, f"Megatron has no argument for it: {why}")
