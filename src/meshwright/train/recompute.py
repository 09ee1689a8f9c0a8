"""Activations made twice instead of kept: arXiv 1604.06174.

Our own function, since the first use of torch's imports the compiler: 2.4 s of CPU on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.train.autograd import apply
from meshwright.train.nn.passing import Pass

Run = Callable[[Tensor, Pass], Tensor]


def recomputed(run: Run, x: Tensor, about: Pass) -> Tensor:
    """`run(x, about)`, keeping only `x`: the backward pass runs it again, with
    `about.recomputing` set."""
    if not torch.is_grad_enabled():
        return run(x, about)
    return apply(_Recompute, x, run, about)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Run, about: Pass) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.about = run, about
        with torch.no_grad():
            return run(x, about)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        about: Pass = ctx.about
        about.recomputing = True
        try:
            with torch.enable_grad():
                out = ctx.run(x, about)
            torch.autograd.backward(out, grads[0])
        finally:
            about.recomputing = False
        return x.grad, None, None
