"""Our parameter names beside those of Hugging Face.

Names and shapes follow the classes of transformers that `hf_config.ARCHITECTURES` names, as they
stand in files: experts one by one, where ours are stacked. Rotary positions use the half-rotation
convention on both sides, but for DeepSeek-V3, whose rotary channels stand in pairs. GPT-2 stores
its matrices as Conv1D, [in, out], and query, key and value as one.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.spec import ModelSpec
from meshwright.ship.hf_tensors import Array, Pairs, Part, Read, Shape, Weight

__all__ = ["Array", "Read", "Weight", "bias_names", "hf_weights"]

_SWIGLU = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
_MIXTRAL_SWIGLU = (("w1", "gate"), ("w3", "up"), ("w2", "down"))


def hf_weights(spec: ModelSpec) -> list[Weight]:
    """Every tensor of the Hugging Face model of `spec`, in the order of the forward pass. A tied
    head is not among them, on either side."""
    return list(_gpt2(spec) if spec.family == "gpt2" else _decoder(spec))


def bias_names(spec: ModelSpec) -> list[str]:
    """Names of the routing biases [n_experts], which are state and no parameters of ours, that the
    Hugging Face model of `spec` has too."""
    if spec.family != "deepseek_v3":
        return []
    return [f"layers.{i}.mlp.router.bias" for i in range(spec.layers) if spec.is_moe(i)]


def _decoder(spec: ModelSpec) -> Iterator[Weight]:
    h = spec.hidden
    yield _single("model.embed_tokens.weight", "embed.weight", (spec.vocab, h))
    for i in range(spec.layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        yield _single(f"{theirs}.input_layernorm.weight", f"{ours}.attn_norm.weight", (h,))
        attention = _latent_attention if spec.latent_attention else _attention
        yield from attention(spec, f"{theirs}.self_attn", f"{ours}.attn")
        yield _single(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (h,))
        if spec.is_moe(i):
            yield from _experts(spec, theirs, f"{ours}.mlp")
        else:
            yield from _swiglu(spec, f"{theirs}.mlp", f"{ours}.mlp", spec.ffn_hidden)
    yield _single("model.norm.weight", "norm.weight", (h,))
    yield from _head(spec)


def _attention(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    h, q, kv = spec.hidden, spec.query_dim, spec.kv_dim
    yield _single(f"{theirs}.q_proj.weight", f"{ours}.wq.weight", (q, h))
    yield _single(f"{theirs}.k_proj.weight", f"{ours}.wk.weight", (kv, h))
    yield _single(f"{theirs}.v_proj.weight", f"{ours}.wv.weight", (kv, h))
    yield _single(f"{theirs}.o_proj.weight", f"{ours}.wo.weight", (h, q))
    if spec.qk_norm:
        for norm in ("q_norm.weight", "k_norm.weight"):
            yield _single(f"{theirs}.{norm}", f"{ours}.{norm}", (spec.head_dim,))


def _latent_attention(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    h, q, q_rank, kv_rank = spec.hidden, spec.query_dim, spec.q_lora_rank, spec.kv_lora_rank
    rotary = spec.rope_dim
    heads = Pairs(spec.head_dim, rotary)
    if q_rank:
        yield _single(f"{theirs}.q_a_proj.weight", f"{ours}.wq_down.weight", (q_rank, h))
        yield _single(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_down_norm.weight", (q_rank,))
        yield _single(f"{theirs}.q_b_proj.weight", f"{ours}.wq_up.weight", (q, q_rank), heads)
    else:
        yield _single(f"{theirs}.q_proj.weight", f"{ours}.wq.weight", (q, h), heads)
    down, up = kv_rank + rotary, spec.heads * (spec.head_dim - rotary) + spec.value_dim
    down_pairs = Pairs(down, rotary)
    kv_a = f"{theirs}.kv_a_proj_with_mqa.weight"
    yield _single(kv_a, f"{ours}.wkv_down.weight", (down, h), down_pairs)
    yield _single(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_down_norm.weight", (kv_rank,))
    yield _single(f"{theirs}.kv_b_proj.weight", f"{ours}.wkv_up.weight", (up, kv_rank))
    yield _single(f"{theirs}.o_proj.weight", f"{ours}.wo.weight", (h, spec.value_dim))


def _swiglu(spec: ModelSpec, theirs: str, ours: str, width: int) -> Iterator[Weight]:
    for hf_name, name in _SWIGLU:
        shape = (spec.hidden, width) if name == "down" else (width, spec.hidden)
        yield _single(f"{theirs}.{hf_name}.weight", f"{ours}.{name}.weight", shape)


def _experts(spec: ModelSpec, layer: str, ours: str) -> Iterator[Weight]:
    """Router, routed experts one matrix of all after the other, shared experts."""
    mixtral = spec.family == "mixtral"
    theirs = f"{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
    count, h, f = spec.n_experts, spec.hidden, spec.expert_ffn_hidden
    yield _single(f"{theirs}.gate.weight", f"{ours}.router.weight", (count, h))
    if spec.family == "deepseek_v3":
        bias = f"{theirs}.gate.e_score_correction_bias"
        yield _single(bias, f"{ours}.router.bias", (count,))
    for hf_name, name in _MIXTRAL_SWIGLU if mixtral else _SWIGLU:
        shape = (h, f) if name == "down" else (f, h)
        for expert in range(count):
            part = Part(f"{ours}.experts.{name}", shape, expert, count)
            yield Weight(f"{theirs}.experts.{expert}.{hf_name}.weight", (part,))
    if spec.n_shared_experts:
        shared = f"{theirs}.shared_experts"
        yield from _swiglu(spec, shared, f"{ours}.shared", spec.n_shared_experts * f)


def _gpt2(spec: ModelSpec) -> Iterator[Weight]:
    h, f = spec.hidden, spec.ffn_hidden
    yield _single("transformer.wte.weight", "embed.weight", (spec.vocab, h))
    yield _single("transformer.wpe.weight", "positions.weight", (spec.max_seq_len, h))
    for i in range(spec.layers):
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        yield from _layer_norm(f"{theirs}.ln_1", f"{ours}.attn_norm", h)
        qkv = [f"{ours}.attn.{name}" for name in ("wq", "wk", "wv")]
        yield from _conv1d(f"{theirs}.attn.c_attn", qkv, (spec.query_dim, h))
        yield from _conv1d(f"{theirs}.attn.c_proj", [f"{ours}.attn.wo"], (h, spec.query_dim))
        yield from _layer_norm(f"{theirs}.ln_2", f"{ours}.mlp_norm", h)
        yield from _conv1d(f"{theirs}.mlp.c_fc", [f"{ours}.mlp.up"], (f, h))
        yield from _conv1d(f"{theirs}.mlp.c_proj", [f"{ours}.mlp.down"], (h, f))
    yield from _layer_norm("transformer.ln_f", "norm", h)
    yield from _head(spec)


def _single(theirs: str, ours: str, shape: Shape, pairs: Pairs | None = None) -> Weight:
    return Weight(theirs, (Part(ours, shape),), pairs=pairs)


def _layer_norm(theirs: str, ours: str, hidden: int) -> Iterator[Weight]:
    for kind in ("weight", "bias"):
        yield _single(f"{theirs}.{kind}", f"{ours}.{kind}", (hidden,))


def _conv1d(theirs: str, ours: list[str], shape: Shape) -> Iterator[Weight]:
    """A Conv1D with its bias; each of `ours` is a Linear of `shape` [out, in]."""
    weights = tuple(Part(f"{name}.weight", shape) for name in ours)
    biases = tuple(Part(f"{name}.bias", shape[:1]) for name in ours)
    yield Weight(f"{theirs}.weight", weights, transposed=True)
    yield Weight(f"{theirs}.bias", biases)


def _head(spec: ModelSpec) -> Iterator[Weight]:
    if not spec.tie_embeddings:
        yield _single("lm_head.weight", "head.weight", (spec.vocab, spec.hidden))
