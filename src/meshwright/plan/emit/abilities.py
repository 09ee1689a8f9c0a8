"""What a framework can do with a layout, as data; what it cannot do is refused in one place.

Each key of a layout is written into the configuration, limited to some values, or left out with a
note. A test holds every framework to having all keys, so that none is dropped by an oversight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout


@dataclass(frozen=True)
class Abilities:
    """`written` takes any value, `limited` the listed ones; `left_out` says why a key has no place
    in the configuration, and becomes a note where the key is set."""

    framework: str
    title: str
    written: frozenset[str]
    limited: Mapping[str, tuple[Any, ...]]
    left_out: Mapping[str, str]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that has been thought of."""
        return self.written | self.limited.keys() | self.left_out.keys()

    def takes(self, key: str, value: object) -> bool:
        """Whether `key` can have `value`."""
        return key in self.written or (key in self.limited and value in self.limited[key])


# Only our own trainer has these, or nobody else calls them the same.
OURS_ALONE: Mapping[str, tuple[Any, ...]] = {
    "domain": (0,),
    "activation_gib": (0.0,),
    "loss_chunk": (0,),
    "expert_replicas": (0,),
    "rebalance_above": (0.0,),
}


def meaning(layout: Layout, spec: ModelSpec) -> dict[str, Any]:
    """The keys of `layout` that change anything, given the others; `zero` is the stage."""
    found = layout.model_dump()
    found["zero"] = layout.zero_stage
    idle = {
        "sp": layout.tp == 1,
        "cp_method": layout.cp == 1,
        "schedule": layout.pp == 1,
        "stages": layout.pp == 1,
        "vpp": layout.schedule != "interleaved",
        "etp": layout.tp == 1 or not spec.n_experts,
        "fp8_scaling": layout.precision != "fp8",
        "recompute_parts": layout.recompute != "selective",
        "activation_gib": layout.recompute != "budget",
    }
    return {key: value for key, value in found.items() if not idle.get(key, False)}


def check(
    abilities: Abilities, layout: Layout, spec: ModelSpec, others: Iterable[Abilities]
) -> tuple[str, ...]:
    """The notes on what is left out. Raises ConfigError for the first value that the framework does
    not take, with what it takes and who takes the value."""
    values = meaning(layout, spec)
    for key, allowed in abilities.limited.items():
        if key in values and values[key] not in allowed:
            takers = [other.framework for other in others if other.takes(key, values[key])]
            elsewhere = f", or write it for {', '.join(takers)}" if takers else ""
            raise ConfigError(
                f"layout.{key}",
                values[key],
                f"{abilities.title} takes {' or '.join(map(repr, allowed))}{elsewhere}",
            )
    return tuple(
        f"layout.{key} = {values[key]!r}: {why}"
        for key, why in abilities.left_out.items()
        if key in values and values[key] not in (None, False, 0, "none", [])
    )


def refuse(key: str, value: object, fix: str) -> ConfigError:
    """The error for a combination that a framework refuses; `fix` names the way out."""
    return ConfigError(f"layout.{key}", value, fix)
