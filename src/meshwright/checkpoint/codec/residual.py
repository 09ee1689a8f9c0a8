"""Differences of float bit patterns as integers: small where a prediction is near, never lossy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.codec.planes import Words


def to_residual(new: Words, predicted: Words, out: Words, scratch: Words) -> Words:
    """new - predicted modulo the word, its sign moved to the lowest bit so that near zero is small
    on both sides (zigzag). `out` and `scratch` are other memory than the inputs."""
    signed = _signed(out)
    np.subtract(new, predicted, out=out)
    np.right_shift(signed, 8 * out.dtype.itemsize - 1, out=_signed(scratch))
    np.left_shift(out, 1, out=out)
    return np.bitwise_xor(out, scratch, out=out)


def add_residual(residual: Words, predicted: Words, scratch: Words) -> None:
    """The inverse of `to_residual`, in the place of `residual`; `scratch` is other memory."""
    np.bitwise_and(residual, 1, out=scratch)
    np.negative(_signed(scratch), out=_signed(scratch))
    np.right_shift(residual, 1, out=residual)
    np.bitwise_xor(residual, scratch, out=residual)
    np.add(residual, predicted, out=residual)


def _signed(words: Words) -> NDArray[np.signedinteger[Any]]:
    signed: NDArray[np.signedinteger[Any]] = words.view(f"<i{words.dtype.itemsize}")
    return signed
