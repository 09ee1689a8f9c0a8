"""What a step does once, whatever the number of micro-batches: gradients, weights, optimizer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.collectives import Group, all_reduce_s, ring_s
from meshwright.plan.cost.layer import Layer
from meshwright.plan.cost.rates import Rates
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.weights import Weights, rank_layers

Floats = NDArray[np.float64]


def dp_seconds(
    shapes: Shapes, rates: Rates, c: Candidates, weights: Weights, layer: Layer
) -> Floats:
    """Exposed reduction of gradients and gathering of weights of a step.

    Up to ZeRO-2 they move once a step; as much as `dp_hidden` of it runs beside the last backward
    and the first forward of a rank. ZeRO-3 with replicas adds up shards over them.
    """
    layers = rank_layers(shapes, c)
    dense = weights.layer * layers + weights.ends
    routed = weights.experts * layers
    group, experts = Group(c.dp * c.cp, c.tp), Group(c.expert_copies, c.ep * c.etp)
    gradient = np.asarray(rates.gradient_bytes)
    network = rates.network
    bucket = np.maximum(np.asarray(rates.bucket_params), np.asarray(rates.bucket_per_rank) * c.dp)
    starts = np.maximum(np.ceil((dense + routed) / bucket) - 1.0, 0.0)
    start = starts * ring_s(network, group, 0.0)
    summed = all_reduce_s(network, group, dense * gradient) + all_reduce_s(
        network, experts, routed * gradient
    )
    scattered = ring_s(network, group, dense * gradient) + ring_s(
        network, experts, routed * gradient
    )
    moved = np.asarray(rates.gather_bytes)
    gathered = ring_s(network, group, dense * moved) + ring_s(network, experts, routed * moved)
    replicas = Group(c.dp_replicate, c.tp * c.cp * c.dp_shard)
    across = all_reduce_s(network, replicas, (dense + routed) / c.dp_shard * gradient)
    traffic = np.select(
        [c.zero == 0, c.zero == 3],
        [summed + 2.0 * start, across],
        scattered + gathered + 2.0 * start,
    )
    once = (layer.backward_s + np.where(c.zero == 0, 0.0, layer.forward_s)) * layers
    window = once * np.maximum(1.0, c.pp * (c.chunks - 1) / c.chunks)
    beside = np.minimum(np.asarray(rates.dp_hidden) * traffic, window)
    return np.asarray(traffic - beside * (1.0 - np.asarray(rates.contention)))


def optimizer_seconds(shapes: Shapes, rates: Rates, c: Candidates, weights: Weights) -> Floats:
    """State read and written once (`optimizer_bytes` a parameter of the shard), and gradients
    zeroed, normed and weights cast (12 bytes a parameter of the rank)."""
    layers = rank_layers(shapes, c)
    mine = (weights.layer + weights.experts) * layers + weights.ends
    shards = np.where(c.zero > 0, c.dp_shard * c.cp, 1)
    passes = mine / np.where(c.zero == 3, shards, 1) * 12.0
    moved = mine / shards * np.asarray(rates.optimizer_bytes) + passes
    return np.asarray(moved / np.asarray(rates.memory_bytes_s))
