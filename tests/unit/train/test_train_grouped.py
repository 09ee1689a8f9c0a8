"""Products of many experts at once, and the ways of rows to them and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.train.nn.grouped import Grouped, combine, gated, permute, spread
from meshwright.train.nn.linear import Plain, WeightGradients


class Stack(Grouped):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 5, 6, generator=draw))


COUNTS = [3, 0, 1, 4]


@pytest.mark.parametrize("arithmetic", [None, Plain()])
@pytest.mark.parametrize("put_off", [False, True])
def test_grouped_product(arithmetic: Plain | None, put_off: bool) -> None:
    stack, x = Stack(), torch.randn(8, 6, requires_grad=True)
    stack.arithmetic = arithmetic
    delivered: list[Tensor] = []
    if put_off:
        stack.later = WeightGradients()
        stack.delivers["weight"] = delivered.append
    out = stack.product("weight", x, COUNTS)
    grad = torch.randn(8, 5)
    out.backward(grad)
    if put_off:
        assert stack.weight.grad is None and stack.later is not None
        stack.later.flush(None)
    found = delivered[0] if put_off else stack.weight.grad
    weight, other = stack.weight.detach().clone().requires_grad_(), x.detach().requires_grad_()
    parts = other.split(COUNTS)
    expected = torch.cat([part @ w.t() for part, w in zip(parts, weight, strict=True)])
    expected.backward(grad)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(found, weight.grad)
    assert found is not None and not found[1].any()


def test_no_rows_at_all_still_gives_a_gradient() -> None:
    stack = Stack()
    stack.product("weight", torch.zeros(0, 6), [0] * 4).sum().backward()
    assert stack.weight.grad is not None and not stack.weight.grad.any()


def test_spread_and_combine_have_the_gradients_of_their_formulas() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float32, requires_grad=True)
    order = torch.tensor([4, 0, 5, 1, 2])  # assignment 3 has been dropped
    assert torch.autograd.gradcheck(lambda t: spread(t, order, 2), x)
    rows = torch.randn(5, 4, requires_grad=True)
    out = combine(rows, order, weights)
    grad = torch.randn(3, 4)
    found = torch.autograd.grad(out, (rows, weights), grad)
    each = torch.zeros(6, 4).index_copy(0, order, rows).view(3, 2, 4)
    expected = (each * weights[..., None]).sum(1)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, (rows, weights), grad)
    torch.testing.assert_close(found, wanted)


def test_permute_and_gated_have_the_gradients_of_their_formulas() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.autograd.gradcheck(lambda t: permute(t, order, order.argsort()), x)
    up = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: gated(a, b, [1, 0, 3]), (x, up))
    torch.testing.assert_close(gated(x, up, [1, 0, 3]), F.silu(x) * up)


def test_an_expert_computes_the_same_bits_beside_any_neighbours() -> None:
    """The vector code of a CPU rounds the last elements of a run otherwise than the rest."""
    gate, up = torch.randn(9, 7), torch.randn(9, 7)
    together = gated(gate, up, [2, 4, 3])
    apart = [
        gated(g, u, [len(g)])
        for g, u in zip(gate.split([2, 4, 3]), up.split([2, 4, 3]), strict=True)
    ]
    assert torch.equal(together, torch.cat(apart))
