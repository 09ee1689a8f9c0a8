"""Context parallelism in bytes: keys and values round a ring, or sequence for heads."""

from __future__ import annotations

from math import lcm

from meshwright.plan.own_layers import Layer, split, whole
from meshwright.plan.own_tape import Block, Value


def ulysses(layer: Layer, q: Value, k: Value, v: Value) -> Value:
    """Sequence for heads, and back."""
    rank, spec, cp = layer.rank, layer.rank.spec, layer.rank.layout.cp
    heads, dim, v_dim = spec.heads // rank.layout.tp, spec.head_dim, spec.value_head_dim
    kv = heads if spec.latent_attention else spec.kv_heads // rank.layout.tp
    more, t, size = lcm(kv, cp), layer.tokens, layer.size
    if more > kv:
        k, v = (
            layer.keeping(size * t * more * d, [y], [], [size * t * kv * d])
            for y, d in ((k, dim), (v, v_dim))
        )
    there = [size * t * n for n in (heads * dim, more * dim, more * v_dim)]
    parts = _exchange(layer, there, [q, k, v])
    widths = (heads * dim // cp, more * dim // cp, more * v_dim // cp)
    q, k, v = parts
    del parts
    mixed = whole(layer, q, k, v, widths)
    del q, k, v
    (out,) = _exchange(layer, [size * t * heads * v_dim], [mixed])
    return out


def _exchange(layer: Layer, sizes: list[int], values: list[Value]) -> list[Value]:
    leaving = layer.new(sum(sizes))
    arriving = layer.new(sum(sizes))
    layer.rank.say("cp", "all_to_all", sum(sizes), leaving, arriving)
    del leaving
    blocks = [layer.new(n) for n in sizes]

    def run(grads: list[Block]) -> list[Block | None]:
        there, here = layer.new(sum(sizes)), layer.new(sum(sizes))
        layer.rank.say("cp", "all_to_all", sum(sizes), there, here)
        del there
        grads.clear()
        return [layer.new(n) for n in sizes]

    return split(layer.graph, blocks, values, run)


def ring(layer: Layer, q: Value, k: Value, v: Value) -> Value:
    """Keys and values round the ring."""
    rank, spec = layer.rank, layer.rank.spec
    t, size, heads = layer.tokens, layer.size, spec.heads // rank.layout.tp
    kv = heads if spec.latent_attention else spec.kv_heads // rank.layout.tp
    numel_kv = t * kv * (spec.head_dim + spec.value_head_dim)
    numel_q = t * heads * spec.head_dim
    numel_out = t * heads * spec.value_head_dim
    _ring_pass(layer, size * numel_kv, None)
    held, wide = layer.new(size * numel_kv), layer.new(4 * numel_out)
    sums = layer.new(4 * t * heads)
    arriving, block = layer.new(size * numel_kv), layer.new((4 + size) * numel_out)
    del arriving, block, held
    out = layer.new(size * numel_out) if size == 2 else wide
    del wide
    kept = [q.block, k.block, v.block, out, sums]

    def run(grad: Block) -> list[Block | None]:
        held, dq = layer.new(size * numel_kv), layer.new(4 * numel_q)
        _ring_pass(layer, size * numel_kv, 4 * numel_kv)
        home, added = layer.new(4 * numel_kv), layer.new(4 * numel_kv)
        coming = [layer.new(4 * numel_kv), layer.new(size * numel_kv)]
        block = layer.new(size * (numel_q + numel_kv + numel_out) / 2)
        del held, added, coming, block, grad
        grads: list[Block | None] = [dq, None, None]
        if size == 2:
            grads[0] = layer.new(size * numel_q)
        half = numel_kv * spec.head_dim // (spec.head_dim + spec.value_head_dim)
        grads[1] = layer.new(size * half) if size == 2 else home
        grads[2] = layer.new(size * (numel_kv - half)) if size == 2 else home
        kept.clear()
        return grads

    return layer.graph.make(0, [q, k, v], run, reuse=out)


def _ring_pass(layer: Layer, keys_bytes: int, grads_bytes: int | None) -> None:
    """Messages and products of a pass round the ring; with `grads_bytes` a backward one."""
    rank, cp = layer.rank, layer.rank.layout.cp
    for _ in range(cp - 1):
        for n_bytes in (keys_bytes, grads_bytes):
            if n_bytes:
                rank.say("cp", "send", n_bytes)
                rank.say("cp", "receive", n_bytes)
    for hop in range(cp):
        rank.count(_hop_flops(layer, hop) if grads_bytes is None else _hop_flops(layer, hop, 1))


def _hop_flops(layer: Layer, hop: int, backward: int = 0) -> float:
    """Products of one hop: half of the square in fused kernels, else tiles of 64 rows."""
    rank, spec = layer.rank, layer.rank.spec
    rows = layer.tokens // layer.batch
    heads, d, dv = spec.heads // rank.layout.tp, spec.head_dim, spec.value_head_dim
    if d == dv and not rank.job.data.inside_documents:
        return float(layer.batch * heads * rows * rows * (d + dv) * (1 + backward))
    per_pair = 2 * layer.batch * heads * ((3 * d + 2 * dv) if backward else (d + dv))
    if hop:  # of an earlier rank half of the columns, of a later one half of the rows
        return float(per_pair * rows * rows // 2)
    pairs = sum(min(64, rows - i) * min(i + 64, rows) for i in range(0, rows, 64))
    return float(per_pair * pairs)
