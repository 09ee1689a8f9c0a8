"""The trainer's state as pieces of whole tensors, to and from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.loading import Leave, load_report
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import FloatArray, Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.record import FIRST_MOMENT, PARAMETER, SECOND_MOMENT
from meshwright.checkpoint.writing import Encoding
from meshwright.train.gradients import counts_here
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.flat import FlatGroup, Slot
from meshwright.train.precision.scaling import LossScale
from meshwright.train.trainer import Trainer

GRADIENT = "gradient/"


def _state(trainer: Trainer) -> Iterator[tuple[FlatGroup, Slot, Piece, Tensor]]:
    """Every piece of parameters and moments this rank holds, with the memory behind it."""
    for group, (m, v) in zip(trainer.data.groups, trainer.optimizer.moments, strict=True):
        for prefix, flat in ((PARAMETER, group.master), (FIRST_MOMENT, m), (SECOND_MOMENT, v)):
            for slot, here, part in group.spans():
                yield group, slot, group.piece(slot, part, prefix), flat[here]


def owned_tensors(trainer: Trainer) -> dict[Piece, Tensor]:
    """The pieces this rank saves, where they live: over all ranks every element exactly once."""
    return {
        piece: values
        for group, slot, piece, values in _state(trainer)
        if counts_here(group, slot, trainer.mesh)
    } | _router_state(trainer)


def owned_state(trainer: Trainer) -> dict[Piece, FloatArray]:
    """What `owned_tensors` names, on the host."""
    return {piece: values.cpu().numpy() for piece, values in owned_tensors(trainer).items()}


def decays(trainer: Trainer) -> dict[str, bool]:
    """Of each tensor that the optimizer updates, its moments included, whether it takes decay."""
    return {piece.name: slot.decay for _, slot, piece, _ in _state(trainer)}


def _router_state(trainer: Trainer) -> dict[Piece, Tensor]:
    """Loads and biases of routers, which all ranks of a stage share: its first rank saves them."""
    mesh = trainer.mesh
    if any((mesh.at.dp_replicate, mesh.at.dp_shard, mesh.at.cp, mesh.at.tp)):
        return {}
    return {
        Piece.whole(name, tuple(values.shape)): values.reshape(-1)
        for name, values in {**trainer.routing.state(), **trainer.replacer.state()}.items()
    }


def save(
    at: StoreAt,
    step: int,
    mesh: Mesh,
    pieces: Mapping[Piece, FloatArray],
    meta: Mapping[str, Any],
) -> None:
    """Commit every rank's `pieces` as step `step` of a store, which is made if there is none;
    returns once it is done. All ranks must call it; it may have been there before.

    Raises CheckpointError.
    """
    store = at.open(create=True)
    attempt = Attempt(step, f"{step:09d}-{mesh.layout.world}", mesh.layout.world)
    store.write_part(attempt, mesh.rank, pieces, Encoding("raw", durable=False))
    mesh.wait_for_all()
    if mesh.rank == 0:
        store.commit(attempt, meta, at.branch)
    mesh.wait_for_all()


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


def load_state(trainer: Trainer, reader: Reader) -> int:
    """Fill parameters and moments from a commit of any layout.

    One that holds weights alone, for a run to start from, leaves moments and loads as they are.
    Returns the step to go on with. Raises CheckpointError if a tensor is missing or has another
    shape.
    """
    weights_only = bool(reader.meta.get("weights_only"))
    trainer.replacer.restore(
        {name: reader.read(name) for name in trainer.replacer.state() if name in reader.names}
    )
    wanted: dict[Piece, list[Tensor]] = {}  # a rank may hold an expert in several places
    for _, _, piece, values in _state(trainer):
        if not weights_only or piece.name.startswith(PARAMETER):
            wanted.setdefault(piece, []).append(values)
    for name, values in trainer.routing.state().items():
        if not weights_only or name in reader.names:
            wanted[Piece.whole(name, tuple(values.shape))] = [values.view(-1)]
    _check(reader, trainer, wanted)
    _fill(reader, wanted)
    trainer.routing.seeded = not weights_only
    if reader.meta.get("precision") == trainer.job.layout.precision:
        trainer.loss_scale = LossScale.from_json(reader.meta["loss_scale"])
    trainer.bad_samples = int(reader.meta.get("bad_samples", 0))
    trainer.optimizer.set_updates_done(reader.meta.get("updates", reader.step))
    trainer.refresh()
    return reader.step


def _check(reader: Reader, trainer: Trainer, wanted: Iterable[Piece]) -> None:
    """Raise CheckpointError unless the commit has all that is `wanted`, of the same shapes and of
    fp32, and nothing of a model that no rank wants."""
    mine = {piece.name: (piece.global_shape, np.float32) for piece in wanted}
    others = tuple(name for name in reader.names if name not in mine)
    load_report(reader, mine, Leave(ignored=others))
    model = [name for name in reader.names if name.startswith(PARAMETER)]
    taken = torch.tensor([float(name in mine) for name in model])
    trainer.mesh.world.all_reduce(taken)
    strange = [name for name, by in zip(model, taken.tolist(), strict=True) if not by]
    if strange:
        raise CheckpointError(
            f"{reader.commit}: has {strange[0]}, which the model has not; set [model] to what the "
            "commit was trained with"
        )


def _fill(reader: Reader, wanted: Mapping[Piece, Sequence[Tensor]]) -> None:
    """Read each piece into the memory that its first tensor has on the host, or by way of some if
    that is elsewhere; the others are copies of it."""
    here = {piece: xs[0].cpu() for piece, xs in wanted.items()}  # itself if it is there
    reader.fill({piece: x.numpy() for piece, x in here.items()})
    for piece, xs in wanted.items():
        for x in xs:
            if x.data_ptr() != here[piece].data_ptr():
                x.copy_(here[piece])
