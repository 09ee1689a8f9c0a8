"""The ends of the model in bytes: embedding, head and loss."""

from __future__ import annotations

from meshwright.plan.own_layers import Layer
from meshwright.plan.own_tape import Block, Value


def embed(layer: Layer, tokens: Block) -> Value:
    """Token table, and learned positions where there are any; `tokens` are this rank's inputs."""
    rank, spec = layer.rank, layer.rank.spec
    t, h, size, tp = layer.tokens, spec.hidden, layer.size, rank.layout.tp
    rows = spec.vocab // tp
    kept = [tokens]
    if tp > 1:
        kept = [layer.new(8 * t), layer.new(t)]
    out = layer.new(size * t * h)
    if tp > 1:
        out = layer.new(size * t * h)

    def run(grad: Block) -> list[Block | None]:
        masked = layer.new(size * t * h) if tp > 1 else grad
        if layer.tied:  # the head's gradient has waited for this one
            summed = layer.new(size * rows * h)
            layer.tied.clear()
            del summed
        layer.deliver("embed.weight", size * rows * h, holding=True)
        kept.clear()
        del masked, grad
        return []

    x = layer.leave(layer.graph.make(0, [], run, reuse=out), h)
    del out
    if spec.family != "gpt2":
        return x
    n_bytes = size * layer.outside * h
    places = n_bytes // layer.batch

    def run_positions(grad: Block) -> list[Block | None]:
        summed = layer.new(places)
        layer.deliver("positions.weight", size * spec.max_seq_len * h, holding=True)
        del summed
        return [grad]

    added = layer.new(places)
    out = layer.new(n_bytes)
    del added
    return layer.graph.make(0, [x], run_positions, reuse=out)


def loss(layer: Layer, x: Value, targets: Block) -> Value:
    """Head and cross-entropy of hidden states."""
    layout, n = layer.rank.layout, layer.tokens
    if layout.loss_chunk and n > layout.loss_chunk:
        return _chunked(layer, x, n)
    vocab = layer.rank.spec.vocab // layout.tp
    logits = _product(layer, x, n, layer.rank.spec.hidden, vocab)
    return _entropy(layer, logits, n, vocab, targets)


def _head_gradient(layer: Layer, weight: Block) -> None:
    """A table with both ends on one stage gets the sum of both gradients."""
    if layer.rank.spec.tie_embeddings and layer.both_ends:
        layer.tied.append(weight)
    else:
        tied = layer.rank.spec.tie_embeddings
        layer.deliver("embed.weight" if tied else "head.weight", weight, holding=True)


def _product(layer: Layer, x: Value, n: int, h: int, vocab: int) -> Value:
    rank, size, kept = layer.rank, layer.size, [x.block]
    flops = 2 * n * h * vocab
    rank.count(flops)

    def run(grad: Block) -> list[Block | None]:
        rank.count(2 * flops)
        out = layer.new(size * n * h)
        weight = layer.new(size * vocab * h)
        _head_gradient(layer, weight)
        del weight, grad
        kept.clear()
        return [out]

    return layer.graph.make(size * n * vocab, [x], run)


def _entropy(layer: Layer, logits: Value, n: int, vocab: int, targets: Block) -> Value:
    size, numel, tp = layer.size, n * vocab, layer.rank.layout.tp
    wide = layer.new(4 * numel) if size == 2 else logits.block
    if tp > 1:
        _vote_on_logits(layer, n)
    kept = [layer.new(4 * numel), targets]
    if tp > 1:
        kept += [layer.new(8 * n), layer.new(8 * n), layer.new(2 * n)]
    del wide

    def run(grad: Block) -> list[Block | None]:
        first = layer.new(4 * numel)
        out = layer.new(4 * numel)
        kept.clear()
        del first, grad
        return [layer.new(size * numel) if size == 2 else out]

    return layer.graph.make(4, [logits], run)


def _vote_on_logits(layer: Layer, n: int) -> None:
    """Largest logit, then sum of exponentials and the target's logit, over the vocabulary."""
    layer.rank.say("tp", "all_reduce", 4 * n)
    layer.rank.say("tp", "all_reduce", 8 * n)


def _chunked(layer: Layer, x: Value, n: int) -> Value:
    """Logits of a chunk at a time, with their gradients."""
    rank, spec, size = layer.rank, layer.rank.spec, layer.size
    h, vocab, chunk = spec.hidden, spec.vocab // rank.layout.tp, rank.layout.loss_chunk
    grad_x, total = layer.new(size * n * h), layer.new(4)
    grad_w = layer.new(4 * vocab * h)
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        rank.count(2 * rows * h * vocab)
        logits = layer.new(size * rows * vocab)
        if rank.layout.tp > 1:
            _vote_on_logits(layer, rows)
        wide = [layer.new(4 * rows * vocab) for _ in range(3)]
        wide.clear()
        grad = layer.new(size * rows * vocab)
        rank.count(4 * rows * h * vocab)
        part, more = layer.new(size * vocab * h), layer.new(4 * vocab * h if size == 2 else 0)
        del logits, grad, part, more
    kept = [grad_x, layer.new(size * vocab * h) if size == 2 else grad_w]
    del grad_x, grad_w

    def run(grad: Block) -> list[Block | None]:
        out, weight = layer.new(size * n * h), layer.new(size * vocab * h)
        _head_gradient(layer, weight)
        kept.clear()
        del weight, grad
        return [out]

    return layer.graph.make(0, [x], run, reuse=total)
