"""A linear layer with seams for its arithmetic and for when its weight gradient is made.

`Arithmetic` does the three matrix products of a linear layer; FP8 is another implementation of it.
`WeightGradients` may put off the product that makes a weight's gradient, since nothing waits for
it: a pipeline fills its bubbles with it, and tensor parallelism hides its collectives behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.train.autograd import apply


class Arithmetic(Protocol):
    """The products of y = x @ w.T on matrices: x [n, k], w [m, k], y and its gradient g [n, m]."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x @ w.T, [n, m]."""

    def grad_input(self, g: Tensor, w: Tensor) -> Tensor:
        """g @ w, [n, k]."""

    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """g.T @ x, [m, k]."""


class Plain:
    """Products in the type of the operands."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x @ w.T, [n, m]."""
        return x @ w.t()

    def grad_input(self, g: Tensor, w: Tensor) -> Tensor:
        """g @ w, [n, k]."""
        return g @ w

    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """g.T @ x, [m, k]."""
        return g.t() @ x


Deliver = Callable[[Tensor], None]


@dataclass
class WeightGradients:
    """Weight gradients put off, in queues: one for each backward pass that is being held.

    While `key` is None nothing is held and `flush` runs what the current pass has queued.
    """

    key: object = None
    _queues: dict[object, list[tuple[Callable[[], Tensor], Deliver]]] = field(default_factory=dict)

    def put(self, make: Callable[[], Tensor], deliver: Deliver) -> None:
        """Queue `make`, which returns a gradient, for the pass under way."""
        self._queues.setdefault(self.key, []).append((make, deliver))

    @property
    def holding(self) -> bool:
        """Whether gradients of the pass under way wait for their own action."""
        return self.key is not None

    def overlap(self) -> None:
        """Work for the time of a collective: what is queued, unless it is being held."""
        if not self.holding:
            self.flush(None)

    def forget(self) -> None:
        """Drop what is queued: its step was interrupted."""
        self.key = None
        self._queues.clear()

    @torch.no_grad()
    def flush(self, key: object) -> None:
        """Make and deliver every gradient of the pass `key`."""
        for make, deliver in self._queues.pop(key, ()):
            deliver(make())


class Linear(nn.Module):
    """y = x @ weight.T + bias. Input [..., n_in], output [..., n_out]; weight [n_out, n_in].

    Shapes are read from the weight, so the same module serves a tensor-parallel slice. With
    `later`, `delivers["weight"]` gets the weight's gradient when its turn has come.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.arithmetic: Arithmetic | None = None
        self.later: WeightGradients | None = None
        self.delivers: dict[str, Deliver] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        """Only x @ weight.T: a partial sum when `weight` is a slice of the input axis."""
        if self.arithmetic is None and (self.later is None or not torch.is_grad_enabled()):
            return F.linear(x, self.weight)
        return apply(_Product, x, self.weight, self)

    def add_bias(self, x: Tensor) -> Tensor:
        """The bias alone, once the partial sums have been added up."""
        return x if self.bias is None else x + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        arithmetic = linear.arithmetic or Plain()
        return arithmetic.forward(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        linear: Linear = ctx.linear
        arithmetic = linear.arithmetic or Plain()
        g, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_x = arithmetic.grad_input(g, weight).view_as(x) if ctx.needs_input_grad[0] else None
        if linear.later is None:
            return grad_x, arithmetic.grad_weight(g, rows), None
        linear.later.put(lambda: arithmetic.grad_weight(g, rows), linear.delivers["weight"])
        return grad_x, None, None
