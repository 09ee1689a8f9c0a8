"""Which types a precision computes in, and which layers do their products in FP8."""

from __future__ import annotations

import torch

from meshwright.plan.layout import Layout
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.grouped import Grouped
from meshwright.train.nn.linear import Linear
from meshwright.train.precision.fp8 import Fp8

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def apply_precision(model: Decoder, layout: Layout) -> None:
    """In FP8, the products of linear layers and experts; head, routers and attention stay in bf16,
    as in arXiv 2412.19437, section 3.3.1."""
    if layout.precision != "fp8":
        return
    arithmetic = Fp8(layout.fp8_scaling)
    for module in model.layers.modules():
        if isinstance(module, Linear | Grouped):
            module.arithmetic = arithmetic
