"""The model of a published run, from the columns of its row and what its name says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.models.spec import ModelSpec

Row = Mapping[str, str]

# Two matrices in the feed-forward half (no gate).
PLAIN = ("gpt", "mpt", "bloom", "nemotron", "opt-", "t5")
# Layers that ModelSpec has no cost for: state spaces, new attention, vision towers, encoders.
UNKNOWN = (
    "mamba",
    "nemotron_3",
    "nemotron-3",
    "hyena",
    "esm",
    "imagen",
    "deepseekv4",
    "deepseek-v4",
    "glm",
    "gemma",
    "wan",
    "vlm",
    "vl-",
    "qwen3.",
    "qwen2.5-vl",
    "internvl",
    "lora",
    "llama4",
    "gdn",
    "kda",
    "bert",
    "t5",
    "clip",
    "perceiver",
)
# What a source names but does not spell out.
NAMED: dict[str, dict[str, int]] = {
    "internlm-7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008, "vocab": 103168,
    },
    "moonlight": {
        "layers": 27, "hidden": 2048, "heads": 16, "ffn_hidden": 11264, "vocab": 163840,
        "n_experts": 64, "top_k": 6, "expert_ffn_hidden": 1408,
    },
    "qwen3-32b": {
        "layers": 64, "hidden": 5120, "heads": 64, "kv_heads": 8, "ffn_hidden": 25600,
        "vocab": 151936, "head_dim": 128,
    },
    "qwen3-14b": {
        "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 8, "ffn_hidden": 17408,
        "vocab": 151936, "head_dim": 128,
    },
}  # fmt: skip
PACKED = 0.2  # assumed: five documents of equal length
LATENT = ("deepseek", "kimi", "moonlight")


def attention_share(name: str) -> float:
    """Share of scores that attention computes: half the layers of GPT-OSS look at 128 tokens, and
    fine-tuning packs several documents into a sequence that do not look at each other."""
    return 0.52 if "oss" in name.lower() else PACKED if "SFT" in name else 1.0


def spec_of(row: Row, seq_len: int, assumed: list[str]) -> ModelSpec:
    """The model of `row`; what it leaves open and is filled in goes to `assumed`. Raises ValueError
    with the reason where it cannot be told."""
    name = row["model"].lower()
    if found := next((word for word in UNKNOWN if word in name), None):
        raise ValueError(f"no cost model for the layers of {row['model']} ({found})")
    shape = _shape(row, name, assumed)
    keys = _moe_keys(shape, name) if shape.get("n_experts") else _dense_keys(shape, name, assumed)
    try:
        return ModelSpec(**{**keys, "max_seq_len": seq_len})
    except ValidationError as error:
        raise ValueError(f"model: {error.errors()[0]['msg']}") from error


def _shape(row: Row, name: str, assumed: list[str]) -> dict[str, int]:
    known = next((shape for key, shape in NAMED.items() if key in name), {})
    cells = {
        "layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads",
        "ffn_hidden": "ffn_hidden", "vocab": "vocab", "n_experts": "n_experts", "top_k": "top_k",
        "expert_ffn_hidden": "expert_ffn_hidden",
    }  # fmt: skip
    stated = {key: int(float(row[cell])) for key, cell in cells.items() if row.get(cell)}
    shape = {**known, **stated}
    for key in ("layers", "hidden", "heads"):
        if not shape.get(key):
            raise ValueError(f"{key} is not stated")
    if known and not stated.get("layers"):
        assumed.append("shape by the model's name")
    if not shape.get("vocab"):
        shape["vocab"] = 51200 if "gpt" in name else 32000
        assumed.append(f"vocab {shape['vocab']}")
    second_token = name.startswith(("deepseekv3", "deepseek-v3")) and "w/o mtp" not in name
    if second_token and "proxy" not in name and shape["layers"] == 61:
        shape["layers"] = 62  # and the layer that predicts a second token
    return shape


def _dense_keys(shape: dict[str, int], name: str, assumed: list[str]) -> dict[str, Any]:
    if not shape.get("ffn_hidden"):
        if "llama3" not in name or "moe" in name:
            raise ValueError("ffn_hidden is not stated")
        wide = int(1.3 * int(8 * shape["hidden"] / 3))
        shape["ffn_hidden"] = -(-wide // 256) * 256  # Llama's own rule
        assumed.append(f"ffn_hidden {shape['ffn_hidden']}")
    plain = any(word in name for word in PLAIN)
    grouped = shape.get("kv_heads", shape["heads"]) != shape["heads"]
    keys: dict[str, Any] = {**shape, "family": "gpt2" if plain and not grouped else "llama"}
    if plain and grouped:
        # No family has grouped-query attention and a plain feed-forward half: three matrices of
        # two thirds of its width have the same weights and products.
        keys["ffn_hidden"] = shape["ffn_hidden"] * 2 // 3
    keys["tie_embeddings"] = plain and "nemotron" not in name
    return keys


def _moe_keys(shape: dict[str, int], name: str) -> dict[str, Any]:
    if not shape.get("expert_ffn_hidden") or not shape.get("top_k"):
        raise ValueError("expert_ffn_hidden or top_k is not stated")
    keys: dict[str, Any] = dict(shape)
    if any(word in name for word in LATENT):
        lite = shape["hidden"] == 2048
        keys |= {"family": "deepseek_v3", "head_dim": 192, "qk_rope_head_dim": 64}
        keys |= {"v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 0 if lite else 1536}
        keys |= {"kv_heads": shape["heads"], "n_shared_experts": 2 if "v2" in name or lite else 1}
        keys["first_dense_layers"] = 3 if shape["layers"] > 60 and "kimi" not in name else 1
        return keys
    keys["family"] = "qwen3_moe" if "qwen" in name else "mixtral"
    if "qwen" in name:
        keys["head_dim"] = 128
    if "oss" in name:
        keys["head_dim"] = 64
    keys.pop("ffn_hidden", None)
    return keys
