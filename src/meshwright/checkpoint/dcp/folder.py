"""Folders that torch.distributed.checkpoint has written, read without running what they hold.

DCP pickles its metadata. Here only the classes that metadata is made of are let in, and tensors are
read by `torch.load(weights_only=True)`; other objects stay the bytes that they are.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from meshwright.base.errors import CheckpointError, InputError, did_you_mean
from meshwright.checkpoint.dcp.arrays import Array, array_of, dtype_name
from meshwright.checkpoint.pieces import Piece, Shape, transfers

_NAME = ".metadata"
_CLASSES = frozenset(
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )
) | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class DcpFolder:
    """The tensors of a folder of DCP, read piece by piece as a `Reader` reads a commit.

    Raises InputError if the folder holds no DCP checkpoint, or metadata that is not DCP's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = _read_metadata(folder / _NAME)
        held = metadata.state_dict_metadata
        self._tensors = {
            name: one
            for name, one in sorted(held.items())
            if isinstance(one, TensorStorageMetadata)
        }
        self.objects = sorted(set(held) - set(self._tensors))
        self.paths: Mapping[str, Any] = metadata.planner_data or {}
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, True)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted; `objects` are those of what is no tensor."""
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor. Raises CheckpointError if there is none of that name."""
        return tuple(self._tensor(name).size)

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype. Raises CheckpointError if there is none of that name."""
        return dtype_name(self._tensor(name).properties.dtype)

    def read(self, name: str) -> Array:
        """A whole tensor in its global shape. Raises CheckpointError."""
        shape = self.shape(name)
        return self.read_piece(Piece.whole(name, shape)).reshape(shape)

    def read_piece(self, piece: Piece) -> Array:
        """The elements of `piece`, 1-D. Raises CheckpointError if they cannot be read."""
        held = self._tensor(piece.name)
        if tuple(held.size) != piece.global_shape:
            raise CheckpointError(
                f"{self._folder}: {piece.name} has shape {tuple(held.size)}, "
                f"{piece.global_shape} was asked for"
            )
        data = array_of(torch.zeros(piece.size, dtype=held.properties.dtype))
        found = 0
        for chunk in held.chunks:
            box = _box(piece.name, piece.global_shape, chunk)
            moves = list(transfers(box, piece))
            source = self._read_chunk(piece.name, chunk) if moves else data[:0]
            for theirs, ours in moves:
                view = theirs.of(source[theirs.start : theirs.stop])
                ours.of(data[ours.start : ours.stop])[...] = view
                found += view.size
        if found != piece.size:
            raise CheckpointError(
                f"{self._folder}: {piece.key}: {found} of {piece.size} elements are there; "
                "the ranks that saved did not all hold a part, or hold some twice"
            )
        return data

    def read_object(self, name: str) -> bytes:
        """The bytes of something that is no tensor, as `torch.save` wrote them."""
        none = torch.Size([])
        index = MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        return cast(bytes, self._load(item))

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Array:
        start = torch.Size([0] * len(chunk.sizes))
        index = MetadataIndex(name, chunk.offsets)
        item = ReadItem(LoadItemType.TENSOR, index, start, index, start, chunk.sizes)
        return array_of(cast(Tensor, self._load(item)))

    def _load(self, item: ReadItem) -> Tensor | bytes:
        name = item.storage_index.fqn
        held = self._tensors.get(name)
        taker = _Taker(held.properties.dtype if held else torch.uint8)
        try:
            self._reader.read_data(LoadPlan([item]), cast(LoadPlanner, taker)).wait()
        except Exception as error:  # torch raises what its parsers raise
            raise CheckpointError(
                f"{self._folder}: {name} cannot be read ({_line(error)}); copy the folder again"
            ) from error
        return taker.taken

    def _tensor(self, name: str) -> TensorStorageMetadata:
        try:
            return self._tensors[name]
        except KeyError:
            hint = did_you_mean(name, self._tensors)
            raise CheckpointError(f"{self._folder}: no tensor {name!r}{hint}") from None


class _Taker:
    """What `FileSystemReader` hands a tensor, or bytes, to."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.taken: Tensor | bytes = b""

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        return torch.empty(item.lengths, dtype=self._dtype)

    def commit_tensor(self, _: ReadItem, tensor: Tensor) -> None:
        self.taken = tensor

    def load_bytes(self, _: ReadItem, value: io.BytesIO) -> None:
        self.taken = value.getvalue()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _CLASSES or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's own never does")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError as error:
        fix = f"no {_NAME} in it: not written by DCP, or not to its end"
        raise InputError(f"{path.parent}: {fix}") from error
    except Exception as error:  # a pickle raises anything
        raise InputError(f"{path}: cannot be read ({_line(error)})") from error
    if not isinstance(found, Metadata):
        raise InputError(f"{path}: not the metadata of a DCP checkpoint")
    return found


def _box(name: str, shape: Shape, chunk: ChunkStorageMetadata) -> Piece:
    sizes = tuple(chunk.sizes)
    return Piece(name, shape, tuple(chunk.offsets), sizes, 0, prod(sizes))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
