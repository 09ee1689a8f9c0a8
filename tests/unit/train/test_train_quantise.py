"""Eight-bit numbers with scales: range, saturation, inf and nan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.train.precision.quantise import (
    E4M3,
    E5M2,
    INT8,
    Format,
    Tile,
    next_power_of_two,
    quantise,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", [E4M3, E5M2, INT8], ids=["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_nothing_finite_overflows(form: Format, power_of_two: bool) -> None:
    """From the smallest fp32 number to the largest, also where the division rounds up."""
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1.0, 3.0, 1e30, 3e38])
    x = sizes[:, None] * torch.tensor([1.0, -1.0, 0.3, 0.0])
    result = quantise(x, Tile(1, None), form, power_of_two).dequantise()
    assert result.isfinite().all()
    normal = sizes > 1e-32
    torch.testing.assert_close(result[normal], x[normal], rtol=0.13, atol=0)
    many = randn(4096, 8)
    assert quantise(many, Tile(1, None), form).dequantise().isfinite().all()


@pytest.mark.parametrize("form", [E4M3, E5M2, INT8], ids=["e4m3", "e5m2", "int8"])
def test_the_largest_of_a_tile_is_the_largest_of_the_format(form: Format) -> None:
    """Never beyond, though the division rounds up for some: that would be inf in E5M2."""
    x = randn(4096, 8)
    scale = x.abs().amax(1) / form.largest
    assert (x.abs().amax(1) / scale).gt(form.largest).any()
    assert quantise(x, Tile(1, None), form).values.float().abs().amax(1).eq(form.largest).all()


def test_a_bare_cast_would_hide_inf() -> None:
    """Why the scale has to carry it."""
    bare = torch.tensor([float("inf")]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert bare.isfinite().all()
    assert (
        not quantise(torch.tensor([[float("inf"), 1.0]]), Tile(1, None), E4M3)
        .dequantise()
        .isfinite()
        .any()
    )


def test_powers_of_two_are_exact() -> None:
    exact = torch.exp2(torch.arange(-126.0, 100.0))
    torch.testing.assert_close(next_power_of_two(exact), exact, rtol=0, atol=0)
    above = exact * (1 + 2.0**-23)
    torch.testing.assert_close(next_power_of_two(above), 2 * exact, rtol=0, atol=0)
    scale = quantise(randn(64, 32), Tile(1, None), E4M3, power_of_two=True).scale
    assert torch.frexp(scale).mantissa.eq(0.5).all()
