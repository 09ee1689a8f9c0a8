"""Initial weights as a function of (seed, parameter name, global index) alone.

Every element has its own draw, so any slice on any rank of any layout holds the same numbers as the
same elements of a single process. The draw is a counter-based generator: a 64-bit mix (splitmix64,
Steele et al., OOPSLA 2014) of key and index, then Box-Muller in fp64.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec

_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    """A 64-bit pattern as torch's int64 holds it."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; int64's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 patterns; products wrap."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _uniform(key: int, counter: Tensor) -> Tensor:
    """fp64 in (0, 1), one for each int64 counter."""
    word = _mix(counter * _signed(0x9E3779B97F4A7C15) + _signed(key))
    return (_shift_right(word, 11).double() + 0.5) * 2.0**-53


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def uniform(seed: int, name: str, index: Tensor) -> Tensor:
    """fp64 draws from (0, 1), one for each element `index` (int64) of what `name` names."""
    return _uniform(_key(seed, name), index)


def normal(seed: int, name: str, index: Tensor, std: float) -> Tensor:
    """fp32 draws from N(0, std^2), one for each element `index` (int64) of parameter `name`."""
    key = _key(seed, name)
    radius = (-2.0 * _uniform(key, 2 * index).log()).sqrt()
    angle = (2.0 * math.pi) * _uniform(key, 2 * index + 1)
    return (radius * angle.cos() * std).float()


def initial_values(spec: ModelSpec, seed: int, name: str, index: Tensor) -> Tensor:
    """fp32 initial values of the elements `index` (int64, row-major) of parameter `name`.

    Norm weights are 1 and biases 0. Matrices are normal with std 0.02, those that write to the
    residual stream divided by sqrt(2 layers) (GPT-2, Radford et al. 2019, section 2.3).
    """
    *_, module, kind = name.split(".")
    role = kind if module == "experts" else module
    if kind == "bias":
        return torch.zeros(index.shape, device=index.device)
    if role.endswith("norm"):
        return torch.ones(index.shape, device=index.device)
    std = 0.02 / math.sqrt(2 * spec.layers) if role in ("wo", "down") else 0.02
    return normal(seed, name, index, std)
