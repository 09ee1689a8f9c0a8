"""What is there for a moment, and what a framework holds besides the model."""

from __future__ import annotations

import numpy as np

from meshwright.plan.cost.candidates import ATTENTION, FULL, MLP, Candidates, Floats
from meshwright.plan.cost.memory_activations import LayerBytes, layer_bytes
from meshwright.plan.cost.memory_setting import Setting, lane_tokens, sequence_parts
from meshwright.plan.cost.memory_shape import MemoryLayer
from meshwright.plan.cost.memory_stage import Stage


def logit_bytes(s: Setting, c: Candidates, stage: Stage) -> Floats:
    """Logits and their gradient at their peak, and those that wait for multi-token prediction."""
    f = s.framework
    tokens = s.tokens(c)
    whole = np.where(c.loss_chunk > 0, np.minimum(c.loss_chunk, tokens), tokens)
    elements = s.vocab(c) * stage.last
    return elements * (whole * f.logit_bytes + tokens * s.shape.predictions * f.logit_saved_bytes)


def workspace_bytes(s: Setting, c: Candidates, stage: Stage) -> Floats:
    """The dearest backward of a layer on the rank: what recomputation brings back, gradients beside
    the widest product, scores, and tokens on their way to experts."""
    dense, moe = (_layer_work(s, c, kind) for kind in (s.shape.dense, s.shape.moe))
    return np.maximum(dense * (stage.dense > 0), moe * (stage.moe > 0))


def _layer_work(s: Setting, c: Candidates, kind: MemoryLayer) -> Floats:
    tokens, layer = s.tokens(c), layer_bytes(s, c, kind)
    heads = s.shape.heads / c.tp
    scores = tokens * s.seq_len * heads * s.framework.scores_peak_bytes * (not s.flash)
    wide = tokens * (kind.work_bytes / c.tp + 2 * s.element_bytes * s.shape.hidden)
    routed = lane_tokens(s, c) * s.imbalance * bool(kind.expert)
    moved = routed * (2 * s.element_bytes * s.shape.hidden + kind.routed_bytes / c.etp)
    return s.trained * _again(c, layer) + np.maximum(np.maximum(scores, wide), moved)


def _again(c: Candidates, layer: LayerBytes) -> Floats:
    """What the backward of one layer makes once more before it begins."""
    attention = layer.attention + layer.scores + layer.latents
    mlp = layer.mlp + layer.experts
    first = np.isin(c.recompute, (ATTENTION, FULL)) * attention
    second = np.isin(c.recompute, (MLP, FULL)) * mlp
    both = np.where(c.recompute == FULL, first + second, np.maximum(first, second))
    return np.where(c.recompute_share > 0, both, 0.0)


def whole_bytes(s: Setting, c: Candidates, stage: Stage) -> Floats:
    """Layers whose weights (ZeRO-3) or gradients (ZeRO-2 too) are whole at once, and the tables at
    the ends."""
    f = s.framework
    dense = s.layer_weights(c, moe=False)[0] * (stage.dense > 0)
    moe = sum(s.layer_weights(c, moe=True)) * (stage.moe > 0)
    layer, count = np.maximum(dense, moe), stage.dense + stage.moe
    tables = s.vocab(c) * s.shape.hidden * (1.0 * stage.first + stage.last * (not s.shape.tied))
    each = 4.0 if s.precision == "fp32" else 2.0
    weights = each * (np.minimum(f.whole_weights, count) * layer + tables)
    gradients = np.minimum(f.whole_gradients, count) * layer + tables * (f.whole_gradients > 0)
    weights = weights * (c.zero >= f.weights_sharded_from)
    gradients = gradients * (c.zero >= f.gradients_sharded_from) * f.reduce_bytes * s.trained
    return np.asarray((weights + gradients) * (1.0 - 1.0 / c.shards), np.float64)


def wgrad_bytes(s: Setting, c: Candidates, stage: Stage) -> Floats:
    """Gradients that autograd wants and nobody reads: one for each shape of a weight."""
    dense = s.shape.dense.split * (stage.dense > 0)
    moe = s.shape.moe.split * (stage.moe > 0)
    expert = s.shape.moe.expert * (stage.moe > 0) / c.etp
    whole = np.asarray(np.maximum(dense, moe) / c.tp + expert, np.float64)
    return 2.0 * s.framework.wgrads * s.trained * whole


def buffer_bytes(s: Setting, c: Candidates, _stage: Stage) -> Floats:
    """Collectives: buckets of gradients, a stage's input and output on their way, and the keys and
    values that go round a ring. As much on every stage."""
    tokens, size = s.tokens(c), s.element_bytes
    buckets = s.framework.bucket_bytes * s.trained * (c.dp > 1)
    hops = 4.0 * tokens * s.shape.hidden * size / sequence_parts(c) * (c.pp > 1)
    ring = 2.0 * tokens * s.shape.kv_width * size / c.tp * ((c.cp > 1) & ~c.ulysses)
    return buckets + hops + ring


def communicators(c: Candidates) -> Floats:
    """Groups that a rank belongs to."""
    every = (c.tp > 1, c.cp > 1, c.pp > 1, c.dp > 1, c.ep > 1, c.expert_copies > 1, c.world > 1)
    return np.asarray(np.sum(every, axis=0), np.float64)
