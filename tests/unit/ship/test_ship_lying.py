"""Exports that copy what lies in a store: the same bytes as if it was read and written anew."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshwright.base.errors import CheckpointError, InputError
from meshwright.checkpoint import keys, spans
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.dcp.arrays import array_of
from meshwright.checkpoint.files import open_files
from meshwright.checkpoint.keys.local import make_key_file
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece, Shape
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.spans import copy_spans, raw_spans
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.checkpoint.writing import Encoding
from meshwright.models.spec import ModelSpec
from meshwright.ship.hf_tensors import Pairs, Part, Weight
from meshwright.ship.hf_weights import hf_weights
from meshwright.ship.start import commit_lies, commit_read, stored_name
from meshwright.ship.tensors import export_tensors
from meshwright.train.nn.decoder import Decoder

RAW = Encoding("raw", chunk_bytes=4096)
Layout = Callable[[str, Shape], list[Piece]]


def whole(name: str, shape: Shape) -> list[Piece]:
    return [Piece.whole(name, shape)]


def by_rows(name: str, shape: Shape) -> list[Piece]:
    """Flat ranges, as data-parallel ranks hold them; they cut rows."""
    size = prod(shape)
    edges = [0, size // 3, size // 2, size]
    zeros = (0,) * len(shape)
    return [Piece(name, shape, zeros, shape, a, b) for a, b in pairwise(edges)]


def by_columns(name: str, shape: Shape) -> list[Piece]:
    """Halves of the last axis, as tensor parallelism holds them."""
    half, front = shape[-1] // 2, (0,) * (len(shape) - 1)
    return [
        Piece(name, shape, (*front, at), (*shape[:-1], size), 0, prod(shape[:-1]) * size)
        for at, size in ((0, half), (half, shape[-1] - half))
    ]


def committed(
    store: Store, tensors: Mapping[str, Array], layout: Layout, encoding: Encoding = RAW
) -> Reader:
    held = {}
    for name, array in tensors.items():
        for piece in layout(name, array.shape):
            flat = array.reshape(-1)[piece.start : piece.stop]
            if piece.box_shape != array.shape:
                sides = zip(piece.box_offset, piece.box_shape, strict=True)
                flat = array[tuple(slice(at, at + size) for at, size in sides)]
            held[piece] = np.ascontiguousarray(flat).reshape(-1)
    attempt = Attempt(1, "a", 1)
    store.write_part(attempt, 0, held, encoding)
    return store.reader(store.commit(attempt, {}))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_SHORTEST_BYTES", 1)


def weights_of(decoder: Decoder) -> dict[str, Array]:
    return {stored_name(n): value.numpy() for n, value in decoder.state_dict().items()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("layout", [whole, by_rows, by_columns])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_a_model_folder_has_the_same_bytes(
    spec: ModelSpec,
    decoder: Decoder,
    export: Callable[..., Path],
    store: Store,
    tmp_path: Path,
    layout: Layout,
    max_shard_bytes: int,
) -> None:
    reader = committed(store, weights_of(decoder), layout)
    lies = commit_lies(reader)
    lying = [weight for weight in hf_weights(spec) if lies(weight) is not None]
    assert len(lying) >= (14 if spec.family == "gpt2" else 18)
    read = commit_read(reader)

    def only_others(name: str) -> Any:
        assert all(name not in {p.name for p in weight.parts} for weight in lying), name
        return read(name)

    shards = {"max_shard_bytes": max_shard_bytes}
    copied = export(read=only_others, lies=lies, out_dir=tmp_path / "copied", **shards)
    plain = export(read=read, out_dir=tmp_path / "plain", **shards)
    assert content(copied) == content(plain)
    shards_written = len(list(copied.glob("*.safetensors")))
    assert shards_written == 1 if max_shard_bytes == 10**9 else shards_written > 1


def test_experts_are_entries_of_one_parameter(store: Store, tmp_path: Path) -> None:
    """Three matrices of a stack: a range of it each, across chunks and pieces."""
    stack = np.arange(3 * 40 * 30, dtype=np.float32).reshape(3, 40, 30)
    reader = committed(store, {"param/e": stack}, by_rows)
    lies = commit_lies(reader)
    for expert in range(3):
        found = lies(Weight(f"e{expert}", (Part("e", (40, 30), expert, 3),)))
        assert found is not None
        assert bytes_at(reader, found, tmp_path / str(expert)) == stack[expert].tobytes()
    both = lies(Weight("both", (Part("e", (40, 30), 2, 3), Part("e", (40, 30), 0, 3))))
    assert both is not None
    assert bytes_at(reader, both, tmp_path / "both") == stack[2].tobytes() + stack[0].tobytes()


def bytes_at(reader: Reader, found: list[spans.Span], path: Path) -> bytes:
    with path.open("w+b") as file:
        copy_spans(reader.holding, found, file.fileno(), 5)
    return path.read_bytes()[5:]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_spans_are_the_bytes_of_any_range_of_any_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    array = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    layouts = [whole, by_rows, by_columns] if shape else [whole]
    layout = data.draw(st.sampled_from(layouts))
    chunk_bytes = data.draw(st.sampled_from([8, 24, 1 << 20]))
    folder = tmp_path_factory.mktemp("spans")
    store = Store.open(folder / "store", create=True)
    reader = committed(store, {"x": array}, layout, Encoding("raw", chunk_bytes=chunk_bytes))
    first = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(first, array.size))
    found = raw_spans(reader, "x", first, stop)
    assert found is not None
    assert bytes_at(reader, found, folder / "out") == array.reshape(-1)[first:stop].tobytes()


def test_short_runs_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros((64, 64), np.float32)
    reader = committed(store, {"x": array}, by_columns)
    assert raw_spans(reader, "x", 0, array.size) is not None
    monkeypatch.setattr(spans, "_SHORTEST_BYTES", 129)
    assert raw_spans(reader, "x", 0, array.size) is None


class Mirrored:
    """A seal that adds no byte."""

    key_id = "mirror"

    def seal(self, plain: Any, bound: bytes) -> bytes:  # noqa: ARG002
        return bytes(plain)[::-1]

    open = seal


def test_only_what_is_stored_as_it_is_lies_there(store: Store, tmp_path: Path) -> None:
    array = np.arange(700)
    reader = committed(store, {"x": array}, whole, Encoding("raw", chunk_bytes=1 << 20))
    (row,) = reader.stored("x")

    def lies(**changed: Any) -> bool:
        rows = [replace(row, **changed)]
        fake = SimpleNamespace(holding=reader.holding, dtype=reader.dtype, stored=lambda _: rows)
        return raw_spans(fake, "x", 0, 700) is not None  # type: ignore[arg-type]

    (chunk,) = row.chunks
    assert lies()
    assert not lies(chunks=(replace(chunk, codec="planes"),))
    assert not lies(chunks=(replace(chunk, bytes=chunk.bytes - 1),))
    assert not lies(of=("x", "y"))
    mirrored = Store.open(tmp_path / "mirrored", Mirrored(), create=True)
    assert raw_spans(committed(mirrored, {"x": array}, whole), "x", 0, 700) is None
    assert Weight("w", (Part("w", (8, 4)),)).stretches() is not None
    assert Weight("w", (Part("w", (8, 4)),), pairs=Pairs(8, 4)).stretches() is None


@pytest.mark.parametrize("kind", ["planes", "sealed", "far", "half"])
def test_what_does_not_lie_as_needed_is_read(
    decoder: Decoder, export: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    arrays, encoding, address, seal = weights_of(decoder), RAW, str(tmp_path / "store"), None
    if kind == "planes":
        encoding = Encoding("planes", chunk_bytes=4096)
    elif kind == "sealed":
        make_key_file(tmp_path / "key")
        seal = keys.open_seal(open_files(address), f"file:{tmp_path / 'key'}")
    elif kind == "far":
        address = f"memory://{tmp_path}"
    else:
        arrays = {name: array.astype(np.float16) for name, array in arrays.items()}
    store = Store.open(address, seal, create=True)
    reader = committed(store, arrays, whole, encoding)
    lies = commit_lies(reader)
    assert all(lies(weight) is None for weight in hf_weights(decoder.spec))
    read = commit_read(reader)
    copied = export(read=read, lies=lies, out_dir=tmp_path / "copied")
    assert content(copied) == content(export(read=read, out_dir=tmp_path / "plain"))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EIO])
def test_file_systems_that_cannot_copy(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    array = np.arange(5000)
    reader = committed(store, {"x": array}, whole)
    found = raw_spans(reader, "x", 0, 5000)
    assert found is not None

    def cannot(*_: object) -> int:
        raise OSError(code, "no")

    monkeypatch.setattr(os, "copy_file_range", cannot)
    if code == errno.EIO:
        with pytest.raises(OSError, match="no"):
            bytes_at(reader, found, tmp_path / "x")
    else:
        assert bytes_at(reader, found, tmp_path / "x") == array.tobytes()


def test_the_kernel_copies(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing. Short copies are gone on with."""
    array, calls = np.arange(5000), []
    reader = committed(store, {"x": array}, whole)
    found = raw_spans(reader, "x", 0, 5000)
    assert found is not None
    kernel = os.copy_file_range

    def short(source: int, target: int, count: int, *where: int) -> int:
        calls.append(count)
        return kernel(source, target, min(count, 1000), *where)

    monkeypatch.setattr(os, "copy_file_range", short)
    assert bytes_at(reader, found, tmp_path / "x") == array.tobytes()
    assert len(calls) == 9 * 5 + 4, "nine chunks of 4096 bytes, one of 3136"


def test_a_flipped_bit_is_not_exported(store: Store, tmp_path: Path) -> None:
    reader = committed(store, {"x": np.arange(5000), "y": np.arange(9)}, whole)
    chunk = reader.stored("x")[0].chunks[7]
    pack = tmp_path / "store" / "packs" / chunk.pack[:2] / chunk.pack
    damaged = bytearray(pack.read_bytes())
    damaged[chunk.at + 100] ^= 1
    pack.write_bytes(damaged)
    with pytest.raises(DamagedCommitError, match="x is damaged: chunk 7"):
        export_tensors(reader, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))


FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 300])
def test_every_dtype_of_safetensors(
    store: Store, tmp_path: Path, codec: str, max_shard_bytes: int
) -> None:
    """Integers among them: ByteDance-Seed/VeOmni#935."""
    expected = {
        name: torch.arange(33).reshape(3, 11).to(getattr(torch, name))
        for name in (*FLOATS, *INTEGERS, "bool", "complex64")
    }
    expected["scalar"] = torch.tensor(7)
    expected["none"] = torch.zeros(0, 3)
    arrays = {n: array_of(value).reshape(value.shape) for n, value in expected.items()}
    reader = committed(store, arrays, whole, Encoding(codec, chunk_bytes=40))
    copied = export_tensors(reader, tmp_path / "out", str.upper, max_shard_bytes)
    size = sum(array.nbytes for array in arrays.values())
    assert copied == (size if codec == "raw" else 0)
    files = list(tmp_path.glob("out/*.safetensors"))
    loaded = {name: value for path in files for name, value in load_file(path).items()}
    assert set(loaded) == {name.upper() for name in expected}
    for name, value in expected.items():
        found = loaded[name.upper()]
        assert found.dtype == value.dtype and found.shape == value.shape
        assert array_of(found).tobytes() == array_of(value).tobytes(), name
    for path in files:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        for name, told in header.items():
            if name != "__metadata__":
                size_of_one = loaded[name].element_size()
                assert told["data_offsets"][0] % size_of_one == 0, "not aligned"
    if max_shard_bytes == 300:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(loaded)
        assert index["metadata"]["total_size"] == size
        assert len(set(index["weight_map"].values())) == len(files) > 3


def test_what_cannot_be_exported_is_named(store: Store, tmp_path: Path) -> None:
    wide = committed(store, {"x": np.zeros(3, np.complex128), "y": np.zeros(3)}, whole)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="x: safetensors has no dtype complex128"):
        export_tensors(wide, out)
    with pytest.raises(InputError, match="another is named z too"):
        export_tensors(two_of(tmp_path), out, lambda _: "z")
    with pytest.raises(InputError, match="none of its tensors is chosen"):
        export_tensors(wide, out, lambda _: None)
    export_tensors(wide, out, lambda name: name if name == "y" else None)
    with pytest.raises(InputError, match="exists; name a new folder"):
        export_tensors(wide, out, lambda name: name if name == "y" else None)


def two_of(tmp_path: Path) -> Reader:
    store = Store.open(tmp_path / "two", create=True)
    return committed(store, {"a": np.zeros(2), "b": np.zeros(2)}, whole)
