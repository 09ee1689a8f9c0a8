"""Numbers in eight bits with an fp32 scale for each tile of a matrix.

A tile's scale is its largest magnitude over the largest number of the format, so nothing finite
overflows. A tile that holds inf or nan gets a scale that is not finite, and every number of it
dequantises to something that is not finite either: the casts alone would hide it (torch turns inf
into 448 in E4M3), and a loss scale or a loop must see it. Formats: arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32: a tile of zeros divides by it


@dataclass(frozen=True)
class Format:
    """An eight-bit type and the largest magnitude that it is given."""

    dtype: torch.dtype
    largest: float


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)
INT8 = Format(torch.int8, 127.0)


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale; None: all of them."""

    rows: int | None
    columns: int | None

    def of(self, x: Tensor) -> tuple[int, int]:
        """The tile's size for the matrix `x`."""
        return self.rows or x.size(0), self.columns or x.size(1)


@dataclass(frozen=True)
class Quantised:
    """`values` [rows, columns] in eight bits and `scale` fp32, one for each tile."""

    values: Tensor
    scale: Tensor
    tile: Tile

    def dequantise(self) -> Tensor:
        """The fp32 matrix that this stands for."""
        rows, columns = self.values.shape
        tiled = _tiled(self.values.float(), self.tile) * self.scale[:, None, :, None]
        return tiled.flatten(2).flatten(0, 1)[:rows, :columns]


def quantise(x: Tensor, tile: Tile, form: Format, power_of_two: bool = False) -> Quantised:
    """`x` [rows, columns], neither 0, in `form`; rounds to nearest even.

    Tiles at the lower and right edge may be incomplete. With `power_of_two` scales are rounded up
    to one, which makes scaling itself exact.
    """
    tiled = _tiled(x, tile)
    scale = tiled.abs().amax((1, 3)).float() / form.largest
    scale = scale.clamp(min=_SMALLEST_SCALE)
    if power_of_two:
        scale = next_power_of_two(scale)
    # No clamp: a quotient exceeds the largest by its own rounding at most, and rounds back to it.
    scaled = tiled / scale[:, None, :, None]
    if not form.dtype.is_floating_point:
        scaled = scaled.round_().nan_to_num_()  # integers have no nan; the scale says it
    values = scaled.to(form.dtype).flatten(2).flatten(0, 1)
    return Quantised(values[: x.size(0), : x.size(1)], scale, tile)


def next_power_of_two(x: Tensor) -> Tensor:
    """Each positive number of `x` rounded up to a power of two, exactly; inf and nan become nan."""
    mantissa, _ = torch.frexp(x)
    return torch.where(mantissa == 0.5, x, x / mantissa)


def _tiled(x: Tensor, tile: Tile) -> Tensor:
    """`x` as [row tiles, rows, column tiles, columns], padded with zeros to whole tiles."""
    rows, columns = tile.of(x)
    below, right = -x.size(0) % rows, -x.size(1) % columns
    if below or right:
        x = F.pad(x, (0, right, 0, below))
    shape = (x.size(0) // rows, rows, x.size(1) // columns, columns)
    tiled: Tensor = x.unflatten(0, shape[:2]).unflatten(2, shape[2:])
    return tiled
