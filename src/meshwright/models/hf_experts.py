"""Experts and their routing in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.models.hf_rope import not_computed
from meshwright.models.spec import Family, ModelSpec

Config = Mapping[str, Any]

# Settings of routing that the classes of transformers cannot be told.
_SOFTMAX_ROUTING = {
    "gate": "softmax",
    "n_shared_experts": 0,
    "routed_scaling": 1.0,
    "expert_groups": 1,
    "bias_update_rate": 0.0,
}
_ROUTING: Mapping[Family, dict[str, Any]] = {
    "llama": {"n_experts": 0},
    "gpt2": {},
    "qwen3": {"n_experts": 0},
    "mixtral": {**_SOFTMAX_ROUTING, "norm_top_k": True, "first_dense_layers": 0},
    "qwen3_moe": _SOFTMAX_ROUTING,
    "deepseek_v3": {},
}


def check_routing(spec: ModelSpec, kind: str) -> None:
    """Raises ConfigError if `kind`, the class of transformers, does not route as `spec` says."""
    needed = dict(_ROUTING[spec.family])
    if spec.family == "deepseek_v3" and spec.n_experts:
        needed["gate"] = "sigmoid"
        if not spec.n_shared_experts:
            raise ConfigError("model.n_shared_experts", 0, f"{kind} needs at least 1")
        if spec.n_experts < 2 * spec.expert_groups:
            raise ConfigError(
                "model.expert_groups", spec.expert_groups, f"{kind} needs 2 experts in each group"
            )
    for key, value in needed.items():
        if getattr(spec, key) != value:
            raise ConfigError(
                f"model.{key}", getattr(spec, key), f"{kind} computes {value!r} only; set that"
            )


def to_experts(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json about experts; none for a family without them."""
    dense_layers = spec.first_dense_layers if spec.n_experts else spec.layers
    if spec.family == "mixtral":
        return {
            "intermediate_size": spec.expert_ffn_hidden,
            "num_local_experts": spec.n_experts,
            "num_experts_per_tok": spec.top_k,
            "router_aux_loss_coef": spec.aux_loss,
        }
    if spec.family == "qwen3_moe":
        return {
            "moe_intermediate_size": spec.expert_ffn_hidden,
            "num_experts": spec.n_experts,
            "num_experts_per_tok": spec.top_k,
            "norm_topk_prob": spec.norm_top_k,
            "mlp_only_layers": list(range(dense_layers)),
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": spec.aux_loss,
        }
    if spec.family == "deepseek_v3":
        return {
            "moe_intermediate_size": spec.expert_ffn_hidden or spec.ffn_hidden,
            "n_routed_experts": spec.n_experts or 1,
            "num_experts_per_tok": spec.top_k or 1,
            "n_shared_experts": spec.n_shared_experts or 1,
            "first_k_dense_replace": dense_layers,
            "norm_topk_prob": spec.norm_top_k,
            "routed_scaling_factor": spec.routed_scaling,
            "n_group": spec.expert_groups,
            "topk_group": spec.top_k_groups,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return {}


def from_experts(config: Config, family: Family, where: str) -> dict[str, Any]:
    """Our fields of a config.json. Raises InputError if our decoder does not have this routing,
    KeyError if something is missing."""
    if family == "mixtral":
        return {
            "n_experts": config["num_local_experts"],
            "top_k": config["num_experts_per_tok"],
            "expert_ffn_hidden": config["intermediate_size"],
            "aux_loss": config.get("router_aux_loss_coef", 0.001),
        }
    if family == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        if dense != list(range(len(dense))):
            raise not_computed(where, "mlp_only_layers", dense)
        renamed = "num_local_experts" if "num_local_experts" in config else "num_experts"
        return {
            "n_experts": config[renamed],
            "top_k": config["num_experts_per_tok"],
            "expert_ffn_hidden": config["moe_intermediate_size"],
            "first_dense_layers": len(dense),
            "norm_top_k": config.get("norm_topk_prob", False),
            "aux_loss": config.get("router_aux_loss_coef", 0.001),
        }
    if family == "deepseek_v3" and config["first_k_dense_replace"] < config["num_hidden_layers"]:
        return {
            "n_experts": config["n_routed_experts"],
            "top_k": config["num_experts_per_tok"],
            "n_shared_experts": config["n_shared_experts"],
            "expert_ffn_hidden": config["moe_intermediate_size"],
            "first_dense_layers": config["first_k_dense_replace"],
            "gate": "sigmoid",
            "norm_top_k": config.get("norm_topk_prob", True),
            "routed_scaling": config["routed_scaling_factor"],
            "expert_groups": config["n_group"] or 1,
            "top_k_groups": config["topk_group"] or 1,
        }
    return {}
