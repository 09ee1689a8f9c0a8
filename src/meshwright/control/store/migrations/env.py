"""Run by alembic: migrations on the connection that `Database.upgrade` has begun."""

from __future__ import annotations

from alembic import context

from meshwright.control.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
context.run_migrations()
