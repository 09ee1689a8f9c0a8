"""Nested tables as one level of dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
