"""Seconds of a training step, part by part, for many candidates at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.catalog.hardware import Cluster
from meshwright.plan.cost import pipeline
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.collectives import send_s
from meshwright.plan.cost.compute import Passes, embedding_times, head_times, rank_tokens
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.data import read_seconds
from meshwright.plan.cost.layer import ELEMENT_BYTES, Layer, exposed, layer_seconds
from meshwright.plan.cost.once import dp_seconds, optimizer_seconds
from meshwright.plan.cost.rates import Machine, Rates, rates
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.weights import rank_layers, rank_weights
from meshwright.plan.cost.workload import Workload

Floats = NDArray[np.float64]

# What a step is made of. `compute` includes recomputation, `tp`, `cp`, `ep`, `shard` (ZeRO-3's
# traffic), `p2p` and `dp` are what nothing hides, `host` what chips wait for their hosts, `bubble`
# what they wait for the pipeline, `overhead` logging, batches and stragglers, `data` what reading
# from storage takes longer than all the rest.
PARTS = (
    "compute", "tp", "cp", "ep", "shard", "host", "bubble", "p2p", "dp", "optimizer", "overhead",
    "data",
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of each candidate: by part, in all, and between which bounds four of five
    published runs of the same kind lie; `assumed` names constants that nobody measured."""

    parts: dict[str, Floats]
    step_s: Floats
    low_s: Floats
    high_s: Floats
    origin: str
    assumed: tuple[str, ...]


def step_time(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> StepTime:
    """What a step of each candidate takes on `cluster`."""
    known = constants or Constants.shipped()
    chip, software = cluster.chip.name, known.software(work.framework, work.flash_attention)
    parts = seconds(Shapes.of(work), rates_of(work, cluster, known), c)
    busy = parts.pop("step")
    parts["data"] = np.maximum(read_seconds(work, cluster) - busy, 0.0)
    step = busy + parts["data"]
    low, high = known.spread(chip, work.moe_layers > 0)
    return StepTime(
        parts=parts,
        step_s=step,
        low_s=step * low,
        high_s=step * high,
        origin=known.origin(chip),
        assumed=known.assumed(chip, software, work.precision),
    )


def rates_of(work: Workload, cluster: Cluster, known: Constants) -> Rates:
    """Speeds that the framework of `work` reaches on `cluster`."""
    software = known.software(work.framework, work.flash_attention)
    return rates(known.values, known.like, Machine.of(cluster), software, work.precision)


def step_parts(
    work: Workload, cluster: Cluster, c: Candidates, constants: Constants | None = None
) -> dict[str, Floats]:
    """Seconds by part; they add up to the step."""
    return step_time(work, cluster, c, constants).parts


def seconds(shapes: Shapes, rates: Rates, c: Candidates) -> dict[str, Floats]:
    """Parts of a step, and under `step` their sum: what the slowest rank computes and waits for."""
    weights = rank_weights(shapes, c)
    layer = layer_seconds(shapes, rates, c, weights)
    stages = stage_times(shapes, c, layer, *_ends(shapes, rates, c))
    count = np.asarray(shapes.global_batch) / (c.dp * c.micro_batch)
    per_layer = rank_layers(shapes, c) * count
    parts = {
        "tp": layer.tp_s * per_layer,
        "cp": layer.cp_s * per_layer,
        "ep": layer.ep_s * per_layer,
        "shard": layer.shard_s * per_layer,
        "host": layer.host_s * per_layer,
    }
    waiting = sum(parts.values(), np.zeros_like(per_layer))
    parts["compute"] = pipeline.busy_s(stages, count) - waiting
    parts["bubble"] = pipeline.bubble_s(stages, c)
    parts["p2p"] = hop_seconds(shapes, rates, c, count, parts["compute"])
    back = np.asarray(shapes.trained, float)
    parts["dp"] = back * dp_seconds(shapes, rates, c, weights, layer)
    parts["optimizer"] = back * optimizer_seconds(shapes, rates, c, weights)
    most = sum(parts.values(), np.zeros_like(per_layer))
    nodes = np.log2(np.maximum(c.world / 8.0, 1.0))
    parts["overhead"] = np.asarray(rates.step_s) + most * np.asarray(rates.straggling) * nodes
    parts["step"] = most + parts["overhead"]
    return parts


def _ends(shapes: Shapes, rates: Rates, c: Candidates) -> tuple[Floats, Floats]:
    """Seconds of embedding and of head for one micro-batch, forward and backward."""

    def both(passes: Passes) -> Floats:
        return passes.forward_s + np.asarray(shapes.trained, float) * passes.backward_s

    return both(embedding_times(shapes, rates, c)), both(head_times(shapes, rates, c))


def stage_times(
    shapes: Shapes, c: Candidates, layer: Layer, embedding_s: Floats, head_s: Floats
) -> pipeline.StageTimes:
    """What stages take: all as many layers, rounded up; what is too many is left out at both ends
    of the pipeline, one layer each."""
    layers, each = rank_layers(shapes, c), layer.forward_s + layer.backward_s
    spare = layers / c.chunks * c.virtual_stages - np.asarray(shapes.layers, float)
    fewer = np.minimum(np.ceil(spare / 2.0), layers / c.chunks)
    alone = layers * each + embedding_s + head_s
    middle, last = layers * each + embedding_s, (layers - fewer) * each + head_s
    whole = np.asarray(shapes.layers, float) * each + embedding_s + head_s
    return pipeline.StageTimes(
        forward_s=layers * layer.forward_s,
        backward_s=layers * layer.backward_s,
        weight_s=layers * layer.weight_s,
        slowest_s=np.where(c.pp > 1, np.maximum(middle, last), alone),
        sum_s=np.where(c.pp > 1, whole, alone),
    )


def hop_seconds(
    shapes: Shapes, rates: Rates, c: Candidates, count: Floats, compute: Floats
) -> Floats:
    """Messages between stages: of each chunk of each micro-batch both ways, of which `hop_hidden`
    runs beside `compute`, and once through the pipeline where nothing can."""
    slices = np.where(np.asarray(rates.hop_whole) > 0, 1, c.tp)
    size = rank_tokens(shapes, c) * np.asarray(shapes.hidden) * ELEMENT_BYTES / slices
    hop = send_s(rates.network, c.world / c.pp, size)
    ways = 1.0 + np.asarray(shapes.trained, float)
    steady = exposed(hop * ways * count * c.chunks, rates.hop_hidden, compute)
    return np.where(c.pp > 1, steady + hop * ways * (c.pp - 1), 0.0)
