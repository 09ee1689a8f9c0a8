"""`commit.json`: what a committed step holds and where, so that a reader opens only what it needs.

{"format": 1, "step": 100, "meta": {...},
 "file_bytes": [size of each rank's file, in bytes],
 "tensors": {name: {"shape": [...],
                    "pieces": [[rank, box_offset, box_shape, start, stop], ...]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.pieces import Piece, Shape

FORMAT = 1
RECORD_NAME = "commit.json"


@dataclass(frozen=True)
class Stored:
    """A piece and the rank whose file holds it."""

    rank: int
    piece: Piece


@dataclass(frozen=True)
class Tensor:
    """One tensor of a commit; `pieces` hold each of its elements exactly once."""

    shape: Shape
    pieces: tuple[Stored, ...]


@dataclass(frozen=True)
class Record:
    """The content of `commit.json`. `file_bytes[rank]` is the size of that rank's file."""

    step: int
    meta: Mapping[str, Any]
    file_bytes: tuple[int, ...]
    tensors: Mapping[str, Tensor]


def rank_file(rank: int) -> str:
    """Name of the file that holds what `rank` wrote."""
    return f"rank-{rank:05d}.safetensors"


def piece_to_json(piece: Piece) -> list[Any]:
    """A piece without its tensor's name and shape."""
    return [list(piece.box_offset), list(piece.box_shape), piece.start, piece.stop]


def piece_from_json(name: str, shape: Sequence[int], raw: Sequence[Any]) -> Piece:
    """Inverse of `piece_to_json`."""
    box_offset, box_shape, start, stop = raw
    return Piece(name, tuple(shape), tuple(box_offset), tuple(box_shape), start, stop)


def dump(record: Record) -> str:
    """A record as the text of `commit.json`."""
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "pieces": [[held.rank, *piece_to_json(held.piece)] for held in tensor.pieces],
        }
        for name, tensor in record.tensors.items()
    }
    return json.dumps(
        {
            "format": FORMAT,
            "step": record.step,
            "meta": record.meta,
            "file_bytes": record.file_bytes,
            "tensors": tensors,
        }
    )


def load(path: Path) -> Record:
    """Read `commit.json`. Raises CheckpointError naming the file and the way out."""
    try:
        raw = json.loads(path.read_text())
        written = raw["format"]
        if written == FORMAT:
            return _parse(raw)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: no commit here ({path.name} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); {way_out(path.parent)}"
        ) from error
    raise CheckpointError(
        f"{path}: format {written}, this version reads format {FORMAT}; "
        "use the version of Meshwright that wrote it"
    )


def _parse(raw: Mapping[str, Any]) -> Record:
    tensors = {}
    for name, entry in raw["tensors"].items():
        pieces = (
            Stored(rank, piece_from_json(name, entry["shape"], piece))
            for rank, *piece in entry["pieces"]
        )
        tensors[name] = Tensor(tuple(entry["shape"]), tuple(pieces))
    return Record(raw["step"], raw["meta"], tuple(raw["file_bytes"]), tensors)


def way_out(commit_dir: Path) -> str:
    """What to do about a damaged commit."""
    return f"restore it from a copy, or delete {commit_dir} to go on from the commit before"
