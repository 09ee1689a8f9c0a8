"""What a load would do, told before it is done: strict unless a word allows otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.base.errors import CheckpointError, did_you_mean
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.pieces import Piece, Shape
from meshwright.checkpoint.reader import Reader

Wanted = Mapping[str, tuple[Shape, Any]]
"""Global shape and dtype of each tensor that is to be filled."""


@dataclass(frozen=True)
class Leave:
    """What a load may do but fill every tensor with what was saved, by patterns of names (`*` is
    any text). `cast`: change the dtype; `missing`: leave a tensor as it is, since the commit has
    none; `ignored`: leave it as it is although the commit has it, or do without what it has."""

    cast: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """What becomes of each tensor: `loaded` as it was saved, `cast` {name: (saved, wanted dtype)},
    `missing` from the commit, `unexpected` in it, `ignored` by a word."""

    loaded: tuple[str, ...]
    cast: Mapping[str, tuple[str, str]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        """One line for a person."""
        parts = [f"{len(self.loaded)} loaded"]
        for word in ("cast", "missing", "unexpected", "ignored"):
            names = tuple(getattr(self, word))
            if names:
                more = ", ..." if len(names) > 3 else ""
                parts.append(f"{len(names)} {word} ({', '.join(names[:3])}{more})")
        return ", ".join(parts)


def load_report(reader: Reader, wanted: Wanted, leave: Leave | None = None) -> LoadReport:
    """What a load of `wanted` does. Raises CheckpointError if a tensor is missing, unexpected, of
    another shape or of another dtype, unless `leave` allows it."""
    leave, saved = leave or Leave(), set(reader.names)
    ignored = {name for name in saved | set(wanted) if _matches(name, leave.ignored)}
    missing = sorted(set(wanted) - saved - ignored)
    unexpected = sorted(saved - set(wanted) - ignored)
    common = sorted((set(wanted) & saved) - ignored)
    cast = {
        name: (reader.dtype(name).name, np.dtype(wanted[name][1]).name)
        for name in common
        if reader.dtype(name) != np.dtype(wanted[name][1])
    }
    for name in common:
        if reader.shape(name) != tuple(wanted[name][0]):
            raise CheckpointError(
                f"{reader.commit}: {name} has shape {reader.shape(name)}, the model "
                f"{tuple(wanted[name][0])}; set [model] to what the commit was trained with"
            )
    _refuse(reader, (n for n in missing if not _matches(n, leave.missing)), unexpected)
    for name, (was, is_wanted) in cast.items():
        if not _matches(name, leave.cast):
            raise CheckpointError(
                f"{reader.commit}: {name} is {was}, the model wants {is_wanted}; load it as {was}, "
                f"or allow the change by `cast = [{name!r}]`"
            )
    loaded = tuple(name for name in common if name not in cast)
    return LoadReport(loaded, cast, tuple(missing), tuple(unexpected), tuple(sorted(ignored)))


def load(reader: Reader, targets: Mapping[Piece, Array], report: LoadReport) -> None:
    """Fill 1-D arrays, those that one rank holds, as `report` says; what is missing or ignored
    stays as it is. Raises CheckpointError."""
    loaded = set(report.loaded)
    reader.fill({piece: into for piece, into in targets.items() if piece.name in loaded})
    for piece, into in targets.items():
        if piece.name in report.cast:
            into[...] = reader.read_piece(piece).astype(into.dtype)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    any_text = (".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    return any(re.fullmatch(pattern, name) for pattern in any_text)


def _refuse(reader: Reader, missing: Iterable[str], unexpected: list[str]) -> None:
    for name in missing:
        hint = did_you_mean(name, unexpected)
        raise CheckpointError(
            f"{reader.commit}: has no {name}, which the model has{hint}; set [model] to what the "
            "commit was trained with, or leave the tensor as it is by `missing`"
        )
    for name in unexpected:
        raise CheckpointError(
            f"{reader.commit}: has {name}, which the model has not; set [model] to what the commit "
            "was trained with, or do without it by `ignored`"
        )
