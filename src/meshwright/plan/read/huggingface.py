"""`config.json` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.models.hf_config import from_config
from meshwright.plan.read.reading import Draft, Keys, Reading

# Where the fields that matter most stand, by the names that families give them.
_STANDS_AT = {
    "family": ("model_type",),
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "qk_nope_head_dim"),
    "ffn_hidden": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "tie_embeddings": ("tie_word_embeddings",),
    "rope_theta": ("rope_theta", "rope_parameters"),
    "rope_scaling": ("rope_scaling", "rope_parameters"),
    "rope_factor": ("rope_scaling", "rope_parameters"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "n_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "norm_top_k": ("norm_topk_prob",),
    "aux_loss": ("router_aux_loss_coef",),
    "expert_ffn_hidden": ("moe_intermediate_size", "intermediate_size"),
    "first_dense_layers": ("first_k_dense_replace", "mlp_only_layers"),
}


def read(raw: Mapping[str, Any], source: str, world: int | None) -> Reading:
    """The model; a config.json says nothing about how it is trained."""
    keys = Keys(raw, source)
    fields = from_config(keys, source).model_dump()
    draft = Draft(source, "huggingface", world)
    for name, value in fields.items():
        stands = [key for key in _STANDS_AT.get(name, ()) if raw.get(key) is not None]
        origin = f"{stands[0]} = {raw[stands[0]]!r}" if stands else "as transformers assumes"
        draft.put(f"model.{name}", value, origin)
    return draft.finished(keys)
