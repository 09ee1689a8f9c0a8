"""Reading TOML with overrides, and turning pydantic's findings into one clear line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from meshwright.base.errors import ConfigError, InputError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)

# Bad syntax and bad UTF-8 are ValueErrors; so is an integer of thousands of digits.
_NOT_TOML = (ValueError, RecursionError)


class _Table(str):
    """Stands in a message for a table too long to show."""

    __repr__ = str.__str__


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError with path and reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except _NOT_TOML as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in place; the value is TOML, a bare word is a string."""
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError("-o", override, "write it as section.key=value")
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError("-o", override, f"{section!r} is a single value here, not a table")
    table[key] = toml_value(text)


def toml_value(text: str) -> Any:
    try:
        tables = tomllib.loads(f"v = {text}")
    except _NOT_TOML:
        return text.strip()
    return tables["v"] if len(tables) == 1 else text.strip()


def parse(
    schema: type[Model], raw: Mapping[str, Any], prefix: str = "", also: Iterable[str] = ()
) -> Model:
    """`raw` as `schema`. Raises ConfigError for the first thing wrong, keys dotted from `prefix`.

    `also`: keys of this table that the caller has read already; they are only hinted at.
    """
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise _as_config_error(schema, error, prefix, also) from error


def _as_config_error(
    schema: type[BaseModel], error: ValidationError, prefix: str, also: Iterable[str]
) -> ConfigError:
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(_printable(part) for part in ([prefix, *path] if prefix else path))
    if first["type"] == "extra_forbidden":
        known = [*schema_keys(schema, path[:-1]), *(also if len(path) == 1 else ())]
        hint = did_you_mean(path[-1], known) or f"; known here: {', '.join(known)}"
        return ConfigError(key, first["input"], "unknown key" + hint)
    if first["type"] == "missing":
        return ConfigError(key, None, "required; add it to the job file or pass -o")
    if first["type"] == "model_type":
        return ConfigError(key, first["input"], f"must be a table of keys: [{key}]")
    if first["type"] == "value_error":
        return ConfigError(key, _brief(first["input"]), str(first["ctx"]["error"]))
    return ConfigError(key, first["input"], first["msg"][0].lower() + first["msg"][1:])


def _brief(value: object) -> object:
    return _Table("{...}") if isinstance(value, Mapping) else value


def _printable(part: str) -> str:
    return part if part.isprintable() else repr(part)


def schema_keys(schema: type[BaseModel], path: Iterable[str]) -> list[str]:
    """Keys that `schema` knows below `path`."""
    model: type[BaseModel] = schema
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not isinstance(field.annotation, type):
            return []
        if not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """`tables` of scalars, lists and small tables as TOML text; what is None is left out."""
    sections = []
    for name, table in tables.items():
        lines = [f"{key} = {_as_toml(value)}" for key, value in table.items() if value is not None]
        sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _as_toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        inside = (f"{_toml_key(key)} = {_as_toml(item)}" for key, item in value.items())
        return f"{{{', '.join(inside)}}}"
    # JSON's numbers, booleans and short escapes are valid TOML 1.0; its surrogate pairs are not, so
    # text stands as it is, but for the one control character that only TOML refuses.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _as_toml(key)
