"""FP8 matrix products for `Linear`: three recipes, on FP8 units or emulated with the same numbers.

- "tensor": one scale a matrix; E4M3, gradients E5M2 (arXiv 2209.05433).
- "row": a scale for each row along the contraction, so that each of the three products quantises
  its operands afresh; E4M3 throughout, as in torchao's row-wise recipe, since with a scale a row
  gradients need precision more than range.
- "block": 1x128 along the contraction, 128x128 for weights; E4M3 throughout (DeepSeek-V3,
  arXiv 2412.19437, section 3.3).

Scales are those of the matrices as this rank holds them in this micro-batch, so two layouts agree
within the error of quantisation, not bit for bit. Chips without FP8 units emulate: quantise,
dequantise, multiply in fp32. There the rounding of operands is the chip's, and only the order of
the fp32 sums differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.train.precision.quantise import E4M3, E5M2, Format, Quantised, Tile, quantise

Scaling = Literal["tensor", "row", "block"]
Quantise = Callable[[Tensor, Tile, Format, bool], Quantised]

_BLOCK = 128


@dataclass(frozen=True)
class Chip:
    """A CUDA chip: its compute capability, and the CUDA version that torch was built for."""

    capability: tuple[int, int]
    cuda: tuple[int, int]


def chip_of(device: torch.device) -> Chip | None:
    """What `device` is, or None if it is no CUDA chip."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return Chip(torch.cuda.get_device_capability(device), (int(major), int(minor)))


def supports_real(chip: Chip | None, shape: tuple[int, int, int], scaling: Scaling) -> bool:
    """Whether torch multiplies [m, k] by [k, n], `shape` = (m, k, n), in FP8 on `chip`.

    FP8 units come with compute capability 8.9, and k and n must be multiples of 16. Products with
    a scale a block are cuBLAS 12.9's, on Hopper alone; only whole blocks are given to them.
    """
    if chip is None:
        return False
    m, k, n = shape
    if scaling == "block":
        hopper = chip.capability[0] == 9 and chip.cuda >= (12, 9)
        return hopper and m % 16 == 0 and k % _BLOCK == 0 and n % _BLOCK == 0
    return chip.capability >= (8, 9) and k % 16 == 0 and n % 16 == 0


@dataclass(frozen=True)
class Fp8:
    """An `Arithmetic` (train/nn/linear.py): operands bf16 or fp32, results in the first's type.

    Matrices that a chip cannot multiply in FP8 are emulated one by one; `emulate` does it for all.
    With a scale a row or a block the chip's results are rounded to bf16. With `power_of_two`
    scales are rounded up to powers of two. `quantise` may be a compiled one.
    """

    scaling: Scaling
    power_of_two: bool = False
    emulate: bool = False
    quantise: Quantise = quantise

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x @ w.T, [n, m]."""
        return self._product(x, w, E4M3, self._weight_tile, fast=True)

    def grad_input(self, g: Tensor, w: Tensor) -> Tensor:
        """g @ w, [n, k]."""
        return self._product(g, w.t(), self._gradient_format, self._weight_tile)

    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """g.T @ x, [m, k]."""
        return self._product(g.t(), x.t(), self._gradient_format, self._data_tile)

    @property
    def _gradient_format(self) -> Format:
        return E5M2 if self.scaling == "tensor" else E4M3

    @property
    def _data_tile(self) -> Tile:
        tiles = {"tensor": Tile(None, None), "row": Tile(1, None), "block": Tile(1, _BLOCK)}
        return tiles[self.scaling]

    @property
    def _weight_tile(self) -> Tile:
        return Tile(_BLOCK, _BLOCK) if self.scaling == "block" else self._data_tile

    def _product(
        self, a: Tensor, b: Tensor, form: Format, b_tile: Tile, fast: bool = False
    ) -> Tensor:
        """a @ b.T for a [m, k] in `form` and b [n, k] in E4M3; `fast`: sum in fewer than 32 bits
        where the chip can, which outputs bear and gradients do not."""
        (m, k), n = a.shape, b.size(0)
        if 0 in (m, k, n):
            return a.new_zeros(m, n)
        if chip_of(a.device) is not None and (m % _BLOCK or k % _BLOCK):
            # Experts get any number of tokens; zeros change neither scales nor products.
            a, b = _padded(a, _BLOCK), F.pad(b, (0, -k % _BLOCK))
            return self._product(a, b, form, b_tile, fast)[:m]
        # Detached: a compiled one would be made twice, for what wants gradients and what does not.
        left = self.quantise(a.detach(), self._data_tile, form, self.power_of_two)
        right = self.quantise(b.detach(), b_tile, E4M3, self.power_of_two)
        if not self.emulate and supports_real(chip_of(a.device), (m, k, n), self.scaling):
            return multiply_real(left, right, self.scaling, a.dtype, fast)
        return (left.dequantise() @ right.dequantise().t()).to(a.dtype)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """`x` with zeros up to a multiple of rows and columns."""
    return F.pad(x, (0, -x.size(1) % multiple, 0, -x.size(0) % multiple))


def multiply_real(
    a: Quantised, b: Quantised, scaling: Scaling, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a @ b.T in `dtype` by torch's scaled product; see `supports_real` for what it takes.

    Layouts of the scales: PyTorch's `torch.nn.functional.scaled_mm` and its checks.
    """
    scale_a, scale_b = a.scale, b.scale
    a_kind = b_kind = F.ScalingType.TensorWise
    if scaling == "row":
        a_kind = b_kind = F.ScalingType.RowWise
        scale_b = scale_b.t()
    elif scaling == "block":
        a_kind = b_kind = F.ScalingType.BlockWise1x128
        scale_a, scale_b = _column_major(scale_a), _column_major(scale_b)
        if b.tile.rows == _BLOCK:
            b_kind = F.ScalingType.BlockWise128x128
            scale_b = F.pad(b.scale, (0, -b.scale.size(1) % 4)).t()
    product: Tensor = F.scaled_mm(
        a.values.contiguous(),
        b.values.contiguous().t(),
        scale_a,
        a_kind,
        scale_b,
        b_kind,
        output_dtype=dtype if scaling == "tensor" else torch.bfloat16,
        use_fast_accum=fast and scaling != "block",
    )
    return product.to(dtype)


def _column_major(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()
