"""Our own job file."""

from __future__ import annotations

from meshwright.plan.emit.abilities import Abilities
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import heading, toml
from meshwright.plan.layout import Layout

ABILITIES = Abilities(
    framework="job",
    title="Meshwright",
    written=frozenset(Layout.model_fields),
    limited={},
    left_out={},
)


def write(plan: Plan) -> Emitted:
    """`job.toml`, without keys that have their default value."""
    ref = f"local:{plan.layout.world}"
    notes: tuple[str, ...] = ()
    if not plan.cluster.name.startswith("local"):
        notes = (f"cluster.ref = {ref!r}: this version trains on processes of one machine",)
    text = toml(plan.tables(), heading(plan, "its own trainer"))
    return Emitted({"job.toml": text}, "meshwright train job.toml", notes)
