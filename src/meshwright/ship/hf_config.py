"""`config.json` of a Hugging Face model from a `ModelSpec`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError, InputError
from meshwright.models.spec import ModelSpec

Config = Mapping[str, Any]

# What transformers assumes where a key is absent, and the values that our decoder computes.
_LLAMA_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("silu", ("silu",)),
    "attention_bias": (False, (False,)),
    "mlp_bias": (False, (False,)),
    "rope_scaling": (None, (None,)),
}
_GPT2_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
}


def to_config(spec: ModelSpec, end_of_text: int) -> dict[str, Any]:
    """The content of config.json; token id `end_of_text` begins and ends a text.

    Raises ConfigError if the Hugging Face model cannot have this shape.
    """
    common = {
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    return {**common, **(_llama_config(spec) if spec.family == "llama" else _gpt2_config(spec))}


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.query_dim != spec.hidden:
        raise ConfigError(
            "model.head_dim",
            spec.head_dim,
            f"GPT2LMHeadModel needs heads x head_dim = hidden = {spec.hidden}; leave head_dim out",
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
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

    Raises InputError or ConfigError if it is not a Llama or GPT-2, lacks a key, or asks for
    something that our decoder does not compute.
    """
    family = config.get("model_type")
    if family not in ("llama", "gpt2"):
        raise InputError(f"{where}: model_type = {family!r}; llama and gpt2 can be read")
    for key, (default, allowed) in (_LLAMA_FIXED if family == "llama" else _GPT2_FIXED).items():
        _require(config.get(key, default) in allowed, where, key, config.get(key))
    try:
        shape = _llama_shape(config, where) if family == "llama" else _gpt2_shape(config)
    except KeyError as error:
        raise InputError(f"{where}: {error.args[0]} is missing; take the original file") from error
    return parse(ModelSpec, {"family": family, "vocab": config["vocab_size"], **shape}, where)


def _llama_shape(config: Config, where: str) -> dict[str, Any]:
    # Since transformers 5 the settings of rotary positions stand in a table of their own.
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    _require(kind == "default", where, "rope_parameters.rope_type", kind)
    return {
        "hidden": config["hidden_size"],
        "ffn_hidden": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_dim": config.get("head_dim") or 0,
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "tie_embeddings": config.get("tie_word_embeddings", False),
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
        raise InputError(
            f"{where}: {key} = {value!r} is not what our decoder computes; use another model"
        )
