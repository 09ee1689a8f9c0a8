"""Whole commits from and to folders of torch.distributed.checkpoint.

What DCP keeps and a store has no place for: objects that are no tensors, pickled by torch, are kept
as they are as tensors `object/NAME` of bytes; where each name stood in the nested state is in the
meta, under "dcp".
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshwright.base.errors import CheckpointError, InputError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.dcp.arrays import Array, tensor_of, torch_dtype
from meshwright.checkpoint.dcp.folder import DcpFolder
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece, Shape
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

OBJECT = "object/"  # before the name of what is no tensor
META = "dcp"
_PART_BYTES = 1 << 30  # held at a time, if no tensor is larger
_CHUNK_BYTES = 1 << 29  # of a tensor, in one entry of a file of DCP

Paths = Mapping[str, Sequence[str | int]]


def import_dcp(
    folder: Path, store: Store, step: int, branch: str = "main", encoding: Encoding | None = None
) -> Commit:
    """Commit what a folder of DCP holds, under the names that it has there.

    Holds 1 GiB or one tensor at a time. Raises InputError if the folder is none of DCP's,
    CheckpointError if a tensor cannot be read or the commit not be written.
    """
    source = DcpFolder(folder)
    parts = list(_parts(source))
    attempt = Attempt(step, f"dcp-{uuid4().hex}", len(parts))
    for rank, names in enumerate(parts):
        store.write_part(attempt, rank, dict(_read(source, names)), encoding or Encoding())
    return store.commit(attempt, {"from": folder.name, META: meta_of(source.paths)}, branch)


def _parts(source: DcpFolder) -> Iterator[list[str]]:
    """Names, objects with their prefix, cut to parts of `_PART_BYTES` or a single tensor."""
    part: list[str] = [OBJECT + name for name in source.objects]
    held = 0
    for name in source.names:
        size = torch_dtype(source.dtype(name)).itemsize * int(np.prod(source.shape(name)))
        if part and held + size > _PART_BYTES:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    yield part


def _read(source: DcpFolder, names: Sequence[str]) -> Iterator[tuple[Piece, Array]]:
    for name in names:
        if name.startswith(OBJECT) and name.removeprefix(OBJECT) in source.objects:
            content = np.frombuffer(source.read_object(name.removeprefix(OBJECT)), np.uint8)
            yield Piece.whole(name, content.shape), content
        else:
            piece = Piece.whole(name, source.shape(name))
            yield piece, source.read_piece(piece)


def meta_of(paths: Paths) -> dict[str, Any]:
    """Where names stood in a nested state, as JSON for the meta of a commit."""
    return {"paths": {name: list(path) for name, path in paths.items()}}


def paths_of(meta: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
    """Inverse of `meta_of`; a name that is not there stands at the top."""
    kept = meta.get(META, {}).get("paths", {})
    return {name: tuple(kept.get(name, (name,))) for name in names}


def objects_of(reader: Reader) -> dict[str, str]:
    """Tensor of the bytes of each object of a commit, by the object's name."""
    found = (name for name in reader.names if name.startswith(OBJECT))
    return {name.removeprefix(OBJECT): name for name in found}


def export_dcp(
    reader: Reader, folder: Path, name_of: Callable[[str], str | None] = lambda name: name
) -> Path:
    """Write a commit as a folder that plain `torch.distributed.checkpoint` loads.

    `name_of` gives the name there of each tensor, None to leave it out. Holds 512 MiB of tensors at
    a time. The folder appears by one rename. Raises InputError if there is one already or two
    tensors get one name, CheckpointError if a tensor cannot be read or the folder not be written.
    """
    if folder.exists():
        raise InputError(f"{folder}: exists; name a new folder")
    planner = _CommitPlanner(reader, name_of)
    tmp = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        _write(planner, tmp)
        tmp.rename(folder)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); free space") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return folder


def _write(planner: SavePlanner, folder: Path) -> None:
    """What `dcp.save` does in a single process."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, overwrite=False)
    writer.reset(folder)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


class _CommitPlanner(SavePlanner):
    """Plans a save of what a reader reads, which is read when it is written."""

    def __init__(self, reader: Reader, name_of: Callable[[str], str | None]) -> None:
        self._reader = reader
        self._objects = objects_of(reader)
        self._tensors: dict[str, str] = {}
        for ours in sorted(set(reader.names) - set(self._objects.values())):
            if theirs := name_of(ours):
                if theirs in self._tensors or theirs in self._objects:
                    raise InputError(f"{ours}: another is named {theirs} too; name it otherwise")
                self._tensors[theirs] = ours

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the state is the reader's."""

    def create_local_plan(self) -> SavePlan:
        """All of the commit."""
        objects = (
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(size))
            for name, ours in self._objects.items()
            for (size,) in [self._reader.shape(ours)]
        )
        tensors = (item for name in self._tensors for item in self._items(name))
        return SavePlan([*objects, *tensors])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The only plan."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = paths_of(self._reader.meta, [*self._tensors, *self._objects])
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A part of a tensor, or the bytes of an object, read now."""
        name = write_item.index.fqn
        if write_item.tensor_data is None:
            return io.BytesIO(self._reader.read(self._objects[name]).tobytes())
        chunk, ours = write_item.tensor_data.chunk, self._tensors[name]
        shape = self._reader.shape(ours)
        array = self._reader.read_piece(box(ours, shape, chunk.offsets, chunk.sizes))
        return tensor_of(array).reshape(chunk.sizes)

    def _items(self, name: str) -> Iterator[WriteItem]:
        ours = self._tensors[name]
        shape, dtype = self._reader.shape(ours), torch_dtype(self._reader.dtype(ours).name)
        for number, (first, rows) in enumerate(_cuts(shape, dtype.itemsize)):
            offsets = torch.Size([first, *[0] * (len(shape) - 1)][: len(shape)])
            sizes = torch.Size([rows, *shape[1:]][: len(shape)])
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
            index = MetadataIndex(name, offsets, number)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _cuts(shape: Shape, itemsize: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each entry; one for a scalar."""
    if not shape or not shape[0]:
        yield 0, shape[0] if shape else 1
        return
    row_bytes = max(1, itemsize * int(np.prod(shape[1:])))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


def box(name: str, shape: Shape, offsets: Sequence[int], sizes: Sequence[int]) -> Piece:
    """The piece that is a whole hyper-rectangle."""
    return Piece(name, shape, tuple(offsets), tuple(sizes), 0, int(np.prod(sizes)))
