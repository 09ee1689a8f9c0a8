"""What is saved under any layout is read under any other, bit for bit."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import Array, Split, fresh, part_of, pieces_of, relative, save, write

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import dtype_of
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece, Shape, check_cover
from meshwright.checkpoint.writing import Encoding


def any_bits(shape: Shape, dtype: str, seed: int) -> Array:
    """Random bits, NaNs with payload and denormals included."""
    size = prod(shape) * np.dtype(dtype).itemsize
    found: Array = np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)
    return found


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


dtypes = st.sampled_from(["float32", "float16", "int64", "uint8", "complex64"])
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
splits = st.builds(Split, st.integers(0, 1), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=3),
    splits,
    splits,
    st.integers(1, 64),
    st.integers(0, 2**32 - 1),
)
def test_any_layout_reads_what_any_other_wrote(
    kinds: list[tuple[Shape, str]], source: Split, target: Split, chunk_bytes: int, seed: int
) -> None:
    state = {f"t{i}": any_bits(*kind, seed + i) for i, kind in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as folder:
        store = fresh(folder)
        encoding = Encoding(chunk_bytes=chunk_bytes, durable=False)
        reader = store.reader(save(store, 1, state, source, encoding))
        assert reader.names == sorted(state)
        for name, full in state.items():
            assert same_bits(reader.read(name), full)
            for _, piece in pieces_of(name, full.shape, target):
                assert same_bits(reader.read_piece(piece), part_of(full, piece))


@pytest.mark.parametrize("shape", [(7, 3), (65, 4), (65,), (1, 5)])
@pytest.mark.parametrize("relative_to_parent", [False, True])
def test_sizes_that_do_not_divide(tmp_path: Path, shape: Shape, relative_to_parent: bool) -> None:
    """Fast-LLM#436, accelerate#3971, torchtitan#1136: (dp, tp, pp) of (4, 1, 1), (2, 2, 1) and
    (1, 2, 2), of which the store sees tp and how many ranks share what is left."""
    layouts = [Split(0, 1, 4), Split(0, 2, 2), Split(1, 2, 1), Split(0, 3, 3), Split()]
    names = [f"{prefix}w" for prefix in ("param/", "adamw.m/", "adamw.v/")]
    for number, source in enumerate(layouts):
        store = fresh(tmp_path / str(number))
        state = {name: any_bits(shape, "float32", n) for n, name in enumerate(names)}
        commit = save(store, 1, state, source, Encoding(chunk_bytes=32, durable=False))
        if relative_to_parent:
            base = state
            state = {name: any_bits(shape, "float32", 9 + n) for n, name in enumerate(names)}
            commit = save(store, 2, state, source, relative(2), base)
            assert commit.depth == 1
        reader = store.reader(commit)
        for target in layouts:
            for name, full in state.items():
                for _, piece in pieces_of(name, shape, target):
                    assert same_bits(reader.read_piece(piece), part_of(full, piece))


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
    store = fresh(tmp_path)
    state: dict[str, Any] = {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 3), "i8")}
    for split in (Split(), Split(0, 1, 3)):
        reader = store.reader(save(store, 1, state, split))
        for name, full in state.items():
            assert same_bits(reader.read(name), full)


def test_strided_data_is_stored_by_value(tmp_path: Path) -> None:
    store, strided = fresh(tmp_path), np.arange(20, dtype=np.float32)[::2]
    reader = store.reader(save(store, 1, {"t": strided}))
    assert same_bits(reader.read("t"), strided.copy())


def test_formats_that_numpy_has_not(tmp_path: Path) -> None:
    store, state = fresh(tmp_path), {"w": np.arange(7).astype(ml_dtypes.bfloat16)}
    reader = store.reader(save(store, 1, state))
    assert reader.dtype("w").name == "bfloat16"
    assert same_bits(reader.read("w"), state["w"])


def test_only_chunks_that_are_wanted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fresh(tmp_path)
    state = {"w": np.arange(1000, dtype=np.float32)}
    reader = store.reader(save(store, 1, state, encoding=Encoding(chunk_bytes=40)))
    assert reader.names == ["w"]
    asked: list[int] = []
    read, read_into = LocalFiles.read, LocalFiles.read_into

    def counting(self: LocalFiles, name: str, start: int = 0, stop: int | None = None) -> bytes:
        asked.append((stop or 0) - start)
        return read(self, name, start, stop)

    def counting_into(self: LocalFiles, name: str, start: int, into: memoryview) -> int:
        asked.append(len(into))
        return read_into(self, name, start, into)

    monkeypatch.setattr(LocalFiles, "read", counting)
    monkeypatch.setattr(LocalFiles, "read_into", counting_into)
    piece = Piece("w", (1000,), (0,), (1000,), 15, 32)
    assert reader.read_piece(piece).tolist() == list(range(15, 32))
    assert asked == [40, 40, 40]


def test_a_wrong_shape_or_name_is_told(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    reader = store.reader(save(store, 1))
    with pytest.raises(CheckpointError, match=r"w0 has shape \(7, 3\), \(3, 7\) was asked"):
        reader.read_piece(Piece.whole("param/w0", (3, 7)))
    with pytest.raises(CheckpointError, match="did you mean"):
        reader.read("param/w00")
    with pytest.raises(CheckpointError, match=r"float32 of shape .* into float64"):
        reader.fill({Piece.whole("param/w0", (7, 3)): np.empty(21)})


def test_the_input_is_never_changed(tmp_path: Path) -> None:
    """zipnn 0.5.4: `compress` changes the bytes of its caller."""
    for codec in ("raw", "planes"):
        try:
            encoding = Encoding(codec, chunk_bytes=100, durable=False)
            store = fresh(tmp_path / codec)
            state = {"w": any_bits((40, 5), "float32", 1)}
            base = {"w": any_bits((40, 5), "float32", 2)}
            for one in (*state.values(), *base.values()):
                one.flags.writeable = False
            kept = [one.tobytes() for one in (*state.values(), *base.values())]
            parent = save(store, 1, base, encoding=encoding)
            store.commit(write(store, 2, state, encoding=relative(2), base=base, parent=parent), {})
        except CheckpointError as error:
            assert "unknown" in str(error)
            continue
        assert [one.tobytes() for one in (*state.values(), *base.values())] == kept


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


def test_ranks_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 2: there are 2"):
        fresh(tmp_path).write_part(Attempt(1, "a", 2), 2, {})


@pytest.mark.parametrize("name", ["object", "finfo", "no_such_dtype"])
def test_only_dtypes_of_numbers_are_known(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        dtype_of(name)
