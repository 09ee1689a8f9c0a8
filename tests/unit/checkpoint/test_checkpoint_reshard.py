"""What is saved under any layout is read under any other, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.pieces import FloatArray, Piece, Shape, check_cover
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import begin, commit, write_rank


@dataclass(frozen=True)
class Split:
    """`tp` slices along `dim`, each flat over `shards` ranks; neither has to divide."""

    dim: int
    tp: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.tp * self.shards


def pieces_of(name: str, shape: Shape, split: Split) -> Iterator[tuple[int, Piece]]:
    """Rank and piece, for every rank of the split; some pieces may be empty."""
    dim = min(split.dim, len(shape) - 1)
    edges = [round(i * shape[dim] / split.tp) for i in range(split.tp + 1)]
    for tp in range(split.tp):
        offset = tuple(edges[tp] if d == dim else 0 for d in range(len(shape)))
        box = tuple(edges[tp + 1] - edges[tp] if d == dim else n for d, n in enumerate(shape))
        chunk = -(-prod(box) // split.shards)
        for shard in range(split.shards):
            start = min(shard * chunk, prod(box))
            stop = min(start + chunk, prod(box))
            yield tp * split.shards + shard, Piece(name, shape, offset, box, start, stop)


def expected(full: FloatArray, piece: Piece) -> FloatArray:
    """The elements of a piece by plain numpy: cut the box out, flatten, cut the range out."""
    box = tuple(slice(o, o + n) for o, n in zip(piece.box_offset, piece.box_shape, strict=True))
    return full[box].ravel()[piece.start : piece.stop]


def save(root: Path, tensors: dict[str, FloatArray], split: Split) -> Path:
    tmp = begin(root, 1)
    held: list[dict[Piece, FloatArray]] = [{} for _ in range(split.ranks)]
    for name, full in tensors.items():
        for rank, piece in pieces_of(name, full.shape, split):
            held[rank][piece] = expected(full, piece)
    for rank, arrays in enumerate(held):
        write_rank(tmp, rank, arrays)
    return commit(root, 1, {}, split.ranks).path


def any_bits(shape: Shape, seed: int) -> FloatArray:
    """Random bits, NaNs with payload and denormals included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size=shape, dtype=np.uint32)
    return bits.view(np.float32)


def same_bits(a: FloatArray, b: FloatArray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
splits = st.builds(Split, st.integers(0, 1), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=3), splits, splits, st.integers(0, 2**32 - 1))
def test_any_layout_reads_what_any_other_wrote(
    all_shapes: list[Shape], source: Split, target: Split, seed: int
) -> None:
    tensors = {f"t{i}": any_bits(shape, seed + i) for i, shape in enumerate(all_shapes)}
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(save(Path(folder), tensors, source))
        assert reader.names == sorted(tensors)
        for name, full in tensors.items():
            assert same_bits(reader.read(name), full)
            for _, piece in pieces_of(name, full.shape, target):
                assert same_bits(reader.read_piece(piece), expected(full, piece))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_blocks_of_a_range_are_its_elements_in_order(shape: Shape, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    piece = Piece("t", shape, (0,) * len(shape), shape, start, stop)
    numbered = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    blocks = piece.blocks()
    assert len(blocks) <= max(1, 2 * len(shape) - 1)
    seen: list[int] = []
    for block in blocks:
        assert block.at == len(seen)
        cut = tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))
        seen += numbered[cut].ravel().tolist()
    assert seen == list(range(start, stop))


def test_scalars_and_empty_tensors_round_trip(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    scalar, empty = Piece.whole("scalar", ()), Piece.whole("empty", (0, 3))
    write_rank(tmp, 0, {scalar: np.ones(1, np.float32), empty: np.zeros(0, np.float32)})
    reader = Reader(commit(tmp_path, 1, {}, 1).path)
    assert same_bits(reader.read("scalar"), np.ones((), np.float32))
    assert same_bits(reader.read("empty"), np.zeros((0, 3), np.float32))


def test_strided_data_is_stored_by_value(tmp_path: Path) -> None:
    strided = np.arange(20, dtype=np.float32)[::2]
    write_rank(begin(tmp_path, 1), 0, {Piece.whole("t", (10,)): strided})
    assert same_bits(Reader(commit(tmp_path, 1, {}, 1).path).read("t"), strided.copy())


def test_cover_refuses_a_gap_an_overlap_and_two_shapes() -> None:
    by_column = [piece for _, piece in pieces_of("w", (6, 5), Split(dim=1, tp=3, shards=2))]
    check_cover(by_column)
    with pytest.raises(CheckpointError, match=r"w: \d+ of 30 elements"):
        check_cover(by_column[:-1])
    with pytest.raises(CheckpointError, match="hold the same elements"):
        check_cover([*by_column, by_column[0]])
    with pytest.raises(CheckpointError, match=r"\(6, 5\), another \(5, 6\)"):
        check_cover([*by_column, Piece.whole("w", (5, 6))])


def test_cover_compares_elements_not_counts() -> None:
    rows = Piece("w", (4, 4), (0, 0), (2, 4), 0, 8)
    columns = Piece("w", (4, 4), (0, 2), (4, 2), 0, 8)
    with pytest.raises(CheckpointError, match="hold the same elements"):
        check_cover([rows, columns])


@pytest.mark.parametrize(
    ("offset", "box", "start", "stop"),
    [
        ((0,), (4, 4), 0, 1),
        ((2, 0), (3, 4), 0, 1),
        ((-1, 0), (2, 4), 0, 1),
        ((0, 0), (4, 4), 3, 2),
        ((0, 0), (4, 4), 0, 17),
        ((0, 0), (4, 4), -1, 2),
    ],
)
def test_a_piece_outside_its_tensor_is_refused(
    offset: Shape, box: Shape, start: int, stop: int
) -> None:
    with pytest.raises(CheckpointError, match="does not lie in shape"):
        Piece("w", (4, 4), offset, box, start, stop)
