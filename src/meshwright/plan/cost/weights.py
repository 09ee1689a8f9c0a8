"""Parameters of the heaviest rank, as far as time depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.shapes import Shapes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """Parameters on the heaviest rank: of one layer outside its experts, of its experts, and of
    the larger of embedding and head."""

    layer: Floats
    experts: Floats
    ends: Floats


def rank_layers(shapes: Shapes, c: Candidates) -> Floats:
    """Layers of the fullest rank: chunks are filled evenly, rounded up."""
    return np.ceil(np.asarray(shapes.layers) / c.virtual_stages) * c.chunks


def rank_weights(shapes: Shapes, c: Candidates) -> Weights:
    """Parameters of a rank after tp, ep and etp, before any sharding over dp."""
    hidden, matrices = np.asarray(shapes.hidden, float), np.asarray(shapes.ffn_matrices, float)
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    feed = (
        matrices
        * hidden
        * (np.asarray(shapes.ffn) * (1 - share) + np.asarray(shapes.shared_ffn) * share)
    )
    one = matrices * hidden * np.asarray(shapes.expert_ffn) / c.etp
    experts = share * np.asarray(shapes.experts) / c.ep * one
    router = share * hidden * np.asarray(shapes.experts)
    layer = (np.asarray(shapes.attention_params) + feed) / c.tp + router
    both = np.where(c.pp == 1, 2.0 - np.asarray(shapes.tied), 1.0)
    return Weights(layer, experts, np.asarray(shapes.vocab) * hidden / c.tp * both)
