"""Initial weights: the same for any slice, distinct between names and seeds, and normal."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.presets import preset
from meshwright.train.init import initial_values, normal


@settings(deadline=None)
@given(start=st.integers(0, 2**40), size=st.integers(1, 64), cut=st.integers(0, 64))
def test_a_slice_has_the_values_of_the_whole(start: int, size: int, cut: int) -> None:
    index = torch.arange(start, start + size)
    whole = normal(3, "w", index, 1.0)
    assert torch.equal(
        torch.cat((normal(3, "w", index[:cut], 1.0), normal(3, "w", index[cut:], 1.0))), whole
    )


def test_draws_are_normal_and_independent() -> None:
    index = torch.arange(1_000_000)
    x = normal(0, "layers.0.attn.wq.weight", index, 1.0).double()
    assert abs(float(x.mean())) < 4e-3
    assert abs(float(x.std()) - 1) < 3e-3
    assert abs(float((x**4).mean()) - 3) < 0.05
    assert abs(float((x[1:] * x[:-1]).mean())) < 4e-3
    other = normal(0, "layers.0.attn.wk.weight", index, 1.0).double()
    assert abs(float((x * other).mean())) < 4e-3
    assert not torch.equal(normal(1, "layers.0.attn.wq.weight", index, 1.0).double(), x)


def test_kinds_of_parameter() -> None:
    spec, index = preset("tiny"), torch.arange(4096)
    assert set(initial_values(spec, 0, "norm.weight", index).tolist()) == {1.0}
    assert set(initial_values(spec, 0, "layers.0.attn_norm.weight", index).tolist()) == {1.0}
    assert set(initial_values(spec, 0, "layers.0.attn.wq.bias", index).tolist()) == {0.0}
    inner = float(initial_values(spec, 0, "layers.0.mlp.up.weight", index).std())
    outer = float(initial_values(spec, 0, "layers.0.mlp.down.weight", index).std())
    assert abs(inner / outer - (2 * spec.layers) ** 0.5) < 0.2
