"""Commits of a training run's state in a folder: every rank writes a file, one rename publishes.

    root/step-000100/       a commit: commit.json and rank-00000.safetensors, rank-00001...
    root/step-000200.tmp/   being written, or left by a run that died: never read

The order of a save is `begin` on one rank, `write_rank` on every rank, `commit` on one rank once
all have written. Whatever moment a process dies at, `commits` lists whole commits only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright.checkpoint.pieces import FloatArray, Piece, check_cover
from meshwright.checkpoint.record import (
    RECORD_NAME,
    Record,
    Stored,
    Tensor,
    dump,
    piece_from_json,
    piece_to_json,
    rank_file,
)

_COMMIT_NAME = re.compile(r"step-(\d{6,})")
_TMP_NAME = re.compile(r"step-(\d{6,})\.tmp")


@dataclass(frozen=True, order=True)
class Commit:
    """A published step."""

    step: int
    path: Path


def begin(root: Path, step: int) -> Path:
    """Make the empty folder that all ranks write step `step` into; what a dead run left goes.

    Raises CheckpointError if the step is committed already or the folder cannot be made.
    """
    _refuse_committed(root, step)
    folder = pending_dir(root, step)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def write_rank(step_tmp_dir: Path, rank: int, tensors: Mapping[Piece, FloatArray]) -> Path:
    """Write what `rank` holds, 1-D float32 arrays of `piece.size`, and wait until it is on disk.

    Raises CheckpointError if an array does not fit its piece or the file cannot be written.
    """
    for piece, data in tensors.items():
        if data.dtype != np.float32 or data.shape != (piece.size,):
            raise CheckpointError(
                f"{piece.key}: got {data.dtype} of shape {data.shape}; "
                f"a piece is float32 of shape ({piece.size},)"
            )
    pieces = [[p.name, list(p.global_shape), *piece_to_json(p)] for p in tensors]
    path = step_tmp_dir / rank_file(rank)
    arrays = {piece.key: np.ascontiguousarray(data) for piece, data in tensors.items()}
    try:
        save_file(arrays, path, metadata={"pieces": json.dumps(pieces)})
        _sync(path)
    except (OSError, SafetensorError) as error:
        raise _unwritable(path, error) from error
    return path


def commit(root: Path, step: int, meta: Mapping[str, Any], ranks: int) -> Commit:
    """Check what `ranks` ranks wrote for `step` and publish it by one rename.

    `meta` is plain JSON that `Reader.meta` gives back (seed, data position, layout label, ...).
    Raises CheckpointError if a rank's file is absent or torn, or if the pieces of a tensor do not
    hold each of its elements exactly once; nothing is published then.
    """
    _refuse_committed(root, step)
    folder, published = pending_dir(root, step), _commit_dir(root, step)
    _check_files(folder, ranks)
    record = Record(
        step=step,
        meta=meta,
        file_bytes=tuple((folder / rank_file(rank)).stat().st_size for rank in range(ranks)),
        tensors=_index(folder, ranks),
    )
    text = dump(record)
    try:
        (folder / RECORD_NAME).write_text(text)
        _sync(folder / RECORD_NAME)
        _sync(folder)
        folder.rename(published)
        _sync(root)
    except OSError as error:
        raise _unwritable(published, error) from error
    return Commit(step, published)


def commits(root: Path) -> list[Commit]:
    """All commits in `root`, oldest first. Empty if there are none, or no such folder."""
    return sorted(
        Commit(step, path)
        for step, path in _folders(root, _COMMIT_NAME)
        if (path / RECORD_NAME).is_file()
    )


def latest(root: Path) -> Commit | None:
    """The newest commit, or None."""
    return max(commits(root), default=None)


def retain(root: Path, keep: int) -> list[Commit]:
    """Delete all but the `keep` newest commits, and unpublished folders that are no newer than the
    newest commit: no save can still be writing those. Returns what was deleted, oldest first."""
    if keep < 1:
        raise ConfigError("checkpoint.keep", keep, "at least 1: the newest commit always stays")
    found = commits(root)
    for step, path in _folders(root, _TMP_NAME):
        if found and step <= found[-1].step:
            shutil.rmtree(path)
    for old in found[:-keep]:
        # Renamed first: a kill inside the removal must not leave half a commit on the list.
        doomed = pending_dir(root, old.step)
        old.path.rename(doomed)
        shutil.rmtree(doomed)
    return found[:-keep]


def _commit_dir(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def pending_dir(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}.tmp"


def _folders(root: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((name.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match[1]), path) for match, path in matches if match]


def _refuse_committed(root: Path, step: int) -> None:
    if _commit_dir(root, step).exists():
        raise CheckpointError(
            f"{_commit_dir(root, step)}: step {step} is committed and commits are never "
            "overwritten; resume from it, or delete the folder"
        )


def _check_files(folder: Path, ranks: int) -> None:
    expected = {rank_file(rank) for rank in range(ranks)}
    present = {path.name for path in folder.glob("*")} - {RECORD_NAME}
    if missing := sorted(expected - present):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {ranks} ranks wrote nothing ({', '.join(missing[:8])}); "
            "commit only after every rank has written"
        )
    if unexpected := sorted(present - expected):
        raise CheckpointError(
            f"{folder}: {', '.join(unexpected[:8])} does not belong to {ranks} ranks; "
            "start the save with an empty folder"
        )


def _index(folder: Path, ranks: int) -> dict[str, Tensor]:
    """Where each tensor lies, from the headers of all files, checked for exact cover."""
    held: dict[str, list[Stored]] = {}
    for rank in range(ranks):
        for piece in _written_pieces(folder / rank_file(rank)):
            held.setdefault(piece.name, []).append(Stored(rank, piece))
    for stored in held.values():
        check_cover([one.piece for one in stored])
    return {
        name: Tensor(stored[0].piece.global_shape, tuple(one for one in stored if one.piece.size))
        for name, stored in sorted(held.items())
    }


def _written_pieces(path: Path) -> list[Piece]:
    try:
        with safe_open(path, framework="np") as file:
            rows = json.loads(file.metadata()["pieces"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: torn or foreign file ({error}); save again") from error
    return [piece_from_json(name, shape, row) for name, shape, *row in rows]


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written ({error}); free space or mend permissions")
