"""Reading a commit under any layout, the one it was written under or another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.base.errors import CheckpointError, did_you_mean
from meshwright.checkpoint.pieces import FloatArray, Piece, Shape, View, transfers
from meshwright.checkpoint.record import RECORD_NAME, Stored, Tensor, load, rank_file, way_out


class Reader:
    """The tensors of one commit.

    Raises CheckpointError, with file and way out, if `commit_dir` holds no commit or one of its
    files is absent or has another size than was committed.
    """

    def __init__(self, commit_dir: Path) -> None:
        self._dir = commit_dir
        self._record = load(commit_dir / RECORD_NAME)
        self._open_files: dict[int, Any] = {}  # of safe_open, which is untyped
        for rank, size in enumerate(self._record.file_bytes):
            self._check_size(commit_dir / rank_file(rank), size)

    @property
    def step(self) -> int:
        """The committed step."""
        return self._record.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the writer gave to `commit`."""
        return self._record.meta

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self._record.tensors)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor. Raises CheckpointError if there is none of that name."""
        return self._tensor(name).shape

    def read(self, name: str) -> FloatArray:
        """A whole tensor, float32 in its global shape. Raises CheckpointError."""
        shape = self.shape(name)
        return self.read_piece(Piece.whole(name, shape)).reshape(shape)

    def read_piece(self, piece: Piece) -> FloatArray:
        """The elements of `piece`, a piece of any layout, 1-D float32. Opens only files that hold
        some of them. Raises CheckpointError if the name is absent or the global shape differs."""
        tensor = self._tensor(piece.name)
        if tensor.shape != piece.global_shape:
            raise CheckpointError(
                f"{self._dir}: {piece.name} has shape {tensor.shape}, {piece.global_shape} was "
                "asked for; set [model] to what the commit was trained with"
            )
        data = np.empty(piece.size, dtype=np.float32)
        for stored in tensor.pieces:
            for source, target in transfers(stored.piece, piece):
                found = source.of(self._read_stretch(stored, source))
                target.of(data[target.start : target.stop])[...] = found
        return data

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._record.tensors[name]
        except KeyError:
            hint = did_you_mean(name, self.names) or "; set [model] to what it was trained with"
            raise CheckpointError(f"{self._dir}: no tensor {name!r}" + hint) from None

    def _read_stretch(self, stored: Stored, view: View) -> FloatArray:
        path = self._dir / rank_file(stored.rank)
        try:
            if stored.rank not in self._open_files:
                self._open_files[stored.rank] = safe_open(path, framework="np")
            stretch = self._open_files[stored.rank].get_slice(stored.piece.key)
            data: FloatArray = stretch[view.start : view.stop]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: {stored.piece.name} cannot be read ({error}); {way_out(self._dir)}"
            ) from error
        return data

    def _check_size(self, path: Path, committed: int) -> None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; {way_out(self._dir)}") from error
        if size != committed:
            raise CheckpointError(
                f"{path}: {size} bytes, {committed} were committed; {way_out(self._dir)}"
            )
