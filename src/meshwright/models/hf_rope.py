"""Rotary positions in config.json, in the form of transformers 5 and in the one before it.

Keys and what follows where one is absent: `modeling_rope_utils.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import InputError
from meshwright.models.spec import ModelSpec

# Of each kind of scaling: their key, our field, and what stands for an absent key.
_LLAMA3_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("low_freq_factor", "rope_low_freq", None),
    ("high_freq_factor", "rope_high_freq", None),
)
_YARN_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("beta_fast", "rope_beta_fast", 32.0),
    ("beta_slow", "rope_beta_slow", 1.0),
    ("mscale", "rope_mscale", 0.0),
    ("mscale_all_dim", "rope_mscale_all_dim", 0.0),
)
_KEYS = {"llama3": _LLAMA3_KEYS, "yarn": _YARN_KEYS}


def to_rope(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json that say how positions rotate; every version reads this form."""
    keys: dict[str, Any] = {"rope_theta": spec.rope_theta}
    if spec.rope_scaling != "none":
        keys["rope_scaling"] = {
            "rope_type": spec.rope_scaling,
            "factor": spec.rope_factor,
            "original_max_position_embeddings": spec.rope_original_len,
            **{key: getattr(spec, field) for key, field, _ in _KEYS[spec.rope_scaling]},
        }
    return keys


def from_rope(config: Mapping[str, Any], where: str, default_theta: float) -> dict[str, Any]:
    """Our fields of a config.json. Raises InputError on a kind that our decoder does not compute,
    KeyError if something is missing."""
    table, rope = _table(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    shape: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", default_theta))
    }
    if kind == "default":
        return shape
    if kind not in _KEYS:
        raise not_computed(where, f"{table}.rope_type", kind)
    if rope.get("truncate") is False:
        raise not_computed(where, f"{table}.truncate", False)
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or longest
    shape |= {"rope_scaling": kind, "rope_original_len": original}
    shape["rope_factor"] = rope["factor"] or longest / original
    for key, field, default in _KEYS[kind]:
        shape[field] = rope[key] if default is None else rope.get(key) or default
    return shape


def check_gain(spec: ModelSpec, config: Mapping[str, Any], where: str) -> None:
    """Raises InputError if config.json sets another YaRN temperature than the one that follows."""
    table, rope = _table(config)
    gain = rope.get("attention_factor")
    if spec.rope_scaling == "yarn" and gain is not None and abs(gain - spec.rope_gain) > 1e-6:
        raise not_computed(where, f"{table}.attention_factor", gain)


def _table(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Since transformers 5 the settings stand in a table of another name."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    return name, config.get(name) or {}


def not_computed(where: str, key: str, value: object) -> InputError:
    """The error for a setting that our decoder cannot follow."""
    return InputError(
        f"{where}: {key} = {value!r} is not what our decoder computes; use another model"
    )
