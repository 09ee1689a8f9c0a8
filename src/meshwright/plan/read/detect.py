"""Which trainer a file is for, and reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.base.config import read_toml
from meshwright.base.errors import ConfigError, InputError
from meshwright.plan.read import deepspeed, huggingface, megatron, torchtitan
from meshwright.plan.read.arguments import from_text, from_yaml
from meshwright.plan.read.reading import Format, Reading

_DEEPSPEED_KEYS = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
)


def read(path: Path, world: int | None = None, format: Format | None = None) -> Reading:
    """What the file says. `world`: chips, where the file leaves them to the launcher.

    Raises InputError if the file cannot be read or is of no known kind, ConfigError for a key.
    """
    if world is not None and world < 1:
        raise ConfigError("world", world, "must be at least 1 chip")
    kind = format or _kind(path)
    if kind == "torchtitan":
        return torchtitan.read(read_toml(path), path.name, world)
    if kind == "megatron":
        text = _text(path)
        parse = from_yaml if path.suffix in (".yaml", ".yml") else from_text
        return megatron.read(parse(text, path.name), path.name, world)
    raw = _json(path)
    if kind == "deepspeed":
        return deepspeed.read(raw, path.name, world)
    return huggingface.read(raw, path.name, world)


def _kind(path: Path) -> Format:
    if path.suffix == ".toml":
        return "torchtitan"
    if path.suffix != ".json":
        return "megatron"
    raw = _json(path)
    if "model_type" in raw:
        return "huggingface"
    if any(key in raw for key in _DEEPSPEED_KEYS):
        return "deepspeed"
    raise InputError(
        f"{path}: neither a config.json of a model (no model_type) nor a DeepSpeed configuration "
        "(no zero_optimization, no train_batch_size); say which format it has"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file: {error.reason}") from error


def _json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: must be a JSON object, is a {type(raw).__name__}")
    return raw
