"""`config.json` of a Hugging Face model from a `ModelSpec`, and back.

A family is called as its `model_type`. What only training needs and the format lacks (capacity,
z and sequence losses, the rate of routing biases) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError, InputError
from meshwright.models.hf_experts import check_routing, from_experts, to_experts
from meshwright.models.hf_rope import check_gain, from_rope, not_computed, to_rope
from meshwright.models.spec import Family, ModelSpec

Config = Mapping[str, Any]
Fixed = dict[str, tuple[Any, tuple[Any, ...]]]

ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

# What transformers assumes where a key is absent, and the values that our decoder computes.
_SWIGLU: Fixed = {
    "hidden_act": ("silu", ("silu",)),
    "attention_bias": (False, (False,)),
    "quantization_config": (None, (None,)),
}
_FULL_ATTENTION: Fixed = {"use_sliding_window": (False, (False,))}
_FIXED: Mapping[Family, Fixed] = {
    "llama": {**_SWIGLU, "mlp_bias": (False, (False,))},
    "gpt2": {
        "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "add_cross_attention": (False, (False,)),
    },
    "qwen3": {**_SWIGLU, **_FULL_ATTENTION},
    "mixtral": {**_SWIGLU, "sliding_window": (None, (None,))},
    "qwen3_moe": {**_SWIGLU, **_FULL_ATTENTION, "decoder_sparse_step": (1, (1,))},
    "deepseek_v3": {
        **_SWIGLU,
        "rope_interleave": (True, (True,)),
        "scoring_func": ("sigmoid", ("sigmoid",)),
        "topk_method": ("noaux_tc", ("noaux_tc",)),
        "moe_layer_freq": (1, (1,)),
    },
}


def to_config(spec: ModelSpec, end_of_text: int) -> dict[str, Any]:
    """The content of config.json; token id `end_of_text` begins and ends a text.

    Raises ConfigError if the Hugging Face model cannot have this shape.
    """
    check_exportable(spec)
    common = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    if spec.family == "gpt2":
        return {**common, **_gpt2_config(spec)}
    attention = _latent_config(spec) if spec.latent_attention else {"head_dim": spec.head_dim}
    return {**common, **_decoder_config(spec), **attention, **to_experts(spec)}


def check_exportable(spec: ModelSpec) -> None:
    """Raises ConfigError if no class of transformers computes this model."""
    kind = ARCHITECTURES[spec.family]
    if spec.family == "gpt2" and spec.query_dim != spec.hidden:
        raise ConfigError(
            "model.head_dim",
            spec.head_dim,
            f"{kind} needs heads x head_dim = hidden = {spec.hidden}; leave head_dim out",
        )
    check_routing(spec, kind)


def _decoder_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        **to_rope(spec),
        "hidden_act": "silu",
        "attention_bias": False,
        **({"mlp_bias": False} if spec.family == "llama" else {}),
    }


def _latent_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": spec.q_lora_rank or None,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_rope_head_dim": spec.rope_dim,
        "qk_nope_head_dim": spec.head_dim - spec.rope_dim,
        "v_head_dim": spec.value_head_dim,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": spec.hidden,
        "n_inner": spec.ffn_hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.max_seq_len,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": "gelu_new",
    }


def from_config(config: Config, where: str) -> ModelSpec:
    """The model that a config.json describes. `where` names the file in errors.

    Raises InputError or ConfigError if it is of no family of ours, lacks a key, or asks for
    something that our decoder does not compute.
    """
    kind = config.get("model_type")
    family = next((family for family in ARCHITECTURES if family == kind), None)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{where}: model_type = {kind!r}; can be read: {known}")
    for key, (default, allowed) in _FIXED[family].items():
        _require(config.get(key, default) in allowed, where, key, config.get(key))
    try:
        shape = _gpt2_shape(config) if family == "gpt2" else _decoder_shape(config, family, where)
    except KeyError as error:
        raise InputError(f"{where}: {error.args[0]} is missing; take the original file") from error
    raw = {"family": family, "vocab": config["vocab_size"], **shape}
    spec = parse(ModelSpec, raw, where)
    check_gain(spec, config, where)
    return spec


def _decoder_shape(config: Config, family: Family, where: str) -> dict[str, Any]:
    return {
        "hidden": config["hidden_size"],
        "ffn_hidden": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or 0,
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        **from_rope(config, where, 1_000_000.0 if family == "mixtral" else 10_000.0),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        **(_latent_shape(config) if family == "deepseek_v3" else _head_shape(config, family)),
        **from_experts(config, family, where),
    }


def _head_shape(config: Config, family: Family) -> dict[str, Any]:
    # transformers gives a Qwen3 heads of 128 channels where nothing is said.
    return {"head_dim": config.get("head_dim") or (128 if family == "qwen3" else 0)}


def _latent_shape(config: Config) -> dict[str, Any]:
    return {
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "q_lora_rank": config["q_lora_rank"] or 0,
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_rope_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }


def _gpt2_shape(config: Config) -> dict[str, Any]:
    return {
        "hidden": config["n_embd"],
        "ffn_hidden": config.get("n_inner") or 0,
        "layers": config["n_layer"],
        "heads": config["n_head"],
        "max_seq_len": config["n_positions"],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _require(holds: bool, where: str, key: str, value: object) -> None:
    if not holds:
        raise not_computed(where, key, value)
