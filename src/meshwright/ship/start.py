"""Checkpoints as `read` functions of our names, and the first one of a run from a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.copies import InTurn
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.writing import Encoding
from meshwright.ship.hf import read_hf
from meshwright.ship.hf_weights import Read, hf_weights
from meshwright.ship.lying import Lies


def start_commit(folder: Path, at: StoreAt) -> Commit:
    """Commit the weights in `folder`, and routing biases, as step 0 of a store, which is made if
    there is none.

    Its meta says `weights_only`: there are no moments to go with them. One tensor is held at a
    time. Raises InputError if the folder holds no model of ours, CheckpointError if a tensor cannot
    be read or the commit not be written.
    """
    spec, read = read_hf(folder)
    names = dict.fromkeys(part.name for weight in hf_weights(spec) for part in weight.parts)

    def pieces() -> Iterator[tuple[Piece, Array]]:
        for name in names:
            values = read(name)
            yield Piece.whole(stored_name(name), values.shape), values.ravel()

    store, attempt = at.open(create=True), Attempt(0, f"start-{uuid4().hex}", 1)
    store.write_part(attempt, 0, InTurn(pieces()), Encoding("raw"))
    return store.commit(attempt, {"weights_only": True, "from": str(folder)}, at.branch)


def commit_read(reader: Reader) -> Read:
    """A function that gives a parameter or a routing bias of a commit by our name, whole."""
    return lambda name: reader.read(stored_name(name))


def commit_lies(reader: Reader) -> Lies:
    """What of a commit can be copied into a model folder without being read as numbers."""
    return Lies(reader, stored_name)


def stored_name(name: str) -> str:
    """What a checkpoint calls the parameter, or routing bias, that our decoder calls `name`."""
    if name.endswith(".router.bias"):
        return f"router.bias/{name.removesuffix('.bias')}"
    return f"param/{name}"
