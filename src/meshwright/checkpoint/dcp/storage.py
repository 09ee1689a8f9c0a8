"""A store as the storage of torch.distributed.checkpoint, for any program that calls it:

    dcp.save(state, storage_writer=CommitWriter(store, step))
    dcp.load(state, storage_reader=CommitReader(store.reader(commit)))

DCP's planner decides who writes what and who reads what; layouts may differ.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.dcp.arrays import Array, array_of, tensor_of, torch_dtype
from meshwright.checkpoint.dcp.exchange import META, OBJECT, box, meta_of, objects_of, paths_of
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding


@dataclass(frozen=True)
class _Share:
    """What the coordinator tells each rank: the attempt, and its number in it."""

    attempt: Attempt
    rank: int


class CommitWriter(StorageWriter):
    """Saves a state as one commit of a store, which each rank has opened. After `dcp.save`, the
    coordinator has it as `commit`. `deadline_s`: how long it waits for parts to be seen, which all
    ranks have written by then, in a storage where that takes time."""

    def __init__(
        self,
        store: Store,
        step: int,
        meta: Mapping[str, Any] | None = None,
        branch: str = "main",
        encoding: Encoding | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._store, self._step, self._meta, self._branch = store, step, dict(meta or {}), branch
        self._encoding, self._deadline_s = encoding or Encoding(), deadline_s
        self._attempt: Attempt | None = None
        self.commit: Commit | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: the store is open."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: every rank writes alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank the attempt."""
        self._attempt = Attempt(self._step, f"dcp-{uuid4().hex}", len(plans))
        return [
            replace(plan, storage_data=_Share(self._attempt, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the part of this rank."""
        share: _Share = plan.storage_data
        tensors = dict(_held(item, planner) for item in plan.items)
        self._store.write_part(share.attempt, share.rank, tensors, self._encoding)
        sizes = [array.nbytes for array in tensors.values()]
        done = zip(plan.items, sizes, strict=True)
        return _done([WriteResult(item.index, size, None) for item, size in done])

    def finish(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],  # noqa: ARG002
    ) -> None:
        """Publish the commit."""
        if self._attempt is None:
            raise CheckpointError("nothing was planned: call dcp.save, not finish")
        meta = {**self._meta, META: meta_of(metadata.planner_data or {})}
        self.commit = self._store.commit(self._attempt, meta, self._branch, self._deadline_s)

    @classmethod
    def validate_checkpoint_id(
        cls,
        checkpoint_id: str | os.PathLike[str],  # noqa: ARG003
    ) -> bool:
        """Never asked: DCP does not choose this writer by itself."""
        return False


class CommitReader(StorageReader):
    """Loads a commit; each element that is read is checked as `Reader` does."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._objects = objects_of(reader)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: the reader is open."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Each tensor as one chunk: any box of it can be read."""
        tensors = sorted(set(self._reader.names) - set(self._objects.values()))
        held: dict[str, Any] = {name: self._tensor(name) for name in tensors}
        held |= {name: BytesStorageMetadata() for name in self._objects}
        paths = paths_of(self._reader.meta, list(held))
        return Metadata(held, planner_data=paths, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the reader has all it needs."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank asks for."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                content = self._reader.read(self._objects[item.storage_index.fqn]).tobytes()
                planner.load_bytes(item, io.BytesIO(content))
            else:
                self._load_tensor(item, planner)
        return _done(None)

    def _load_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        shape = self._reader.shape(name)
        wanted = box(name, shape, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        found = tensor_of(self._reader.read_piece(wanted)).reshape(item.lengths)
        if target.dtype != found.dtype:
            raise CheckpointError(
                f"{name}: the commit holds {found.dtype}, {target.dtype} was asked for; "
                "load it as it is, then cast"
            )
        target.copy_(found)
        planner.commit_tensor(item, target)

    def _tensor(self, name: str) -> TensorStorageMetadata:
        size = torch.Size(self._reader.shape(name))
        properties = TensorProperties(torch_dtype(self._reader.dtype(name).name))
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(properties, size, [whole])

    @classmethod
    def validate_checkpoint_id(
        cls,
        checkpoint_id: str | os.PathLike[str],  # noqa: ARG003
    ) -> bool:
        """Never asked: DCP does not choose this reader by itself."""
        return False


def _held(item: WriteItem, planner: SavePlanner) -> tuple[Piece, Array]:
    data, name = planner.resolve_data(item), item.index.fqn
    if isinstance(data, io.BytesIO):
        content = np.frombuffer(data.getbuffer(), np.uint8)
        return Piece.whole(OBJECT + name, content.shape), content
    assert item.tensor_data is not None, "only bytes have none"
    size, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
    return box(name, size, chunk.offsets, chunk.sizes), array_of(data)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
