"""What every source is read as, and the pieces of work a source is cut into."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import DataError


@dataclass(frozen=True)
class Record:
    """One document or sample. `fields` holds it as bytes by name ("png", "caption"); `text` what of
    it is text, if anything is."""

    name: str
    text: str | None = None
    fields: Mapping[str, bytes] = field(default_factory=dict)
    licence: str = ""


@dataclass(frozen=True)
class Keys:
    """Under which names a source with several fields keeps the text and the licence."""

    text: str = "text"
    licence: str = "licence"


ANNOTATIONS = ("metadata.jsonl", "captions.jsonl")
"""Rows about the files beside them, which `file_name` or `file` names, as the ImageFolder of
Hugging Face has them."""


@dataclass(frozen=True)
class Unit:
    """What one process reads in one go: bytes [start, stop) of a file as `form` says, or a folder.

    `about` is what the form needs besides, as the columns of an MDS shard.
    """

    path: Path
    form: str
    start: int
    stop: int
    mtime_ns: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> list[Any]:
        """What must be the same for a part that was built of it to be used again."""
        return [str(self.path), self.form, self.start, self.stop, self.mtime_ns]


def need(module: str, path: Path) -> Any:
    """An optional library. Raises DataError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(f"{path}: reading it needs {name}; install meshwright[data]") from error


def damaged(path: Path, what: object) -> DataError:
    """A source that cannot be read to its end."""
    said = " ".join(str(what).split())
    return DataError(f"{path}: damaged or not of its kind: {said}; fetch it again or leave it out")
