"""Checkpoints as `read` functions of our names, and the first one of a run from a model folder."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import store
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Commit
from meshwright.ship.hf import read_hf
from meshwright.ship.hf_weights import Read, hf_weights


def start_commit(folder: Path, root: Path) -> Commit:
    """Commit the weights in `folder`, and routing biases, as step 0 of the store at `root`.

    Its meta says `weights_only`: there are no moments to go with them. One tensor is held at a
    time, and each lies in a file of its own. Raises InputError if the folder holds no model of
    ours, CheckpointError if a tensor cannot be read or the commit not be written.
    """
    spec, read = read_hf(folder)
    names = dict.fromkeys(part.name for weight in hf_weights(spec) for part in weight.parts)
    pending = store.begin(root, 0)
    for number, name in enumerate(names):
        values = read(name)
        piece = Piece.whole(stored_name(name), values.shape)
        store.write_rank(pending, number, {piece: values.ravel()})
    return store.commit(root, 0, {"weights_only": True, "from": str(folder)}, len(names))


def commit_read(commit: Path) -> Read:
    """A function that gives a parameter or a routing bias of a checkpoint by our name, whole."""
    reader = Reader(commit)
    return lambda name: reader.read(stored_name(name))


def stored_name(name: str) -> str:
    """What a checkpoint calls the parameter, or routing bias, that our decoder calls `name`."""
    if name.endswith(".router.bias"):
        return f"router.bias/{name.removesuffix('.bias')}"
    return f"param/{name}"
