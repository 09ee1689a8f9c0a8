"""Attention in bytes: grouped-query and latent, over whole sequences or parts of them."""

from __future__ import annotations

from meshwright.plan.own_context import ring, ulysses
from meshwright.plan.own_layers import Layer, split, whole
from meshwright.plan.own_tape import Block, Value


def attention(layer: Layer, x: Value, rope: Block | None) -> Value:
    """The first half of a layer, with its residual."""
    spec, rows = layer.rank.spec, layer.outside
    inner = latent if spec.latent_attention else grouped
    out = inner(layer, layer.norm(x, "attn_norm", rows, spec.hidden), rope)
    return layer.add(x, out, layer.size * rows * spec.hidden)


def grouped(layer: Layer, x: Value, rope: Block | None) -> Value:
    """Grouped-query attention."""
    spec, tp, t = layer.rank.spec, layer.rank.layout.tp, layer.tokens
    inside = layer.enter(x, spec.hidden)
    wide, narrow = spec.query_dim // tp, spec.kv_dim // tp
    sizes = {"wq": wide, "wk": narrow, "wv": narrow}
    made = []
    for key, out in sizes.items():
        y = layer.linear(inside, f"attn.{key}", t, spec.hidden, out)
        made.append(layer.add_bias(y, f"attn.{key}", t, out) if spec.family == "gpt2" else y)
        del y
    q, k, v = made
    del made
    if spec.qk_norm:
        q, k = (
            layer.norm(y, f"attn.{key}", t * n // spec.head_dim, spec.head_dim)
            for y, key, n in ((q, "q_norm", wide), (k, "k_norm", narrow))
        )
    if rope is not None:
        q, k = rotate(layer, q, t * wide, rope), rotate(layer, k, t * narrow, rope)
    mixed = attend(layer, q, k, v, (wide, narrow, narrow, wide))
    return project_out(layer, mixed, wide)


def project_out(layer: Layer, mixed: Value, width: int) -> Value:
    """The output projection."""
    hidden, gpt2 = layer.rank.spec.hidden, layer.rank.spec.family == "gpt2"
    out = layer.leave(layer.linear(mixed, "attn.wo", layer.tokens, width, hidden), hidden)
    return layer.add_bias(out, "attn.wo", layer.outside, hidden) if gpt2 else out


def rotate(layer: Layer, x: Value, numel: int, rope: Block) -> Value:
    """Rotary positions on `numel` numbers."""
    size, kept = layer.size, [rope]
    wide = layer.new(4 * numel) if size == 2 else None
    halves = [layer.new(2 * numel) for _ in range(3)][2:]
    halves += [layer.new(2 * numel) for _ in range(3)][2:]
    turned = layer.new(4 * numel)
    halves.clear()
    out = layer.new(size * numel) if size == 2 else turned
    del wide, turned

    def run(grad: Block) -> list[Block | None]:
        full = layer.new(4 * numel) if size == 2 else grad
        del grad
        parts = [layer.new(2 * numel) for _ in range(3)]
        parts.append(layer.new(2 * numel))
        del full
        parts = [layer.new(2 * numel) for _ in range(2)]
        joined = layer.new(4 * numel)
        parts.clear()
        kept.clear()
        return [layer.new(size * numel) if size == 2 else joined]

    return layer.graph.make(0, [x], run, reuse=out)


def attend(layer: Layer, q: Value, k: Value, v: Value, widths: tuple[int, int, int, int]) -> Value:
    """Attention of this rank's queries; `widths` of q, k, v as it is stored, and output."""
    layout = layer.rank.layout
    if layout.cp == 1:
        return whole(layer, q, k, v, widths[:3])
    if layout.cp_method == "ulysses":
        return ulysses(layer, q, k, v)
    n_bytes = layer.size * layer.tokens * widths[3]  # heads come first: they are copied behind
    return layer.keeping(n_bytes, [ring(layer, q, k, v)], [], [0])


def latent(layer: Layer, x: Value, rope: Block | None) -> Value:
    """Multi-head latent attention."""
    spec, tp, t, size = layer.rank.spec, layer.rank.layout.tp, layer.tokens, layer.size
    rows, h, rank_kv = layer.outside, spec.hidden, spec.kv_lora_rank
    inside, widths = _latents(layer, x, rows)
    heads, plain = spec.heads // tp, spec.head_dim - spec.rope_dim
    q_width, kv_width = heads * spec.head_dim, heads * (plain + spec.value_head_dim)
    queries, latent, shared = inside
    del inside
    key, n_in = ("attn.wq_up", spec.q_lora_rank) if spec.q_lora_rank else ("attn.wq", h)
    kv = layer.linear(latent, "attn.wkv_up", t, rank_kv, kv_width)
    q_raw = layer.linear(queries, key, t, n_in, q_width)
    assert rope is not None
    q_rope = rotate(layer, q_raw, t * heads * spec.rope_dim, rope)
    k_rope = rotate(layer, shared, t * spec.rope_dim, rope)
    q = layer.keeping(size * t * q_width, [q_raw, q_rope], [], [size * t * q_width, 0])
    k = layer.keeping(
        size * t * q_width, [kv, k_rope], [], [size * t * kv_width, size * t * spec.rope_dim]
    )
    del widths
    v_width = heads * spec.value_head_dim
    mixed = attend(layer, q, k, kv, (q_width, q_width, v_width, v_width))
    return layer.leave(layer.linear(mixed, "attn.wo", t, v_width, h), h)


def _latents(layer: Layer, x: Value, rows: int) -> tuple[list[Value], list[int]]:
    spec, h, size = layer.rank.spec, layer.rank.spec.hidden, layer.size
    both = spec.kv_lora_rank + spec.rope_dim
    down = layer.linear(x, "attn.wkv_down", rows, h, both)
    queries, q_width = x, h
    if spec.q_lora_rank:
        q_width = spec.q_lora_rank
        raw = layer.linear(x, "attn.wq_down", rows, h, q_width)
        queries = layer.norm(raw, "attn.q_down_norm", rows, q_width)
    latent = layer.norm(down, "attn.kv_down_norm", rows, spec.kv_lora_rank)
    widths = [q_width, spec.kv_lora_rank, spec.rope_dim]
    cat = layer.keeping(
        size * rows * sum(widths),
        [queries, latent, down],
        [],
        [size * rows * w for w in widths],
    )
    del queries, latent, down
    entered = layer.enter(cat, sum(widths))
    whole = size * layer.tokens * sum(widths)

    def run(grads: list[Block]) -> list[Block | None]:
        out = layer.new(whole)
        grads.clear()
        return [out]

    return split(layer.graph, [entered.block] * 3, [entered], run), widths
