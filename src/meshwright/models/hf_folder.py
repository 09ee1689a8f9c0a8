"""A Hugging Face folder as the shape of a model to train; its weights are for `ship`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, InputError
from meshwright.models.hf_config import from_config
from meshwright.models.spec import ModelSpec

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"

# What a job may set beside the weights it starts from, for no weight depends on it.
_FREE = (
    *("max_seq_len", "rope_theta", "rope_scaling", "rope_factor", "rope_original_len"),
    *("rope_low_freq", "rope_high_freq", "rope_beta_fast", "rope_beta_slow"),
    *("rope_mscale", "rope_mscale_all_dim"),
    *("capacity_factor", "aux_loss", "seq_aux_loss", "z_loss", "bias_update_rate", "dropout"),
)


def folder_spec(folder: Path) -> ModelSpec:
    """The model that a folder's config.json describes. Raises InputError as `from_config` does."""
    path = folder / CONFIG_NAME
    return from_config(read_json(path), str(path))


def shape(folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `[model]` for a job that starts from `folder` and sets `own` keys besides.

    Routing losses, capacity, dropout and rotary positions may be set, and with rotary positions
    `max_seq_len`. Raises InputError if the folder holds no model of ours, ConfigError on a key
    that contradicts its weights.
    """
    found = folder_spec(folder).model_dump()
    learned = {"max_seq_len"} if found["family"] == "gpt2" else set()
    fixed = found.keys() - {"hf", *_FREE} | learned
    for key, value in own.items():
        if key in fixed and value != found[key]:
            fix = f"model.hf = {str(folder)!r} has weights for {found[key]!r}; leave {key} out"
            raise ConfigError(f"model.{key}", value, fix)
    return {**found, **own, "hf": str(folder)}


def read_json(path: Path) -> dict[str, Any]:
    """The table in a file of a model folder. Raises InputError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        line = f"{path}: cannot be read ({error}); name a model folder"
        raise InputError(" ".join(line.split())) from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a table; name a model folder")
    return content
