"""FP8 products: against a reference in numpy, bounds, what is not finite, and a training loop."""

from __future__ import annotations

from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.train.nn.linear import Arithmetic, Linear, Plain
from meshwright.train.precision import fp8
from meshwright.train.precision.fp8 import Chip, Fp8, Scaling, chip_of, supports_real
from meshwright.train.precision.quantise import E4M3

Array = NDArray[Any]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
E4M3_BITS = (3, -6, 448.0)  # bits of the fraction, smallest normal exponent, largest
E5M2_BITS = (2, -14, 57344.0)
HOPPER, ADA, BLACKWELL = (Chip(c, (12, 9)) for c in ((9, 0), (8, 9), (10, 0)))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_to(x: Array, bits: tuple[int, int, float]) -> Array:
    """Nearest number of a format that has `bits`, ties to even, in fp64."""
    fraction, smallest, largest = bits
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), smallest)
    step = 2.0 ** (exponent - fraction)
    return np.clip(np.round(x / step) * step, -largest, largest)


def reference_quantised(x: Array, tile: tuple[int, int], bits: tuple[int, int, float]) -> Array:
    """`x` quantised and dequantised tile by tile; scales in fp32 as the recipe says."""
    out = np.zeros(x.shape)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            here = np.s_[i : i + tile[0], j : j + tile[1]]
            scale = np.float32(np.abs(x[here]).max()) / np.float32(bits[2])
            scaled = (x[here].astype(np.float32) / scale).astype(np.float64)
            out[here] = round_to(scaled, bits) * scale
    return out


def reference_products(g: Array, x: Array, w: Array, scaling: Scaling) -> list[Array]:
    """Output, gradient of the input and of the weight by the recipe, in fp64."""
    huge = 10**6
    data = {"tensor": (huge, huge), "row": (1, huge), "block": (1, 128)}[scaling]
    weight = (128, 128) if scaling == "block" else data
    grad_bits = E5M2_BITS if scaling == "tensor" else E4M3_BITS

    def product(a: Array, b: Array, bits: tuple[int, int, float], tile: tuple[int, int]) -> Array:
        left = reference_quantised(a, data, bits)
        return left @ reference_quantised(b, tile, E4M3_BITS).T

    return [
        product(x, w, E4M3_BITS, weight),
        product(g, w.T, grad_bits, weight),
        product(g.T, x.T, grad_bits, data),
    ]


def products(arithmetic: Arithmetic, g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return [
        arithmetic.forward(x, w),
        arithmetic.grad_input(g, w),
        arithmetic.grad_weight(g, x),
    ]


def worst(ours: list[Tensor], theirs: list[Array]) -> float:
    """Largest error of any product, relative to that product's largest number."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(a.double().numpy() - b).max() / np.abs(b).max()) for a, b in pairs)


def sample(n: int, k: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """g [n, m], x [n, k], w [m, k], with rows and columns of very different size."""
    sizes = torch.logspace(-3, 3, n)[:, None]
    return randn(n, m, seed=1) * 1e-4 * sizes, randn(n, k, seed=2) * sizes, randn(m, k, seed=3)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(32, 64, 48), (130, 200, 136), (1, 7, 3)])
def test_equals_the_recipe_in_numpy(scaling: Scaling, shape: tuple[int, int, int]) -> None:
    g, x, w = sample(*shape)
    recipe = reference_products(g.numpy(), x.numpy(), w.numpy(), scaling)
    assert worst(products(Fp8(scaling), g, x, w), recipe) < 2e-6


@pytest.mark.parametrize(
    ("scaling", "other"), [("tensor", "row"), ("row", "block"), ("block", "row")]
)
def test_another_recipe_is_seen(scaling: Scaling, other: Scaling) -> None:
    g, x, w = sample(130, 200, 136)
    recipe = reference_products(g.numpy(), x.numpy(), w.numpy(), other)
    assert worst(products(Fp8(scaling), g, x, w), recipe) > 1e-3


def test_another_format_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    g, x, w = sample(32, 64, 48)
    recipe = reference_products(g.numpy(), x.numpy(), w.numpy(), "tensor")
    monkeypatch.setattr(fp8, "E5M2", E4M3)
    assert worst(products(Fp8("tensor"), g, x, w), recipe) > 1e-3


def errors(a: Tensor, b: Tensor) -> dict[Scaling, float]:
    """Mean over rows of a @ b.T of the relative error, for each scaling."""
    exact = a @ b.t()

    def error(scaling: Scaling) -> float:
        wrong = Fp8(scaling).forward(a, b) - exact
        return float((wrong.norm(dim=1) / exact.norm(dim=1)).mean())

    return {scaling: error(scaling) for scaling in SCALINGS}


def test_rows_beat_a_tensor_where_rows_differ_in_size() -> None:
    x = randn(64, 256)
    x[0] *= 1e6
    error = errors(x, randn(48, 256, seed=1))
    assert error["row"] < 0.05 < 0.5 < error["tensor"]


def test_blocks_beat_a_tensor_and_rows_where_blocks_differ_in_size() -> None:
    x, w = randn(64, 256), randn(48, 256, seed=1)
    x[:, :128] *= 1e6
    w[:, :128] *= 1e-6
    error = errors(x, w)
    assert error["block"] < 0.05 < 0.3 < min(error["row"], error["tensor"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gaussian_data_loses_a_few_percent(scaling: Scaling) -> None:
    assert 0.005 < errors(randn(64, 256), randn(48, 256, seed=1))[scaling] < 0.05


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_stays_so(scaling: Scaling, bad: float, power_of_two: bool) -> None:
    arithmetic = Fp8(scaling, power_of_two)
    for place in range(3):
        operands = sample(32, 64, 48)
        operands[place][5, 7] = bad
        g, x, w = operands
        output, grad_x, grad_w = products(arithmetic, g, x, w)
        assert output.isfinite().all() == (place == 0)
        assert grad_x.isfinite().all() == (place == 1)
        assert grad_w.isfinite().all() == (place == 2)
        plain = products(Plain(), g, x, w)
        for ours, exact in zip((output, grad_x, grad_w), plain, strict=True):
            assert not ours[~exact.isfinite()].isfinite().any()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_and_empty_matrices(scaling: Scaling) -> None:
    g, x, w = torch.zeros(8, 6), torch.zeros(8, 5), randn(6, 5)
    assert all(p.eq(0).all() for p in products(Fp8(scaling), g, x, w))
    shapes = [p.shape for p in products(Fp8(scaling), g[:0], x[:0], w)]
    assert shapes == [(0, 6), (0, 5), (6, 5)]
    assert Fp8(scaling).grad_weight(g[:0], x[:0]).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_type_of_the_operands(dtype: torch.dtype) -> None:
    g, x, w = (t.to(dtype) for t in (randn(8, 6), randn(8, 5), randn(6, 5)))
    assert {p.dtype for p in products(Fp8("row"), g, x, w)} == {dtype}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradients_through_a_linear_layer(scaling: Scaling) -> None:
    layer = Linear(64, 48)
    layer.arithmetic = Fp8(scaling)
    x = randn(2, 16, 64).requires_grad_()
    w, g = randn(48, 64, seed=1), randn(2, 16, 48, seed=2)
    with torch.no_grad():
        layer.weight.copy_(w)
    out = layer(x)
    out.backward(g)
    rows, flat_g = x.detach().flatten(0, 1).numpy(), g.flatten(0, 1).numpy()
    recipe = reference_products(flat_g, rows, w.numpy(), scaling)
    assert x.grad is not None and layer.weight.grad is not None
    ours = [out.detach().flatten(0, 1), x.grad.flatten(0, 1), layer.weight.grad]
    assert worst(ours, recipe) < 2e-6


def train(arithmetic: Arithmetic, steps: int = 30) -> list[float]:
    """Losses of a two-layer network under plain gradient descent."""
    x, y = randn(64, 32), randn(64, 16, seed=1)
    layers = [Linear(32, 64), Linear(64, 16)]
    for i, layer in enumerate(layers):
        layer.arithmetic = arithmetic
        with torch.no_grad():
            layer.weight.copy_(randn(*layer.weight.shape, seed=2 + i) * 0.15)
    losses = []
    for _ in range(steps):
        loss = (layers[1](layers[0](x).tanh()) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for layer in layers:
                assert layer.weight.grad is not None
                layer.weight.sub_(layer.weight.grad, alpha=0.5)
                layer.weight.grad = None
    return losses


def furthest(arithmetic: Arithmetic) -> float:
    """Largest relative distance of its losses from those in fp32."""
    pairs = zip(train(arithmetic), train(Plain()), strict=True)
    return max(abs(ours / exact - 1) for ours, exact in pairs)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_training_follows_fp32(scaling: Scaling, power_of_two: bool) -> None:
    exact = train(Plain())
    assert exact[-1] < 0.7 * exact[0]
    assert furthest(Fp8(scaling, power_of_two)) < 0.02


class _HalfGradient(Fp8):
    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        return super().grad_weight(g, x) / 2


def test_a_faulty_gradient_is_seen() -> None:
    assert furthest(_HalfGradient("row")) > 0.05


def test_which_products_are_real() -> None:
    cases: list[tuple[Chip | None, tuple[int, int, int], Scaling, bool]] = [
        (HOPPER, (64, 128, 256), "tensor", True),
        (HOPPER, (7, 128, 256), "row", True),
        (HOPPER, (64, 120, 256), "row", False),
        (HOPPER, (64, 128, 250), "tensor", False),
        (ADA, (64, 128, 256), "row", True),
        (Chip((8, 0), (12, 9)), (64, 128, 256), "tensor", False),
        (HOPPER, (64, 256, 384), "block", True),
        (HOPPER, (64, 256, 160), "block", False),
        (ADA, (64, 256, 384), "block", False),
        (BLACKWELL, (64, 256, 384), "block", False),
        (Chip((9, 0), (12, 8)), (64, 256, 384), "block", False),
        (None, (64, 256, 384), "tensor", False),
    ]
    for chip, shape, scaling, expected in cases:
        assert supports_real(chip, shape, scaling) is expected, (chip, shape, scaling)
    assert chip_of(torch.device("cpu")) is None


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_torchs_scaled_product_gives_what_is_emulated(
    scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has these two on the CPU as well; a chip is simulated to get them chosen."""
    g, x, w = sample(32, 64, 48)
    emulated = [p.double().numpy() for p in products(Fp8(scaling, emulate=True), g, x, w)]
    scaled_mm = Mock(side_effect=torch.nn.functional.scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8, "chip_of", lambda _: HOPPER)
    of_bf16 = 1e-6 if scaling == "tensor" else 4e-3
    assert worst(products(Fp8(scaling), g, x, w), emulated) < of_bf16
    assert scaled_mm.call_count == 3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_torch_takes_the_layouts(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data, torch checks shapes, types and strides as for a CUDA chip."""
    monkeypatch.setattr(fp8, "chip_of", lambda _: HOPPER)
    for n, k, m in ((256, 384, 128), (128, 128, 640)):
        g, x, w = (torch.empty(s, device="meta") for s in ((n, m), (n, k), (m, k)))
        shapes = [p.shape for p in products(Fp8(scaling), g, x, w)]
        assert shapes == [(n, m), (n, k), (m, k)]


def test_a_wrong_layout_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "chip_of", lambda _: HOPPER)
    monkeypatch.setattr(fp8, "_column_major", Tensor.contiguous)
    x, w = torch.empty(256, 384, device="meta"), torch.empty(128, 384, device="meta")
    with pytest.raises(RuntimeError, match="blockwise scaling"):
        Fp8("block").forward(x, w)
