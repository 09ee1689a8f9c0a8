"""The parts of a rank's memory, as predictions and measurements name them."""

from __future__ import annotations

from typing import Literal

Part = Literal[
    "weights",
    "masters",
    "gradients",
    "moments",
    "activations",
    "temporary",
    "communication",
    "other",
    "host",
    "travelling",
]
PARTS: tuple[Part, ...] = (
    "weights",
    "masters",
    "gradients",
    "moments",
    "activations",
    "temporary",
    "communication",
    "other",
)
