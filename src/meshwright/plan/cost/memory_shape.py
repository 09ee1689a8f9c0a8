"""What the memory of a model depends on: of each kind of layer its weights and what tokens leave.

A `MemoryShape` follows from a `ModelSpec`. Other frameworks run models that no `ModelSpec` is
(GELU beside rotary positions, squared ReLU, multi-token prediction): validation writes these down
as a `MemoryShape` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.framework import Framework


@dataclass(frozen=True)
class Element:
    """Bytes of an element that waits for the backward, and of one that is the input of a product;
    `again` is whether a product keeps an input of its own beside what attention keeps."""

    kept: float
    product: float

    @property
    def again(self) -> bool:
        return self.product < self.kept


@dataclass(frozen=True)
class Widths:
    """A layer: how wide its tensors are, for one token.

    `mixed` is what attention hands to its output product. The feed-forward half has `ffn` channels
    (the shared experts' in a routed layer), one expert `expert_ffn`.
    """

    hidden: int
    query: int
    keys: int
    values: int
    mixed: int
    gated: bool
    ffn: int
    expert_ffn: int = 0
    latents: int = 0
    qk_norm: bool = False


@dataclass(frozen=True)
class MemoryLayer:
    """One kind of layer.

    Weights: `split` are shared out by tp, `whole` stand on every tp rank, `expert` are those of one
    routed expert. Bytes that a token leaves: `outer_bytes` in one half outside its products, and
    `latent_bytes`, split only by sequence parallelism; `attention_bytes` and `mlp_bytes` inside,
    split by tp; `input_bytes` and `routed_bytes` at each expert that it goes to, of which etp
    splits the second. `work_bytes` is what the backward of the widest product has on top.
    """

    split: float
    whole: float
    expert: float
    outer_bytes: float
    latent_bytes: float
    attention_bytes: float
    mlp_bytes: float
    input_bytes: float
    routed_bytes: float
    work_bytes: float


@dataclass(frozen=True)
class MemoryShape:
    """A decoder; the first `dense_layers` of `layers` have no routed experts.

    `positions` and `norm` are the weights that only the first and the last stage have besides the
    tables. `predictions` are the layers of multi-token prediction after the last one. `head_layers`
    is how many layers cost as much as the head.
    """

    layers: int
    dense_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_width: int
    n_experts: int
    top_k: int
    dense: MemoryLayer
    moe: MemoryLayer
    tied: bool
    norm: float
    positions: float = 0.0
    dropout: bool = False
    predictions: int = 0
    head_layers: float = 0.0


def element(precision: str, framework: Framework) -> Element:
    """Bytes of elements that wait for the backward."""
    kept = 4.0 if precision == "fp32" else 2.0
    low = precision in ("fp8", "fp4") and framework.fp8_inputs
    return Element(kept, 1.0 if low else kept)


def memory_layer(
    widths: Widths, framework: Framework, size: Element, weights: tuple[float, float, float]
) -> MemoryLayer:
    """One kind of layer, with `weights` (split by tp, whole, of one expert).

    What is kept follows arXiv 2205.05198 section 4, generalised to gated halves, grouped queries
    and latents, and without what flash attention makes again: the input and the normed input of
    both halves, q, k, v and what attention gives, both sides of the activation function; of a
    latent both sides of its norm. An expert's token leaves its input, both sides of the activation
    function and its output.
    """
    tensors = framework.gated_tensors if widths.gated else framework.plain_tensors
    before = tensors - 1
    inside = before * size.kept + size.product
    again = framework.attention_extra + widths.qk_norm
    attention = (1 + again) * (widths.query + widths.keys) + widths.values + widths.mixed
    hidden = widths.hidden
    outer = (framework.norm_tensors - 1) * size.kept + size.product
    into = 2 if widths.gated else 1
    routed = bool(widths.expert_ffn)
    outputs = framework.expert_outputs * size.kept * hidden
    return MemoryLayer(
        split=weights[0],
        whole=weights[1],
        expert=weights[2],
        outer_bytes=outer * hidden,
        latent_bytes=2 * widths.latents * size.kept,
        attention_bytes=attention * size.kept + size.again * widths.mixed * size.product,
        mlp_bytes=inside * widths.ffn,
        input_bytes=size.product * hidden * routed,
        routed_bytes=(outputs + inside * widths.expert_ffn) * routed,
        work_bytes=(into + 1) * widths.ffn * size.kept,
    )


def memory_shape(spec: ModelSpec, framework: Framework, precision: str) -> MemoryShape:
    """The shape of `spec` as `framework` runs it in `precision`."""
    size = element(precision, framework)
    dense_layers = sum(not spec.is_moe(layer) for layer in range(spec.layers))
    dense = memory_layer(_widths(spec, False), framework, size, _weights(spec, False))
    moe = dense
    if dense_layers < spec.layers:
        moe = memory_layer(_widths(spec, True), framework, size, _weights(spec, True))
    table = spec.vocab * spec.hidden
    return MemoryShape(
        layers=spec.layers,
        dense_layers=dense_layers,
        hidden=spec.hidden,
        vocab=spec.vocab,
        heads=spec.heads,
        kv_width=spec.query_dim + spec.value_dim if spec.latent_attention else 2 * spec.kv_dim,
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        dense=dense,
        moe=moe,
        tied=spec.tie_embeddings,
        norm=spec.hidden * (2 if spec.family == "gpt2" else 1),
        positions=spec.embedding_params - table,
        dropout=spec.dropout > 0 or framework.dropout,
        head_layers=spec.head_flops / spec.layer_flops(spec.layers - 1, 2048),
    )


def _widths(spec: ModelSpec, routed: bool) -> Widths:
    latent = spec.latent_attention
    return Widths(
        hidden=spec.hidden,
        query=spec.query_dim,
        keys=spec.query_dim if latent else spec.kv_dim,
        values=spec.value_dim if latent else spec.kv_dim,
        mixed=spec.value_dim,
        gated=spec.family != "gpt2",
        ffn=spec.n_shared_experts * spec.expert_ffn_hidden if routed else spec.ffn_hidden,
        expert_ffn=spec.expert_ffn_hidden if routed else 0,
        latents=spec.q_lora_rank + spec.kv_lora_rank + spec.rope_dim if latent else 0,
        qk_norm=spec.qk_norm,
    )


def _weights(spec: ModelSpec, routed: bool) -> tuple[float, float, float]:
    """(Split by tp, whole on every tp rank, of one routed expert). Norms, routers and the way down
    to a latent are whole, and so are biases that are added after a sum over tp."""
    layer = spec.layers - 1 if routed else 0
    total = spec.params_of_layer(layer)
    if not routed and spec.is_moe(layer):  # every layer is routed
        return 0.0, 0.0, 0.0
    whole = total - spec.matmul_params_of_layer(layer)
    if spec.family == "gpt2":
        whole -= spec.query_dim + 2 * spec.kv_dim + spec.ffn_hidden
    if spec.latent_attention:
        whole += spec.hidden * (spec.q_lora_rank + spec.kv_lora_rank + spec.rope_dim)
    experts = spec.n_experts * spec.expert_params if routed else 0
    whole += spec.hidden * spec.n_experts if routed else 0
    return total - whole - experts, whole, spec.expert_params if routed else 0.0
