"""The model that Megatron-LM's arguments describe."""

from __future__ import annotations

from meshwright.plan.read.megatron_experts import dense_layers, put, put_experts
from meshwright.plan.read.megatron_rope import put_rope
from meshwright.plan.read.reading import Draft, Keys

# Our key, the argument, and what Megatron assumes (None: nothing, or something worked out below).
_COUNTS = (
    ("layers", "num-layers", None),
    ("hidden", "hidden-size", None),
    ("heads", "num-attention-heads", None),
    ("max_seq_len", "max-position-embeddings", None),
)
_LATENTS = (
    ("kv_lora_rank", "kv-lora-rank", 32),
    ("qk_rope_head_dim", "qk-pos-emb-head-dim", 64),
    ("v_head_dim", "v-head-dim", 128),
)


def put_model(keys: Keys, draft: Draft) -> None:
    """Everything of ModelSpec that the arguments give."""
    for ours, name, default in _COUNTS:
        put(keys, draft, ours, name, keys.count(name, default))
    family = _family(keys)
    if family is None:
        fix = "experts without --swiglu are of no family here; add --swiglu if they are gated"
        draft.problems["num-experts"] = fix
    draft.put("model.family", family, _family_origin(keys))
    tied = not keys.get("untie-embeddings-and-output-weights", False)
    draft.put("model.tie_embeddings", tied, "--untie-embeddings-and-output-weights")
    _put_widths(keys, draft)
    _put_vocab(keys, draft)
    if family != "gpt2":
        put_rope(keys, draft)
    put(keys, draft, "norm_eps", "norm-epsilon", keys.number("norm-epsilon", 1e-5))
    put(keys, draft, "dropout", "hidden-dropout", keys.number("hidden-dropout", 0.1))
    if family == "deepseek_v3":
        _put_latents(keys, draft)
    if "num-experts" in keys:
        put_experts(keys, draft)
    if keys.count("mtp-num-layers", 0, least=0):
        draft.notes.append("--mtp-num-layers: the model is read without its extra layers")


def _family(keys: Keys) -> str | None:
    gated, experts = bool(keys.get("swiglu")), "num-experts" in keys
    normed = bool(keys.get("qk-layernorm"))
    if keys.get("multi-latent-attention"):
        return "deepseek_v3"
    if not gated:
        return None if experts else "gpt2"
    if experts and normed:
        return "qwen3_moe"
    shared = "moe-shared-expert-intermediate-size" in keys
    if experts and not shared and dense_layers(keys) == 0:
        return "mixtral"
    return "qwen3" if normed else "llama"


def _family_origin(keys: Keys) -> str:
    names = ("multi-latent-attention", "swiglu", "qk-layernorm", "normalization", "num-experts")
    said = [f"--{name}" for name in names if keys.get(name)]
    keys.get("position-embedding-type")
    return " ".join(said) or "no --swiglu"


def _put_widths(keys: Keys, draft: Draft) -> None:
    hidden = draft.model.get("hidden")
    default = None
    if hidden:
        # Megatron makes a gated layer narrower, to keep its weights, in steps of 64.
        default = int(4 * hidden * 2 / 3 / 64) * 64 if keys.get("swiglu") else 4 * hidden
    name = "ffn-hidden-size"
    put(keys, draft, "ffn_hidden", name, keys.count(name, default))
    if "kv-channels" in keys:
        put(keys, draft, "head_dim", "kv-channels", keys.count("kv-channels"))
    if keys.get("group-query-attention"):
        name = "num-query-groups"
        put(keys, draft, "kv_heads", name, keys.count(name, 1))


def _put_vocab(keys: Keys, draft: Draft) -> None:
    """The table is padded to a multiple of 128 x tp rows, or of what was asked for in its place."""
    name = "padded-vocab-size" if "padded-vocab-size" in keys else "vocab-size"
    vocab = keys.count(name)
    if vocab is None:
        draft.notes.append("vocabulary unknown: it is the tokenizer's; give model.vocab")
        return
    multiple = (keys.count("make-vocab-size-divisible-by", 128) or 128) * draft.layout["tp"]
    padded = -(-vocab // multiple) * multiple
    if padded != vocab:
        draft.notes.append(f"vocabulary {vocab} padded to {padded}, a multiple of {multiple}")
    draft.put("model.vocab", padded, f"--{name} {vocab}")


def _put_latents(keys: Keys, draft: Draft) -> None:
    for ours, name, default in _LATENTS:
        put(keys, draft, ours, name, keys.count(name, default))
    if "q-lora-rank" in keys:
        put(keys, draft, "q_lora_rank", "q-lora-rank", keys.count("q-lora-rank"))
    plain = keys.count("qk-head-dim", 128) or 128
    # Ours counts the channels that rotate too.
    width = plain + draft.model["qk_rope_head_dim"]
    draft.put("model.head_dim", width, f"--qk-head-dim {plain} + --qk-pos-emb-head-dim")
    draft.model.pop("kv_heads", None)
