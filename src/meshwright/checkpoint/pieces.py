"""Which elements of a tensor a rank holds, and how they move between two layouts. Geometry only.

A rank holds a *piece*: tensor parallelism gives it a hyper-rectangle of the tensor (the box), and
sharding the flat state over data-parallel ranks gives it a range of that box in row-major order.
Such a range is a handful of hyper-rectangles (*blocks*), at most 2 x dimensions - 1, so moving data
between any two layouts is copying the intersections of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError

Shape = tuple[int, ...]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Block:
    """A hyper-rectangle of the tensor whose elements lie together in a piece's data, from `at`."""

    offset: Shape
    shape: Shape
    at: int


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the row-major box at `box_offset` in the tensor `name`.

    All sizes count elements. Raises CheckpointError if the box or the range does not fit.
    """

    name: str
    global_shape: Shape
    box_offset: Shape
    box_shape: Shape
    start: int
    stop: int

    def __post_init__(self) -> None:
        dimensions = len(self.global_shape)
        fits = len(self.box_offset) == len(self.box_shape) == dimensions and all(
            min(offset, size) >= 0 and offset + size <= whole
            for offset, size, whole in zip(
                self.box_offset, self.box_shape, self.global_shape, strict=True
            )
        )
        if not fits or not 0 <= self.start <= self.stop <= prod(self.box_shape):
            raise CheckpointError(
                f"{self.name}: box of shape {self.box_shape} at {self.box_offset}, elements "
                f"[{self.start}, {self.stop}), does not lie in shape {self.global_shape}; "
                "check the layout that made it"
            )

    @classmethod
    def whole(cls, name: str, shape: Shape) -> Piece:
        """The piece that is all of a tensor."""
        return cls(name, shape, (0,) * len(shape), shape, 0, prod(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def key(self) -> str:
        """`name[0:32, 16:32][128:256]`: box and range as slices; unique within a commit."""
        box = ", ".join(
            f"{offset}:{offset + size}"
            for offset, size in zip(self.box_offset, self.box_shape, strict=True)
        )
        return f"{self.name}[{box}][{self.start}:{self.stop}]"

    def blocks(self) -> tuple[Block, ...]:
        """Its hyper-rectangles in the order of its data."""
        found, at = [], 0
        for offset, shape in _split_range(self.box_shape, self.start, self.stop):
            shifted = tuple(a + b for a, b in zip(offset, self.box_offset, strict=True))
            found.append(Block(shifted, shape, at))
            at += prod(shape)
        return tuple(found)


def _split_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offset and shape of the hyper-rectangles that make up [start, stop) of row-major `shape`:
    the end of a row, whole rows, the beginning of a row."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row_size = prod(rest)
    first, last = -(-start // row_size), stop // row_size
    if first > last:
        yield from _in_row(rest, last, start - last * row_size, stop - last * row_size)
        return
    if start < first * row_size:
        yield from _in_row(rest, first - 1, start - (first - 1) * row_size, row_size)
    if first < last:
        yield (first, *(0,) * len(rest)), (last - first, *rest)
    if last * row_size < stop:
        yield from _in_row(rest, last, 0, stop - last * row_size)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offset, size in _split_range(shape, start, stop):
        yield (row, *offset), (1, *size)


@dataclass(frozen=True)
class View:
    """A strided selection in a piece's data: `data[start:stop]` as `shape`, then `index`."""

    start: int
    shape: Shape
    index: tuple[slice | EllipsisType, ...]

    @property
    def stop(self) -> int:
        """End of the stretch of data that it needs."""
        return self.start + prod(self.shape)

    def of(self, data: FloatArray) -> FloatArray:
        """The selection out of `data`, which is the stretch [start, stop); shares its memory."""
        return data.reshape(self.shape)[self.index]


def transfers(source: Piece, target: Piece) -> Iterator[tuple[View, View]]:
    """Pairs of equal-shaped views: where elements that both pieces hold lie in each one's data."""
    target_blocks = target.blocks()
    for ours in source.blocks():
        for theirs in target_blocks:
            common = _intersection(ours, theirs)
            if common:
                yield _view(ours, *common), _view(theirs, *common)


def _intersection(a: Block, b: Block) -> tuple[Shape, Shape] | None:
    """Offset and end of the elements that both hold, or None."""
    offset = tuple(map(max, a.offset, b.offset))
    end = tuple(
        min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
    empty = any(first >= last for first, last in zip(offset, end, strict=True))
    return None if empty else (offset, end)


def _view(block: Block, offset: Shape, end: Shape) -> View:
    """The part [offset, end) of a block, reaching over no more rows than it has."""
    if not block.shape:
        return View(block.at, (), (...,))
    low = tuple(a - b for a, b in zip(offset, block.offset, strict=True))
    rows, rest = end[0] - offset[0], block.shape[1:]
    index = (
        slice(0, rows),
        *(slice(i, i + b - a) for i, a, b in zip(low[1:], offset[1:], end[1:], strict=True)),
    )
    return View(block.at + low[0] * prod(rest), (rows, *rest), index)


def check_cover(pieces: Sequence[Piece]) -> None:
    """Check that the pieces of one tensor hold each of its elements exactly once.

    Raises CheckpointError naming the tensor and what is missing or held twice.
    """
    name, shape = pieces[0].name, pieces[0].global_shape
    for piece in pieces:
        if piece.global_shape != shape:
            raise CheckpointError(
                f"{name}: one rank says its shape is {shape}, another {piece.global_shape}; "
                "all ranks must write the same model"
            )
    twice = _first_overlap(pieces)
    if twice:
        raise CheckpointError(
            f"{name}: {twice[0].key} and {twice[1].key} hold the same elements; "
            "let one replica write them"
        )
    held = sum(piece.size for piece in pieces)
    if held != prod(shape):
        raise CheckpointError(
            f"{name}: {held} of {prod(shape)} elements of shape {shape} were written; "
            "every element needs a rank that writes it"
        )


def _first_overlap(pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that share an element, or None. Sweeps the blocks along the first dimension."""
    blocks = sorted(
        ((block, piece) for piece in pieces for block in piece.blocks()),
        key=lambda held: held[0].offset,
    )
    for position, (block, piece) in enumerate(blocks):
        for other, owner in islice(blocks, position + 1, None):
            if block.shape and other.offset[0] >= block.offset[0] + block.shape[0]:
                break
            if _intersection(block, other):
                return piece, owner
    return None
