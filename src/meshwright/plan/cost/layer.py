"""One layer with the collectives that it waits for, on one rank, for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.plan.cost.candidates import ATTENTION, CORE, FULL, MLP, Candidates
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

# Kernels of a layer's attention half that recomputation of the scores alone starts again.
SCORES_KERNELS = 0.2


@dataclass(frozen=True)
class Again:
    """Share of layers of which a part runs once more in the backward: the scores with the ring
    around them, the attention half, the feed-forward half; with it run its collectives."""

    scores: Floats
    attention: Floats
    feed: Floats

    @classmethod
    def of(cls, c: Candidates) -> Again:
        """What the layouts make again."""

        def where(*codes: int) -> Floats:
            return np.asarray(np.isin(c.recompute, codes) * c.recompute_share)

        return cls(where(CORE, ATTENTION, FULL), where(ATTENTION, FULL), where(MLP, FULL))


def tp_seconds(shapes: Shapes, rates: Rates, c: Candidates) -> tuple[Floats, Floats]:
    """Collectives of tensor parallelism in a forward of a layer's attention half and of its
    feed-forward half, before any hiding; a backward has as many. Each half has an all-reduce, or
    with sequence parallelism an all-gather and a reduce-scatter, which move as much."""
    group = Group(c.tp, 1)
    size = rank_tokens(shapes, c) * np.asarray(shapes.hidden) * ELEMENT_BYTES
    plain = all_reduce_s(rates.network, group, size)
    split = 2.0 * ring_s(rates.network, group, size)
    once = np.where(c.sequence_parallel, split, plain)
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    shared = np.asarray(shapes.shared_ffn) > 0
    return once, once * (1.0 - share * np.where((c.etp == c.tp) | shared, 0.0, 1.0))


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
    layers that are routed: each token goes to its experts, or where a framework `gathers`, all
    tokens go to all ranks."""
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    whole = c.etp == c.tp
    tokens = rank_tokens(shapes, c) / np.where(whole, 1, c.tp)
    sent = tokens * np.asarray(shapes.top_k) * np.asarray(shapes.hidden) * ELEMENT_BYTES
    sent = sent * np.asarray(shapes.imbalance)
    group = Group(c.ep, np.where(whole, c.tp, 1))
    copies = np.asarray(shapes.top_k) * np.asarray(rates.merges)
    chosen = all_to_all_s(rates.network, group, sent, copies)
    everything = tokens * c.ep * np.asarray(shapes.hidden) * ELEMENT_BYTES
    every = ring_s(rates.network, group, everything)
    return np.asarray(2.0 * share * np.where(np.asarray(rates.gathers) > 0, every, chosen))


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


def exposed(traffic: Floats, hidden: ArrayLike, compute: Floats) -> Floats:
    """Seconds of `traffic` that are waited for: up to the share `hidden` runs beside `compute`, and
    no more than that takes."""
    beside: Floats = np.minimum(traffic * np.asarray(hidden), compute)
    return traffic - beside


def layer_seconds(shapes: Shapes, rates: Rates, c: Candidates, weights: Weights) -> Layer:
    """What a layer takes with what it waits for. The reduction of an input's gradient runs beside
    the product for the weights, so half of the backward's tp traffic is hidden where that takes
    long enough. A model that is not trained has no backward (`back` is 0)."""
    times = layer_times(shapes, rates, c)
    forward, backward, again = times.passes.forward_s, times.passes.backward_s, times.again_s
    made, back = Again.of(c), np.asarray(shapes.trained, float)
    behind, weight = backward + again, times.passes.weight_s
    tp_attention, tp_feed = tp_seconds(shapes, rates, c)
    tp_once = tp_attention + tp_feed
    tp_forward = exposed(tp_once, rates.tp_hidden, forward)
    tp_behind = exposed(tp_once, 0.5, weight)
    tp_behind = tp_behind + tp_attention * made.attention + tp_feed * made.feed
    tp = tp_forward + back * exposed(tp_behind, rates.tp_hidden, behind - weight)
    scores = attention_half(shapes, rates, c)[1]
    ring = cp_seconds(shapes, rates, c)
    cp_forward = np.maximum(ring - np.asarray(rates.cp_hidden) * scores.forward_s, 0.05 * ring)
    cp_backward = np.maximum(
        2.0 * ring - np.asarray(rates.cp_hidden) * scores.backward_s, 0.1 * ring
    )
    cp = cp_forward * (1.0 + back * made.scores) + back * cp_backward
    ep_once = ep_seconds(shapes, rates, c)
    ep_forward = exposed(ep_once, rates.ep_hidden, forward)
    ep = ep_forward + back * exposed(ep_once * (1.0 + made.feed), rates.ep_hidden, behind)
    compute = forward + back * behind
    shard = shard_seconds(rates, c, weights, times, back)
    ahead = tp_forward + cp_forward + ep_forward
    chip_forward = forward + ahead + shard / (1.0 + 2.0 * back)
    chip_backward = back * (compute + tp + cp + ep + shard - chip_forward)
    floor, host_backward = host_passes(shapes, rates, c, made)
    whole_forward = beside_host(chip_forward, floor, rates.host_norm)
    whole_backward = beside_host(chip_backward, back * host_backward, rates.host_norm)
    host = whole_forward + whole_backward - chip_forward - chip_backward
    return Layer(whole_forward, whole_backward, back * weight, compute, tp, cp, ep, shard, host)


def host_passes(shapes: Shapes, rates: Rates, c: Candidates, made: Again) -> tuple[Floats, Floats]:
    """What a host needs for a layer's forward, and for its backward with what is made again. A
    backward has one and a half times as many kernels as a forward; experts are all in the
    feed-forward half."""
    attention, feed = host_seconds(shapes, rates, c)
    scores = SCORES_KERNELS * (made.scores - made.attention)
    again = attention * (made.attention + scores) + feed * made.feed
    return attention + feed, 1.5 * (attention + feed) + again


def shard_seconds(
    rates: Rates, c: Candidates, weights: Weights, times: LayerTimes, back: Floats
) -> Floats:
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
    for traffic, compute in ((gather, forward), (back * (gather + scatter), backward)):
        beside = traffic - exposed(traffic, hidden, compute)
        total = total + traffic - beside * (1.0 - contention)
    return np.where(c.zero == 3, total, 0.0)
