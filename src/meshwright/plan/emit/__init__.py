"""Runnable configurations of other trainers, and our own job file, from a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.plan.emit import (
    colossalai,
    deepspeed,
    fsdp2,
    job,
    megatron,
    megatron_bridge,
    neuron,
    torchtitan,
    torchtitan_toml,
)
from meshwright.plan.emit.abilities import Abilities, check
from meshwright.plan.emit.plan import Emitted as Emitted
from meshwright.plan.emit.plan import Plan as Plan


def _emitters() -> Mapping[str, tuple[Abilities, Callable[[Plan], Emitted]]]:
    modules: tuple[ModuleType, ...] = (
        torchtitan,
        torchtitan_toml,
        megatron,
        megatron_bridge,
        deepspeed,
        fsdp2,
        colossalai,
        neuron,
        job,
    )
    return {module.ABILITIES.framework: (module.ABILITIES, module.write) for module in modules}


def frameworks() -> tuple[str, ...]:
    """Names that `emit` takes."""
    return tuple(_emitters())


def abilities() -> tuple[Abilities, ...]:
    """What each framework can do with a layout."""
    return tuple(table for table, _ in _emitters().values())


def emit(framework: str, plan: Plan) -> Emitted:
    """A runnable configuration of `framework` for `plan`.

    Raises ConfigError naming the key that the framework, or every trainer, has no way to run, with
    the ways out; what differs only in meaning is in the notes.
    """
    known = _emitters()
    if framework not in known:
        hint = did_you_mean(framework, known) or f"; known: {', '.join(known)}"
        raise ConfigError("framework", framework, "nothing is written for it" + hint)
    plan.checked()
    table, write = known[framework]
    others = [other for name, (other, _) in known.items() if name != framework]
    notes = check(table, plan.layout, plan.spec, others)
    written = write(plan)
    return replace(written, notes=notes + written.notes)
