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
from meshwright.train.parallel.flat import FlatGroup, Slot
from meshwright.train.precision.scaling import LossScale
from meshwright.train.trainer import Trainer

GRADIENT, PARAMETER, FIRST_MOMENT, SECOND_MOMENT = "gradient/", "param/", "adamw.m/", "adamw.v/"


def _state(trainer: Trainer) -> Iterator[tuple[FlatGroup, Slot, Piece, Tensor]]:
    """Every piece of parameters and moments this rank holds, with the memory behind it."""
    for group, (m, v) in zip(trainer.data.groups, trainer.optimizer.moments, strict=True):
        for prefix, flat in ((PARAMETER, group.master), (FIRST_MOMENT, m), (SECOND_MOMENT, v)):
            for slot, here, part in group.spans():
                yield group, slot, group.piece(slot, part, prefix), flat[here]


def owned_state(trainer: Trainer) -> dict[Piece, FloatArray]:
    """The pieces this rank saves: over all ranks every element exactly once."""
    return {
        piece: values.cpu().numpy()
        for group, slot, piece, values in _state(trainer)
        if counts_here(group, slot, trainer.mesh)
    } | _router_state(trainer)


def _router_state(trainer: Trainer) -> dict[Piece, FloatArray]:
    """Loads and biases of routers, which all ranks of a stage share: its first rank saves them."""
    mesh = trainer.mesh
    if any((mesh.at.dp_replicate, mesh.at.dp_shard, mesh.at.cp, mesh.at.tp)):
        return {}
    return {
        Piece.whole(name, tuple(values.shape)): values.cpu().numpy()
        for name, values in {**trainer.routing.state(), **trainer.replacer.state()}.items()
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
        group.piece(slot, part, GRADIENT): (group.grad[here].float() * scale).cpu().numpy()
        for group in trainer.data.groups
        for slot, here, part in group.spans()
        if counts_here(group, slot, trainer.mesh)
    }


def trainer_meta(trainer: Trainer) -> dict[str, Any]:
    """What a commit's meta must hold besides the pieces: updates that were made (in fp16 some steps
    are skipped), samples left out, and the loss scale with the precision that it is for."""
    return {
        "updates": trainer.optimizer.updates_done,
        "bad_samples": trainer.bad_samples,
        "precision": trainer.job.layout.precision,
        "loss_scale": trainer.loss_scale.as_json(),
    }


def load_state(trainer: Trainer, commit: Path) -> int:
    """Fill parameters and moments from the checkpoint at `commit`, of any layout.

    One that holds weights alone, for a run to start from, leaves moments and loads as they are.
    Returns the step to go on with. Raises CheckpointError if a tensor is missing or has another
    shape.
    """
    reader = Reader(commit)
    weights_only = bool(reader.meta.get("weights_only"))
    trainer.replacer.restore(
        {name: reader.read(name) for name in trainer.replacer.state() if name in reader.names}
    )
    for _, _, piece, values in _state(trainer):
        if not weights_only or piece.name.startswith(PARAMETER):
            values.copy_(torch.from_numpy(reader.read_piece(piece)))
    for name, values in trainer.routing.state().items():
        if not weights_only or name in reader.names:
            values.copy_(torch.from_numpy(reader.read(name)))
    trainer.routing.seeded = not weights_only
    if reader.meta.get("precision") == trainer.job.layout.precision:
        trainer.loss_scale = LossScale.from_json(reader.meta["loss_scale"])
    trainer.bad_samples = int(reader.meta.get("bad_samples", 0))
    trainer.optimizer.set_updates_done(reader.meta.get("updates", reader.step))
    trainer.refresh()
    return reader.step
