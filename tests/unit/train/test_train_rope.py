"""Rotary tables keep their precision (trainer case 9: theta 500,000, head 128)."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.rope import rope_table, rotate

THETA, HEAD = 500_000.0, 128


def plain_table(seq_len: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    spec = ModelSpec(family="llama", layers=1, hidden=head_dim, heads=1, vocab=1, rope_theta=theta)
    return rope_table(spec, seq_len)


@pytest.mark.parametrize(
    ("position", "as_bf16", "error"),
    [
        (257, 256, 0.859),
        (4095, 4096, 0.870),
        (15_962, 15_936, 0.640),
        (131_071, 131_072, None),
    ],
)
def test_bf16_positions_are_wrong_and_ours_are_right(
    position: int, as_bf16: int, error: float | None
) -> None:
    assert int(torch.tensor(position).bfloat16()) == as_bf16
    cos, sin = plain_table(position + 1, HEAD, THETA)
    if error is not None:
        assert abs(math.cos(as_bf16) - math.cos(position)) == pytest.approx(error, abs=2e-3)
    assert float(cos[position, 0]) == pytest.approx(math.cos(position), abs=1e-7)
    assert float(sin[position, 0]) == pytest.approx(math.sin(position), abs=1e-7)


def test_every_channel_is_right_at_long_context() -> None:
    position = 131_071
    cos, _ = plain_table(position + 1, HEAD, THETA)
    for channel in range(HEAD):
        phase = position * THETA ** (-2 * (channel % (HEAD // 2)) / HEAD)
        assert float(cos[position, channel]) == pytest.approx(math.cos(phase), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "position", "error"),
    [
        (torch.bfloat16, 1000, 1.50),
        (torch.bfloat16, 131_071, 1.96),
        (torch.float32, 4095, 7e-5),
        (torch.float32, 131_071, 1.9e-3),
    ],
)
def test_what_lower_precision_would_cost(kind: torch.dtype, position: int, error: float) -> None:
    """Largest error of a cosine with inverse frequencies and phases in `kind` (bf16: fp32 phases),
    as the report has it; ours is below 1e-6."""
    frequency = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    exact = (position * frequency).cos()
    lowered = (position * frequency.to(kind).float()).cos().double()
    assert float((lowered - exact).abs().max()) == pytest.approx(error, rel=0.1)
    ours, _ = plain_table(position + 1, HEAD, THETA)
    assert float((ours[position, : HEAD // 2].double() - exact).abs().max()) < 1e-6


def test_tables_are_fp32_and_rotation_keeps_type_and_length() -> None:
    cos, sin = plain_table(16, 8, 10_000.0)
    assert cos.dtype == sin.dtype == torch.float32
    x = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone() -> None:
    cos, sin = plain_table(64, 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).unbind()
    at = [rotate(x.expand(1, 1, 64, 8), cos, sin)[0, 0] for x in (q, k)]
    near, far = at[0][5] @ at[1][2], at[0][45] @ at[1][42]
    torch.testing.assert_close(near, far)
