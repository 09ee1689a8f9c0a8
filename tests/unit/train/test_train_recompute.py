"""Activations made twice: the same gradients, and nothing counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec
from meshwright.plan.activations import Parts
from meshwright.train.nn.block import Block
from meshwright.train.nn.dropout import Draws
from meshwright.train.nn.moe import MoE
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.rope import rope_table
from meshwright.train.recompute import recomputed

SPEC = ModelSpec.model_validate(
    {
        "family": "mixtral",
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "vocab": 8,
        "n_experts": 4,
        "top_k": 2,
        "expert_ffn_hidden": 8,
        "aux_loss": 0.1,
        "z_loss": 0.1,
        "dropout": 0.2,
    }
)
SEQ = 6


def block() -> tuple[Block, MoE]:
    draw = torch.Generator().manual_seed(0)
    made = Block(SPEC, 0)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3, generator=draw)
    assert isinstance(made.mlp, MoE)
    return made, made.mlp


def a_pass() -> Pass:
    draws = Draws(seed=1, step=2, samples=torch.tensor([3, 4]))
    return Pass(rope_table(SPEC, SEQ), torch.arange(SEQ), draws=draws)


def run(parts: Parts, nested: bool = False) -> dict[str, Any]:
    """Forward and backward of one layer that recomputes `parts`."""
    layer, moe = block()
    layer.recompute = parts
    x = torch.randn(2, SEQ, SPEC.hidden, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    about = a_pass()
    out = recomputed(layer, x, about) if nested else layer(x, about)
    out.backward(torch.ones_like(out))
    assert about.penalty is not None and not about.recomputing
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {**gradients, "x": x.grad, "out": out, "counts": moe.router.counts.clone(),
            "penalty": about.penalty}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "nested"),
    [
        (frozenset({"attention"}), False),
        (frozenset({"mlp"}), False),
        (frozenset({"attention", "mlp"}), False),
        (frozenset({"attention"}), True),
        (frozenset({"attention", "mlp"}), True),
        (Parts(), True),
    ],
)
def test_gradients_losses_and_counts_are_those_of_one_run(parts: Parts, nested: bool) -> None:
    kept, again = run(frozenset()), run(parts, nested)
    assert kept.keys() == again.keys()
    for name, expected in kept.items():
        torch.testing.assert_close(again[name], expected, rtol=1e-6, atol=1e-7, msg=name)
    assert int(again["counts"].sum()) == 2 * SEQ * SPEC.top_k


def test_only_inputs_are_kept() -> None:
    """Tensors that autograd saves, by whether a layer is run again."""

    def saved(parts: Parts) -> int:
        layer, _ = block()
        layer.recompute = parts
        sizes: list[int] = []

        def note(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        x = torch.randn(2, SEQ, SPEC.hidden, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            layer(x, a_pass())
        return sum(sizes)

    assert saved(frozenset({"attention", "mlp"})) == 2 * SEQ * SPEC.hidden
    assert saved(frozenset({"mlp"})) < saved(frozenset())


def test_it_runs_twice_with_gradients_and_once_without() -> None:
    seen: list[bool] = []

    def double(x: Tensor, about: Pass) -> Tensor:
        seen.append(about.recomputing)
        return 2 * x

    about = a_pass()
    x = torch.ones(3, requires_grad=True)
    recomputed(double, x, about).sum().backward()
    assert seen == [False, True]
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3
    with torch.no_grad():
        recomputed(double, x, about)
    assert seen == [False, True, False]


def test_a_failure_does_not_leave_the_pass_recomputing() -> None:
    def fails(x: Tensor, about: Pass) -> Tensor:
        if about.recomputing:
            raise ArithmeticError("the second time")
        return 2 * x

    about = a_pass()
    out = recomputed(fails, torch.ones(3, requires_grad=True), about)
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    assert not about.recomputing
