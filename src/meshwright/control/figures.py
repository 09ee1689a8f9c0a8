"""The sixteen figures of a chip that are sampled each second, and their places in a sample.

A sample of a cluster is a float32 array of shape (chips, 16); NaN where an engine cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ChipFigure:
    """One of them. A gauge is the value at that moment; a counter grows from the chip's start."""

    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    meaning: str


CHIP_FIGURES: tuple[ChipFigure, ...] = (
    ChipFigure("utilization", "ratio", "gauge", "share of the time in which it was busy"),
    ChipFigure("tensor_active", "ratio", "gauge", "share in which its matrix units were busy"),
    ChipFigure("memory_used_bytes", "bytes", "gauge", "of its device memory"),
    ChipFigure("memory_active", "ratio", "gauge", "share of its memory bandwidth in use"),
    ChipFigure("temperature_c", "C", "gauge", "of the core"),
    ChipFigure("memory_temperature_c", "C", "gauge", "of its device memory"),
    ChipFigure("power_w", "W", "gauge", "drawn"),
    ChipFigure("clock_mhz", "MHz", "gauge", "of the core"),
    ChipFigure("throttled", "ratio", "gauge", "share of the time held back by heat or power"),
    ChipFigure("link_sent_bytes_s", "bytes/s", "gauge", "over all its links"),
    ChipFigure("link_received_bytes_s", "bytes/s", "gauge", "over all its links"),
    ChipFigure("link_errors", "events", "counter", "retries and bad checksums on its links"),
    ChipFigure("ecc_corrected", "events", "counter", "memory errors that did no harm"),
    ChipFigure("ecc_uncorrected", "events", "counter", "memory errors that did"),
    ChipFigure("errors", "events", "counter", "failed executions, resets, codes of the driver"),
    ChipFigure("steps", "events", "counter", "steps of its job that it has done"),
)
FIGURE_NAMES: tuple[str, ...] = tuple(figure.name for figure in CHIP_FIGURES)
