"""torch tensors as the arrays that a store holds, and back: same memory, every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import dtype_of

Array = NDArray[Any]


def array_of(tensor: Tensor) -> Array:
    """The elements as a 1-D array of the dtype of that name. Raises CheckpointError for a tensor
    that is not dense, or of a dtype that a store has no name for."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(f"a {kind} tensor cannot be stored; make it dense first")
    flat = tensor.detach().cpu().reshape(-1)
    # Through bytes, since numpy has no bfloat16 of its own.
    array: Array = flat.view(torch.uint8).numpy().view(dtype_of(dtype_name(tensor.dtype)))
    return array


def tensor_of(array: Array) -> Tensor:
    """The elements of a contiguous 1-D array. Raises CheckpointError if torch lacks its dtype."""
    return torch.from_numpy(array.view(np.uint8)).view(torch_dtype(array.dtype.name))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """`torch.bfloat16` of `bfloat16`. Raises CheckpointError if torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch has no dtype {name}; read the commit without it")
    return found
