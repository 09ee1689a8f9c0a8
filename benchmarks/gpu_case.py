"""What `gpu.py` measures: models, batches, and the chips' peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.models import presets
from meshwright.models.spec import ModelSpec

Flavour = Literal["1B", "8B"]

PRESETS: dict[Flavour, str] = {"1B": "llama3.2-1b", "8B": "llama3-8b"}
LEAST_GIB = 70.0  # of GPU memory, for the smallest set of cases
WARM_UP = 4  # steps: compiling, and what allocators and clocks take to settle

# Dense bf16 FLOP/s as the makers' data sheets give them (NVIDIA's are twice that, "with sparsity").
# The first name that is part of the device's counts.
_PEAKS = {
    "GH200": 989.4e12,
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H100": 989.4e12,
    "A100": 311.9e12,
    "L40S": 362.1e12,
}


@dataclass(frozen=True)
class Case:
    """One model on one GPU: `batch` sequences a step in one micro-batch. Of the 8B's layers only
    `layers` are there: width, heads and vocabulary are the whole model's."""

    flavour: Flavour
    layers: int
    precision: Literal["bf16", "fp8"]
    batch: int
    seq_len: int = 4096
    steps: int = WARM_UP + 10
    vocab: int = 128256
    lr: float = 1e-4

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.seq_len

    @property
    def model(self) -> ModelSpec:
        """The model as ours takes it."""
        whole = presets.preset(PRESETS[self.flavour])
        return ModelSpec(**whole.model_dump() | {"layers": self.layers})

    @property
    def label(self) -> str:
        """For a table."""
        whole = presets.preset(PRESETS[self.flavour]).layers
        cut = "" if self.layers == whole else f", {self.layers} of {whole} layers"
        return f"{self.flavour}{cut}, {self.precision}"


def cases_for(memory_gib: float) -> list[Case]:
    """The cases that a GPU of that size takes.

    The whole 8B does not fit: weights in bf16, gradients, masters and moments in fp32 are 18 bytes
    a parameter, 144 GB.
    """
    layers = 16 if memory_gib >= 130 else 8
    shapes: list[tuple[Flavour, int, int]] = [("1B", 16, 4), ("8B", layers, 2)]
    return [
        Case(flavour, depth, precision, batch)
        for flavour, depth, batch in shapes
        for precision in ("bf16", "fp8")
    ]


def known_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of that chip; None if it is not in the table."""
    found = (peak for name, peak in _PEAKS.items() if name in device_name)
    return next(found, None)
