"""Named models. The shapes are data in `presets.toml`, each with its source."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.models.spec import ModelSpec

_PROVENANCE = ("source", "published_params", "published_unit")


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("meshwright.models").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _entry(name: str) -> dict[str, Any]:
    if name not in _table():
        hint = did_you_mean(name, names()) or f"; known: {', '.join(names())}"
        raise ConfigError("model.preset", name, "no such preset" + hint)
    return _table()[name]


def names() -> list[str]:
    """All preset names, in the order of the file."""
    return list(_table())


def shape(name: str) -> dict[str, Any]:
    """The keys of preset `name`, ready for `ModelSpec`. Raises ConfigError on an unknown name."""
    return {key: value for key, value in _entry(name).items() if key not in _PROVENANCE}


def preset(name: str) -> ModelSpec:
    """The model called `name`. Raises ConfigError on an unknown name."""
    return ModelSpec(**shape(name))


def published_params(name: str) -> int | None:
    """Parameters as published or counted in the public checkpoint; None where there is none."""
    return _entry(name).get("published_params")


def published_unit(name: str) -> int:
    """What `published_params` is rounded to, in parameters; 1 where it is exact."""
    unit: int = _entry(name).get("published_unit", 1)
    return unit
