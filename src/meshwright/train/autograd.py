"""How our own autograd functions are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """The result of `function`, which has one, on `inputs`; torch leaves `Function.apply`
    untyped."""
    untyped: Any = function
    out: Tensor = untyped.apply(*inputs)
    return out
