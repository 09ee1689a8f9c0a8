"""The model of a Megatron-LM command line, as a shape of the memory model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.plan.cost.framework import Framework
from meshwright.plan.cost.memory_shape import Element, MemoryShape, Widths, element, memory_layer

# Rows of the tokenizer's vocabulary, where the arguments name only a file: by the case's name.
VOCABULARIES = {"15b_8t": 256000, "mixtral_8x7b": 32000, "8x22b": 32768, "deepseekv3": 129280}
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Arguments:
    """Options of a command line, by their names without dashes."""

    raw: Mapping[str, Any]

    def text(self, name: str) -> str:
        """The value; empty where the option is not given."""
        value = self.raw.get(f"--{name}")
        return "" if value is None or value is False else str(value)

    def flag(self, name: str) -> bool:
        """Whether the option is on."""
        return self.text(name) not in ("", "False", "false")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number. Raises ValueError where it is not given and has no default."""
        text = self.text(name)
        if not text and default is None:
            raise ValueError(f"--{name} is not given")
        try:
            return int(float(text)) if text else int(default or 0)
        except ValueError as error:
            raise ValueError(f"--{name} {text} is no number") from error

    def number(self, name: str, default: float) -> float:
        """A number."""
        return float(self.text(name) or default)


def megatron_shape(
    case: str, a: Arguments, framework: Framework, precision: str, fp32: bool
) -> MemoryShape:
    """The decoder that the options describe (`megatron/training/arguments.py` has the defaults)."""
    hidden, layers = a.count("hidden-size"), a.count("num-layers")
    experts = a.count("num-experts", 0)
    size = Element(4.0, 1.0) if fp32 and precision == "fp8" else element(precision, framework)
    plain = _widths(a, 0)
    dense = memory_layer(plain, framework, size, _weights(a, plain))
    moe, first = dense, layers
    if experts:
        routed = _widths(a, a.count("moe-ffn-hidden-size", plain.ffn))
        moe = memory_layer(routed, framework, size, _weights(a, routed))
        first = _leading_dense(a.text("moe-layer-freq"))
    learned = a.text("position-embedding-type") in ("", "learned_absolute")
    known = next((rows for name, rows in VOCABULARIES.items() if name in case), GPT2_VOCABULARY)
    return MemoryShape(
        layers=layers,
        dense_layers=first,
        hidden=hidden,
        vocab=a.count("vocab-size", known),
        heads=a.count("num-attention-heads"),
        kv_width=plain.keys + plain.values,
        n_experts=experts,
        top_k=a.count("moe-router-topk", 2) if experts else 0,
        dense=dense,
        moe=moe,
        tied=not a.flag("untie-embeddings-and-output-weights"),
        norm=hidden * _norm_tensors(a),
        positions=a.count("max-position-embeddings") * hidden if learned else 0,
        dropout=a.number("hidden-dropout", 0.1) > 0,
        predictions=a.count("mtp-num-layers", 0),
    )


def _leading_dense(pattern: str) -> int:
    """Dense layers before the first routed one: `([0]*3+[1]*11)`."""
    found = re.match(r"\(?\[0\]\*(\d+)", pattern)
    return int(found[1]) if found else 0


def _norm_tensors(a: Arguments) -> int:
    return 1 if a.text("normalization") == "RMSNorm" else 2


def _widths(a: Arguments, expert_ffn: int) -> Widths:
    hidden, heads = a.count("hidden-size"), a.count("num-attention-heads")
    gated = a.flag("swiglu")
    ffn = a.count("ffn-hidden-size", int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    if expert_ffn:
        ffn = a.count("moe-shared-expert-intermediate-size", 0)
    latents, (query, keys, values) = 0, _heads(a, heads, hidden)
    if a.flag("multi-latent-attention"):
        latents = a.count("q-lora-rank", 0) + a.count("kv-lora-rank", 32)
        latents += a.count("qk-pos-emb-head-dim", 64)
    mixed = values if latents else query
    norms = a.flag("qk-layernorm") and not latents
    return Widths(
        hidden, query, keys, values, mixed, gated, ffn, expert_ffn, latents, qk_norm=norms
    )


def _heads(a: Arguments, heads: int, hidden: int) -> tuple[int, int, int]:
    if a.flag("multi-latent-attention"):
        query = heads * (a.count("qk-head-dim", 128) + a.count("qk-pos-emb-head-dim", 64))
        return query, query, heads * a.count("v-head-dim", 128)
    channels = a.count("kv-channels", hidden // heads)
    groups = a.count("num-query-groups", heads) if a.flag("group-query-attention") else heads
    return heads * channels, groups * channels, groups * channels


def _weights(a: Arguments, w: Widths) -> tuple[float, float, float]:
    """(Split by tp, whole on every tp rank, of one expert)."""
    into = 2 if w.gated else 1
    split, whole = _attention_weights(a, w)
    split += (into + 1) * w.hidden * w.ffn
    whole += 2 * w.hidden * _norm_tensors(a)
    if not a.flag("disable-bias-linear"):
        split += w.query + w.keys + w.values + into * w.ffn
        whole += 2 * w.hidden
    if w.expert_ffn:
        whole += w.hidden * a.count("num-experts")
    return split, whole, (into + 1) * w.hidden * w.expert_ffn


def _attention_weights(a: Arguments, w: Widths) -> tuple[float, float]:
    if not w.latents:
        return w.hidden * (w.query + w.keys + w.values) + w.mixed * w.hidden, 0.0
    q_rank, kv_rank = a.count("q-lora-rank", 0), a.count("kv-lora-rank", 32)
    up = kv_rank * (a.count("num-attention-heads") * a.count("qk-head-dim", 128) + w.values)
    queries = (q_rank or w.hidden) * w.query
    return queries + up + w.mixed * w.hidden, w.hidden * w.latents + q_rank + kv_rank
