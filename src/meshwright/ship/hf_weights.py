"""Our parameter names beside those of Hugging Face, and the two layouts of the same numbers.

Names and shapes follow `LlamaForCausalLM` and `GPT2LMHeadModel` of transformers. Rotary positions
use the half-rotation convention on both sides, so no rows change places. GPT-2 stores its matrices
as Conv1D, [in, out], and query, key and value as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.models.spec import ModelSpec

Array = NDArray[np.float32]
Read = Callable[[str], Array]
Shape = tuple[int, ...]

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Part:
    """One of our parameters; shape in the convention of torch, [out, in]."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Weight:
    """One tensor of a Hugging Face model: our `parts` stacked along the first axis, and then
    transposed if it is a Conv1D matrix."""

    hf_name: str
    parts: tuple[Part, ...]
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        """Shape on the side of Hugging Face."""
        first = self.parts[0].shape
        stacked = (sum(part.shape[0] for part in self.parts), *first[1:])
        return stacked[::-1] if self.transposed else stacked

    @property
    def size_bytes(self) -> int:
        """Size in fp32."""
        return FLOAT32_BYTES * prod(self.shape)

    def pack(self, read: Read) -> Array:
        """The tensor from our parameters, contiguous fp32.

        Raises CheckpointError naming a parameter whose shape is not that of the model.
        """
        arrays = []
        for part in self.parts:
            array = read(part.name)
            if array.shape != part.shape:
                raise CheckpointError(
                    f"{part.name}: shape {array.shape}, the model has {part.shape}; "
                    "export with the [model] that was trained"
                )
            arrays.append(array)
        stacked = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(stacked.T if self.transposed else stacked, dtype=np.float32)

    def unpack(self, packed: Array, name: str) -> Array:
        """Our parameter `name`, one of the parts, out of the tensor."""
        stacked = packed.T if self.transposed else packed
        start = 0
        for part in self.parts:
            if part.name == name:
                return np.ascontiguousarray(stacked[start : start + part.shape[0]])
            start += part.shape[0]
        raise KeyError(name)


def hf_weights(spec: ModelSpec) -> list[Weight]:
    """Every tensor of the Hugging Face model of `spec`, in the order of the forward pass. A tied
    head is not among them, on either side."""
    return list(_llama(spec) if spec.family == "llama" else _gpt2(spec))


def _llama(spec: ModelSpec) -> Iterator[Weight]:
    h, q, kv, f = spec.hidden, spec.query_dim, spec.kv_dim, spec.ffn_hidden
    layer: list[tuple[str, str, Shape]] = [
        ("input_layernorm.weight", "attn_norm.weight", (h,)),
        ("self_attn.q_proj.weight", "attn.wq.weight", (q, h)),
        ("self_attn.k_proj.weight", "attn.wk.weight", (kv, h)),
        ("self_attn.v_proj.weight", "attn.wv.weight", (kv, h)),
        ("self_attn.o_proj.weight", "attn.wo.weight", (h, q)),
        ("post_attention_layernorm.weight", "mlp_norm.weight", (h,)),
        ("mlp.gate_proj.weight", "mlp.gate.weight", (f, h)),
        ("mlp.up_proj.weight", "mlp.up.weight", (f, h)),
        ("mlp.down_proj.weight", "mlp.down.weight", (h, f)),
    ]
    yield _single("model.embed_tokens.weight", "embed.weight", (spec.vocab, h))
    for i in range(spec.layers):
        for theirs, ours, shape in layer:
            yield _single(f"model.layers.{i}.{theirs}", f"layers.{i}.{ours}", shape)
    yield _single("model.norm.weight", "norm.weight", (h,))
    yield from _head(spec)


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


def _single(theirs: str, ours: str, shape: Shape) -> Weight:
    return Weight(theirs, (Part(ours, shape),))


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
