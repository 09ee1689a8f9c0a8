"""Where activations go from what every tensor-parallel rank has to each rank's own part, and back.

Modules call `enter` before their split region and `leave` after it. On one rank both do nothing;
`train/parallel/tensor.py` puts the collectives there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Boundary = Callable[[Tensor], Tensor]


def stay(x: Tensor) -> Tensor:
    """The boundary of a single rank."""
    return x
