"""The trainer's state as pieces of whole tensors, to and from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import store
from meshwright.checkpoint.pieces import FloatArray, Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Commit
from meshwright.train.gradients import counts_here
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.flat import Slot
from meshwright.train.trainer import Trainer

GRADIENT, PARAMETER, FIRST_MOMENT, SECOND_MOMENT = "gradient/", "param/", "adamw.m/", "adamw.v/"


def _state(trainer: Trainer) -> Iterator[tuple[Slot, Piece, Tensor]]:
    """Every piece of parameters and moments this rank holds, with the memory behind it."""
    for group, (m, v) in zip(trainer.data.groups, trainer.optimizer.moments, strict=True):
        for prefix, flat in ((PARAMETER, group.master), (FIRST_MOMENT, m), (SECOND_MOMENT, v)):
            for slot, here, part in group.spans():
                yield slot, group.piece(slot, part, prefix), flat[here]


def owned_state(trainer: Trainer) -> dict[Piece, FloatArray]:
    """The pieces this rank saves: over all ranks every element exactly once."""
    return {
        piece: values.numpy()
        for slot, piece, values in _state(trainer)
        if counts_here(slot, trainer.mesh)
    }


def save(
    root: Path, step: int, mesh: Mesh, pieces: Mapping[Piece, FloatArray], meta: Mapping[str, Any]
) -> Commit | None:
    """Commit every rank's `pieces` as step `step` of the store at `root`; all ranks must call it.

    The commit on rank 0, None on the others. Raises CheckpointError.
    """
    if mesh.rank == 0:
        store.begin(root, step)
    mesh.wait_for_all()
    store.write_rank(store.pending_dir(root, step), mesh.rank, pieces)
    mesh.wait_for_all()
    return store.commit(root, step, meta, mesh.layout.world) if mesh.rank == 0 else None


def owned_gradients(trainer: Trainer, scale: float) -> dict[Piece, FloatArray]:
    """The pieces of the current gradients times `scale` that this rank answers for."""
    return {
        group.piece(slot, part, GRADIENT): (group.grad[here] * scale).numpy()
        for group in trainer.data.groups
        for slot, here, part in group.spans()
        if counts_here(slot, trainer.mesh)
    }


def load_state(trainer: Trainer, commit: Path) -> int:
    """Fill parameters and moments from the checkpoint at `commit`, of any layout.

    Returns the number of updates it has seen, which is the step to go on with. Raises
    CheckpointError if a tensor is missing or has another shape.
    """
    reader = Reader(commit)
    for _, piece, values in _state(trainer):
        values.copy_(torch.from_numpy(reader.read_piece(piece)))
    trainer.optimizer.set_updates_done(reader.step)
    trainer.data.refresh()
    return reader.step
