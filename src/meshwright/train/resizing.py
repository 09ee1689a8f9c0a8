"""What a table of another size makes of a layout: pure."""

from __future__ import annotations

from meshwright.base.errors import RunError
from meshwright.plan.layout import Layout
from meshwright.train.fabric.orders import Table


def resized_layout(old: Layout, table: Table) -> Layout:
    """`old` with as many replicas as `table` has ranks for. Raises RunError if that says another
    layout."""
    replicas = len(table.members) * old.dp_replicate // old.world
    layout: Layout = old.model_copy(update={"dp_replicate": replicas})
    asked = layout if table.resize is None else Layout.model_validate(table.resize["layout"])
    if layout != asked or layout.world != len(table.members):
        raise RunError(
            f"a table of {len(table.members)} ranks as {asked.label} does not follow on "
            f"{old.label}: only dp_replicate may change; start the run anew"
        )
    return layout
