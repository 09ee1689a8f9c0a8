"""What one pipeline rank holds: layers, ends, and activations in flight; for many candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost.candidates import (
    DUALPIPE,
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB1P,
    ZB2P,
    ZBV,
    Bools,
    Candidates,
    Floats,
    Ints,
)
from meshwright.plan.cost.memory_shape import MemoryShape


@dataclass(frozen=True)
class Stage:
    """A pipeline rank of each candidate: layers without and with routed experts, all its chunks
    together; how many micro-batches wait for their backward at the peak (a chunk of the rank's
    layers counts as its share); whether it has an end of the model. `weight_copies` is 2 where a
    schedule keeps the weights of two stages."""

    dense: Floats
    moe: Floats
    copies: Floats
    first: Bools
    last: Bools
    weight_copies: Floats


def stage_of(
    shape: MemoryShape, c: Candidates, rank: Ints, micro_batches: Floats, even: bool
) -> Stage:
    """Pipeline rank `rank` of each candidate. Layers are shared out evenly, with the ends counted
    as a layer each where that makes it even (as Megatron's users do, e.g. 126 layers over 64
    stages); or, not `even`, with the head counted as the layers that it costs as much as.
    `plan/stages.py` does that exactly."""
    layers = _layers(shape, c, rank, even)
    dense = np.minimum(layers, _dense_layers(shape, c, rank))
    turns = np.isin(c.schedule, (ZBV, DUALPIPEV))
    twice = c.schedule == DUALPIPE
    return Stage(
        dense=dense,
        moe=layers - dense,
        copies=in_flight(c, rank, micro_batches) / c.chunks,
        first=rank == 0,
        last=np.where(turns, rank == 0, rank == c.pp - 1),
        weight_copies=1.0 + (twice & (c.pp > 1)),
    )


def _layers(shape: MemoryShape, c: Candidates, rank: Ints, even: bool) -> Floats:
    first, last = rank == 0, rank == c.pp - 1
    if not even:
        share = (shape.layers + shape.head_layers) / c.pp
        rest = np.floor(np.maximum(share - shape.head_layers, 0.0))
        found = np.where(last & (c.pp > 1), rest, np.ceil(share - shape.head_layers * (c.pp == 1)))
        return np.minimum(found, shape.layers)
    stages = c.virtual_stages
    uneven = (shape.layers % stages > 0) & (c.pp > 1)
    both = uneven & ((shape.layers + 2) % stages == 0)
    share = (shape.layers + 2 * both) / c.pp
    share = np.where(uneven & ~both, np.where(last, np.floor(share), np.ceil(share)), share)
    return np.asarray(np.clip(share - both * (first * 1.0 + last), 0, shape.layers), np.float64)


def _dense_layers(shape: MemoryShape, c: Candidates, rank: Ints) -> Floats:
    """Layers without experts on `rank`: those of its chunks that lie among the first ones."""
    if shape.dense_layers in (0, shape.layers):
        return np.full(len(c), float(shape.dense_layers))
    size = shape.layers / c.virtual_stages
    found = np.zeros(len(c))
    rounds = int(np.max(np.ceil(shape.dense_layers / (size * c.pp)), initial=1))
    for chunk in range(rounds):
        begin = np.where(chunk < c.chunks, (chunk * c.pp + rank) * size, shape.layers)
        found += np.clip(shape.dense_layers - begin, 0.0, size)
    return found


def in_flight(c: Candidates, rank: Ints, micro_batches: Floats) -> Floats:
    """Most pairs of (chunk, micro-batch) between forward and the end of backward on `rank`.

    GPipe: all. 1F1B: the ranks from here to the end (arXiv 2006.09503). Interleaved: what runs
    ahead, 2 (p - r - 1) + (v - 1) p, and one (arXiv 2104.04473). Zero bubble: H1 as the first rank
    of 1F1B, H2 twice that less one, V as many halves of a rank as 1F1B has whole ones (arXiv
    2401.10241). DualPipe: p + 1 (arXiv 2412.19437), its V as many halves twice.
    """
    p, v = c.pp, c.chunks
    ahead = {
        GPIPE: micro_batches * v,
        ONE_F_ONE_B: p - rank,
        INTERLEAVED: np.where(v > 1, 2 * (p - rank - 1) + (v - 1) * p + 1, p - rank),
        ZBV: 2 * p,
        DUALPIPEV: 2 * p + 1,
        ZB1P: p,
        ZB2P: 2 * p - 1,
        DUALPIPE: p + 1,
    }
    most = np.select([c.schedule == code for code in ahead], list(ahead.values()))
    return np.asarray(np.minimum(most, micro_batches * v), np.float64)
