"""Text that every emitter needs: TOML, launch lines, settings of a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.models.hf_config import to_config
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit.plan import Plan

PORT = 29500


def toml(tables: Mapping[str, Mapping[str, Any]], heading: str) -> str:
    """Tables of plain values as TOML below a comment. JSON's scalars and lists are TOML too."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


def torchrun(plan: Plan, what: str) -> str:
    """The command for one machine; `$HOST` is the first of them, the same on all."""
    start = f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.per_node}"
    if plan.nodes == 1:
        return f"{start} --standalone {what}"
    return f"{start} --rdzv-backend c10d --rdzv-endpoint $HOST:{PORT} {what}"


def config_json(spec: ModelSpec) -> str:
    """`config.json` of Hugging Face. Raises ConfigError where the format lacks something."""
    return json.dumps(to_config(spec, end_of_text=spec.vocab - 1), indent=2) + "\n"


def heading(plan: Plan, framework: str) -> str:
    """What the file is, for its reader."""
    return (
        f"{plan.name}: {plan.layout.label} on {plan.cluster.name}, "
        f"{plan.global_batch} sequences of {plan.seq_len} tokens a step.\n"
        f"Written by Meshwright for {framework}."
    )


def settings(values: Mapping[str, Any], indent: str = "    ") -> str:
    """`name=value,` lines of a call."""
    return "\n".join(f"{indent}{name}={value!r}," for name, value in values.items())
