"""One tensor of a Hugging Face model and the parameters of ours that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError

Array = NDArray[np.float32]
Read = Callable[[str], Array]
Shape = tuple[int, ...]

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Part:
    """One of our parameters, or entry `index` of the `count` along its first axis; `count` 0 is the
    whole of it. `shape` is that of the part, in the convention of torch, [out, in]."""

    name: str
    shape: Shape
    index: int = 0
    count: int = 0

    @property
    def whole(self) -> Shape:
        """Shape of our parameter."""
        return (self.count, *self.shape) if self.count else self.shape

    def take(self, read: Read) -> Array:
        """The part out of our parameter.

        Raises CheckpointError naming a parameter whose shape is not that of the model.
        """
        array = read(self.name)
        if array.shape != self.whole:
            raise CheckpointError(
                f"{self.name}: shape {array.shape}, the model has {self.whole}; "
                "export with the [model] that was trained"
            )
        part: Array = array[self.index] if self.count else array
        return part


@dataclass(frozen=True)
class Pairs:
    """Rows that turn together stand side by side on the side of Hugging Face, half the rotary rows
    apart on ours: the last `rotary` rows of every `head` rows."""

    head: int
    rotary: int

    def pack(self, ours: Array) -> Array:
        """Our rows [n * head, columns] in the order of Hugging Face."""
        return self._turn(ours, (2, self.rotary // 2))

    def unpack(self, theirs: Array) -> Array:
        """The reverse of `pack`."""
        return self._turn(theirs, (self.rotary // 2, 2))

    def _turn(self, rows: Array, grid: tuple[int, int]) -> Array:
        heads = rows.reshape(-1, self.head, rows.shape[-1]).copy()
        turning = heads[:, -self.rotary :]
        turned = turning.reshape(len(heads), *grid, -1).swapaxes(1, 2).reshape(turning.shape)
        heads[:, -self.rotary :] = turned
        return heads.reshape(rows.shape)


@dataclass(frozen=True)
class Weight:
    """One tensor of a Hugging Face model: our `parts` stacked along the first axis, then transposed
    if it is a Conv1D matrix, or its rows put in the order of `pairs`."""

    hf_name: str
    parts: tuple[Part, ...]
    transposed: bool = False
    pairs: Pairs | None = None

    @property
    def shape(self) -> Shape:
        """Shape on the side of Hugging Face."""
        first = self.parts[0].shape
        stacked = (sum(part.shape[0] for part in self.parts), *first[1:])
        return stacked[::-1] if self.transposed else stacked

    @property
    def holds_entry(self) -> bool:
        """Whether this is one entry of a stacked parameter of ours."""
        return self.parts[0].count > 0

    @property
    def size_bytes(self) -> int:
        """Size in fp32."""
        return FLOAT32_BYTES * prod(self.shape)

    def pack(self, read: Read) -> Array:
        """The tensor from our parameters, contiguous fp32.

        Raises CheckpointError naming a parameter whose shape is not that of the model.
        """
        arrays = [part.take(read) for part in self.parts]
        stacked = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if self.pairs is not None:
            stacked = self.pairs.pack(stacked)
        return np.ascontiguousarray(stacked.T if self.transposed else stacked, dtype=np.float32)

    def stretches(self) -> list[tuple[Part, int, int]] | None:
        """The parts whose bytes, one after another, are those of the tensor: elements [first, stop)
        of our whole parameter each. None if elements change places."""
        if self.transposed or self.pairs is not None:
            return None
        sizes = [(part, prod(part.shape)) for part in self.parts]
        return [(part, part.index * size, (part.index + 1) * size) for part, size in sizes]

    def unpack(self, packed: Array, name: str) -> Array:
        """Our parameter `name` (or the entry of it), one of the parts, out of the tensor."""
        stacked = packed.T if self.transposed else packed
        if self.pairs is not None:
            stacked = self.pairs.unpack(stacked)
        start = 0
        for part in self.parts:
            if part.name == name:
                return np.ascontiguousarray(stacked[start : start + part.shape[0]])
            start += part.shape[0]
        raise KeyError(name)
