"""One layer with the collectives that it waits for, on one rank, for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.candidates import FULL, Candidates
from meshwright.plan.cost.collectives import Group, all_reduce_s, all_to_all_s, ring_s
from meshwright.plan.cost.compute import (
    LayerTimes,
    attention_half,
    beside_host,
    host_seconds,
    layer_times,
    rank_tokens,
)
from meshwright.plan.cost.rates import Rates
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.weights import Weights

Floats = NDArray[np.float64]
ELEMENT_BYTES = 2.0  # activations that travel are 16-bit

# Kernels of a forward that recomputation starts again, by its code: none, the scores, half, half,
# all. A backward has one and a half times as many as a forward.
AGAIN_KERNELS = np.array([0.0, 0.1, 0.5, 0.5, 1.0])


def tp_seconds(shapes: Shapes, rates: Rates, c: Candidates) -> tuple[Floats, Floats]:
    """Collectives of tensor parallelism in a layer's forward and backward, before any hiding: each
    half of a layer has an all-reduce, or with sequence parallelism an all-gather and a
    reduce-scatter, which move as much."""
    group = Group(c.tp, 1)
    size = rank_tokens(shapes, c) * np.asarray(shapes.hidden) * ELEMENT_BYTES
    plain = all_reduce_s(rates.network, group, size)
    split = 2.0 * ring_s(rates.network, group, size)
    once = np.where(c.sequence_parallel, split, plain)
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    shared = np.asarray(shapes.shared_ffn) > 0
    halves = 2.0 - share * np.where((c.etp == c.tp) | shared, 0.0, 1.0)
    return once * halves, once * halves


def cp_seconds(shapes: Shapes, rates: Rates, c: Candidates) -> Floats:
    """Keys and values around the ring of a forward, or four exchanges of Ulysses (two here)."""
    group = Group(c.cp, c.tp)
    tokens = rank_tokens(shapes, c)
    ring = ring_s(
        rates.network, group, tokens * c.cp * np.asarray(shapes.kv) / c.tp * ELEMENT_BYTES
    )
    moved = np.asarray(shapes.qkv) + np.asarray(shapes.attention_out)
    swap = all_to_all_s(rates.network, group, tokens * moved / c.tp * ELEMENT_BYTES)
    return np.where(c.ulysses, swap, ring)


def ep_seconds(shapes: Shapes, rates: Rates, c: Candidates) -> Floats:
    """Dispatch and combine of a routed layer's forward, of the fullest rank, times the share of
    layers that are routed."""
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    whole = c.etp == c.tp
    tokens = rank_tokens(shapes, c) / np.where(whole, 1, c.tp)
    sent = tokens * np.asarray(shapes.top_k) * np.asarray(shapes.hidden) * ELEMENT_BYTES
    sent = sent * np.asarray(shapes.imbalance)
    group = Group(c.ep, np.where(whole, c.tp, 1))
    copies = np.asarray(shapes.top_k) * np.asarray(rates.merges)
    return np.asarray(2.0 * share * all_to_all_s(rates.network, group, sent, copies))


@dataclass(frozen=True)
class Layer:
    """A layer with its collectives: seconds of a forward and a backward (recomputation included),
    the part of it that is exposed communication by axis, and of weight gradients."""

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    compute_s: Floats
    tp_s: Floats
    cp_s: Floats
    ep_s: Floats
    shard_s: Floats
    host_s: Floats


def layer_seconds(shapes: Shapes, rates: Rates, c: Candidates, weights: Weights) -> Layer:
    """What a layer takes with what it waits for. The reduction of an input's gradient runs beside
    the product for the weights, so half of the backward's tp traffic is hidden in any case."""
    times = layer_times(shapes, rates, c)
    forward, backward, again = times.passes.forward_s, times.passes.backward_s, times.again_s
    tp_forward, tp_backward = tp_seconds(shapes, rates, c)
    full = (c.recompute == FULL) * c.recompute_share
    tp_all = tp_forward * (1.0 + full) + 0.5 * tp_backward
    tp = tp_all * (1.0 - np.asarray(rates.tp_hidden))
    scores = attention_half(shapes, rates, c)[1]
    ring = cp_seconds(shapes, rates, c)
    cp_forward = np.maximum(ring - np.asarray(rates.cp_hidden) * scores.forward_s, 0.05 * ring)
    cp_backward = np.maximum(
        2.0 * ring - np.asarray(rates.cp_hidden) * scores.backward_s, 0.1 * ring
    )
    cp = cp_forward * (1.0 + full) + cp_backward
    ep_once = ep_seconds(shapes, rates, c) * (1.0 - np.asarray(rates.ep_hidden))
    ep = ep_once * (2.0 + full)
    compute = forward + backward + again
    shard = shard_seconds(rates, c, weights, times)
    ahead = tp_forward * (1.0 - np.asarray(rates.tp_hidden)) + cp_forward + ep_once
    chip_forward = forward + ahead + shard / 3.0
    chip_backward = compute + tp + cp + ep + shard - chip_forward
    floor, norm = host_seconds(shapes, rates, c), rates.host_norm
    passes = 1.5 + AGAIN_KERNELS[c.recompute] * c.recompute_share
    whole_forward = beside_host(chip_forward, floor, norm)
    whole_backward = beside_host(chip_backward, floor * passes, norm)
    host = whole_forward + whole_backward - chip_forward - chip_backward
    weight = times.passes.weight_s
    return Layer(whole_forward, whole_backward, weight, compute, tp, cp, ep, shard, host)


def shard_seconds(rates: Rates, c: Candidates, weights: Weights, times: LayerTimes) -> Floats:
    """What ZeRO-3 adds to a layer in each micro-batch: weights gathered for the forward and again
    for the backward, gradients scattered; as much as `shard_hidden` of it runs beside compute and
    slows that by `contention`."""
    group = Group(c.dp_shard * c.cp, c.tp)
    gather = ring_s(rates.network, group, weights.layer * np.asarray(rates.gather_bytes))
    scatter = ring_s(rates.network, group, weights.layer * np.asarray(rates.gradient_bytes))
    experts = Group(np.maximum(c.expert_copies // c.dp_replicate, 1), c.ep * c.etp)
    gather = gather + ring_s(
        rates.network, experts, weights.experts * np.asarray(rates.gather_bytes)
    )
    scatter = scatter + ring_s(
        rates.network, experts, weights.experts * np.asarray(rates.gradient_bytes)
    )
    forward = times.passes.forward_s
    backward = times.passes.backward_s + times.again_s
    hidden = np.asarray(rates.shard_hidden)
    contention = np.asarray(rates.contention)
    total: Floats = np.zeros_like(forward)
    for traffic, compute in ((gather, forward), (gather + scatter, backward)):
        beside = np.minimum(traffic * hidden, compute)
        total = total + traffic - beside * (1.0 - contention)
    return np.where(c.zero == 3, total, 0.0)
