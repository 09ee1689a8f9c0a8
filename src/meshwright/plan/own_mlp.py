"""Feed-forward halves in bytes: dense ones, and routed experts with their exchange."""

from __future__ import annotations

from meshwright.plan.own_layers import Layer
from meshwright.plan.own_tape import Block, Value


def feed_forward(layer: Layer, x: Value, number: int) -> Value:
    """The second half of layer `number`, with its residual."""
    spec, rows = layer.rank.spec, layer.outside
    normed = layer.norm(x, "mlp_norm", rows, spec.hidden)
    if spec.is_moe(number):
        out = _moe(layer, normed)
    elif spec.family == "gpt2":
        out = _gelu(layer, normed)
    else:
        out = _swiglu(layer, normed, "mlp", spec.ffn_hidden)
    del normed
    return layer.add(x, out, layer.size * rows * spec.hidden)


def _gelu(layer: Layer, x: Value) -> Value:
    spec, t = layer.rank.spec, layer.tokens
    h, f = spec.hidden, spec.ffn_hidden // layer.rank.layout.tp
    up = layer.linear(layer.enter(x, h), "mlp.up", t, h, f)
    up = layer.add_bias(up, "mlp.up", t, f)
    n_bytes = layer.size * t * f
    hidden = layer.keeping(n_bytes, [up], [up.block], [n_bytes])
    del up
    out = layer.leave(layer.linear(hidden, "mlp.down", t, f, h), h)
    return layer.add_bias(out, "mlp.down", layer.outside, h)


def _swiglu(layer: Layer, x: Value, name: str, width: int) -> Value:
    h, t, f = layer.rank.spec.hidden, layer.tokens, width // layer.rank.layout.tp
    inside, n_bytes = layer.enter(x, h), layer.size * layer.tokens * f
    gate = layer.linear(inside, f"{name}.gate", t, h, f)
    up = layer.linear(inside, f"{name}.up", t, h, f)
    silu = layer.keeping(n_bytes, [gate], [gate.block], [n_bytes])
    both = layer.keeping(n_bytes, [silu, up], [silu.block, up.block], [n_bytes, n_bytes])
    del silu, gate, up
    return layer.leave(layer.linear(both, f"{name}.down", t, f, h), h)


def _moe(layer: Layer, x: Value) -> Value:
    spec, layout = layer.rank.spec, layer.rank.layout
    apart = layout.etp > 1
    inside = layer.enter(x, spec.hidden) if apart else x
    routed = _routed(layer, inside, layer.tokens if apart else layer.outside)
    if apart:
        routed = layer.leave(routed, spec.hidden)
    del inside
    if not spec.n_shared_experts:
        return routed
    width = spec.n_shared_experts * spec.expert_ffn_hidden
    shared = _swiglu(layer, x, "mlp.shared", width)
    return layer.add(routed, shared, layer.size * layer.outside * spec.hidden)


def _routed(layer: Layer, x: Value, t: int) -> Value:
    spec, size = layer.rank.spec, layer.size
    weights = _router(layer, x, t)
    rows, row = layer.rank.routed_rows(t), size * spec.hidden
    order = _assign(layer, t)
    spread = _spread(layer, x, order, row * t * spec.top_k, row * rows, row * t)
    done = _dispatch(layer, spread, rows)
    del spread
    return _combine(layer, done, weights, order, t, rows)


def _spread(layer: Layer, x: Value, order: Block, full: int, rows: int, tokens: int) -> Value:
    """A row for each choice of a token; all in bytes."""
    kept = [order]

    def run(grad: Block) -> list[Block | None]:
        each = layer.new(full)
        summed = layer.new(tokens)
        kept.clear()
        del each, grad
        return [summed]

    return layer.graph.make(rows, [x], run)


def _router(layer: Layer, x: Value, t: int) -> Value:
    """Scores, choices and weights; what every loss of the router keeps."""
    rank, spec = layer.rank, layer.rank.spec
    e, k, h, half = spec.n_experts, spec.top_k, spec.hidden, layer.size == 2
    copies = [layer.new(4 * t * h), layer.new(4 * e * h)] if half else [x.block]
    flops = 2 * t * h * e
    rank.count(flops)
    logits, scores = layer.new(4 * t * e), layer.new(4 * t * e)
    if not spec.z_loss:
        del logits
    biased = layer.new(4 * t * e)
    sorted_values, experts = layer.new(4 * t * e), layer.new(8 * t * e)
    del sorted_values, biased
    kept = [*copies, scores, experts, layer.new(4 * t * k), layer.new(4 * t)]
    if spec.z_loss:
        kept += [logits, layer.new(4 * t)]
    out = layer.new(4 * t * k)
    _router_losses(layer, t, kept)
    _with_room(layer, t)
    del copies, scores, experts

    def run(grad: Block) -> list[Block | None]:
        wide = [layer.new(4 * t * e) for _ in range(2)]
        rank.count(2 * flops)
        layer.deliver("mlp.router.weight", layer.size * e * h, holding=True)
        grad_x = layer.new(4 * t * h)
        wide.clear()
        kept.clear()
        del grad
        return [layer.new(layer.size * t * h) if half else grad_x]

    return layer.graph.make(0, [x], run, reuse=out)


def _router_losses(layer: Layer, t: int, kept: list[Block]) -> None:
    rank, spec = layer.rank, layer.rank.spec
    if spec.aux_loss or spec.seq_aux_loss:
        kept.append(layer.new(4 * t))
        shares = layer.new(4 * t * spec.n_experts)
        if spec.seq_aux_loss:
            counts = layer.new(4 * layer.batch * spec.n_experts)
            rank.say("sequence", "all_reduce", counts.n_bytes, counts)
            kept.append(counts)
        del shares


def _with_room(layer: Layer, t: int) -> None:
    """With a capacity, choices and places of a sequence's parts are gathered."""
    rank = layer.rank
    if rank.spec.capacity_factor:
        n = rank.axes["sequence"]
        rank.say("sequence", "all_gather", n * 8 * t * rank.spec.top_k)
        rank.say("sequence", "all_gather", n * 8 * t // layer.batch)


def _assign(layer: Layer, t: int) -> Block:
    n_bytes = 8 * t * layer.rank.spec.top_k
    scratch = [layer.new(n_bytes) for _ in range(2)]
    order = layer.new(n_bytes)
    scratch.clear()
    return order


def _dispatch(layer: Layer, rows: Value, n: int) -> Value:
    rank, h, size = layer.rank, layer.rank.spec.hidden, layer.size
    if rank.layout.ep == 1:
        return _experts(layer, rows, n)
    places = rank.spec.n_experts + rank.layout.expert_replicas
    rank.say("ep", "all_to_all", 8 * places)
    inverse, order = layer.new(8 * n), layer.new(8 * n)
    here = _travel(layer, rows, n)
    sorted_here = layer.keeping(size * n * h, [here], [inverse], [size * n * h])
    done = _experts(layer, sorted_here, n)
    del sorted_here
    back = layer.keeping(size * n * h, [done], [order], [size * n * h])
    return _travel(layer, back, n)


def _travel(layer: Layer, x: Value, n: int) -> Value:
    rank, n_bytes = layer.rank, layer.size * n * layer.rank.spec.hidden
    out = layer.new(n_bytes)
    rank.say("ep", "all_to_all", n_bytes, x.block, out)

    def run(grad: Block) -> list[Block | None]:
        here = layer.new(n_bytes)
        rank.say("ep", "all_to_all", n_bytes, grad, here)
        if rank.layout.tp > 1 or rank.layout.splits_backward:
            rank.overlap()
        del grad
        return [here]

    return layer.graph.make(0, [x], run, reuse=out)


def _experts(layer: Layer, rows: Value, n: int) -> Value:
    spec, layout = layer.rank.spec, layer.rank.layout
    h, f, size = spec.hidden, spec.expert_ffn_hidden // layout.etp, layer.size
    places = (spec.n_experts + layout.expert_replicas) // layout.ep
    gate = _grouped(layer, rows, "gate", n, h, f, places)
    up = _grouped(layer, rows, "up", n, h, f, places)
    both = _gated(layer, gate, up, size * n * f)
    del gate, up
    return _grouped(layer, both, "down", n, f, h, places)


def _gated(layer: Layer, gate: Value, up: Value, n_bytes: int) -> Value:
    """silu(gate) * up on all rows at once."""
    out = layer.new(n_bytes)
    silu = layer.new(n_bytes)
    del silu
    kept = [gate.block, up.block]

    def run(grad: Block) -> list[Block | None]:
        grads: list[Block | None] = [layer.new(n_bytes), layer.new(n_bytes)]
        scratch = [layer.new(n_bytes), layer.new(n_bytes)]
        scratch.clear()
        kept.clear()
        del grad
        return grads

    return layer.graph.make(0, [gate, up], run, reuse=out)


def _grouped(
    layer: Layer, x: Value, key: str, rows: int, n_in: int, n_out: int, places: int
) -> Value:
    """A product of rows with their expert's matrix."""
    size = layer.size
    shape, weight_bytes = (rows, n_in, n_out), size * places * n_in * n_out
    return layer.product(x, f"mlp.experts.{key}", shape, size, weight_bytes)


def _combine(layer: Layer, done: Value, weights: Value, order: Block, t: int, rows: int) -> Value:
    spec, size = layer.rank.spec, layer.size
    h, k, half = spec.hidden, spec.top_k, layer.size == 2
    each = layer.new(size * t * k * h)
    total = layer.new(4 * t * h)
    scratch = layer.new(4 * t * h) if half else None
    del scratch
    out = layer.new(size * t * h) if half else total
    del total
    kept = [each, order, weights.block]

    def run(grad: Block) -> list[Block | None]:
        g = layer.new(4 * t * h) if half else grad
        grad_each, grad_weights = layer.new(size * t * k * h), layer.new(4 * t * k)
        scratch = layer.new(4 * t * h)
        del scratch
        grad_rows = layer.new(size * rows * h)
        del grad_each, g, grad
        kept.clear()
        return [grad_rows, grad_weights]

    return layer.graph.make(0, [done, weights], run, reuse=out)
