"""What several operations need: a cluster by its name there, and answers without empty members."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import NotFoundError
from meshwright.control.hyperpod.names import cluster_id
from meshwright.control.spec import ClusterSpec
from meshwright.control.store.tables import clusters


def row_of(connection: Connection, ref: str) -> RowMapping:
    """A cluster by its name or ARN. Raises NotFoundError."""
    found_id = cluster_id(ref)
    where = clusters.c.name == ref if found_id is None else clusters.c.id == found_id
    found = connection.execute(select(clusters).where(where)).mappings().first()
    if found is None:
        raise NotFoundError(f"cluster {ref}: there is none; ListClusters names them")
    return found


def spec_of(row: RowMapping) -> ClusterSpec:
    """What was asked for."""
    return ClusterSpec.model_validate(row["spec"])


def told(**members: Any) -> dict[str, Any]:
    """An answer: what is None is left out, as AWS does."""
    return {key: value for key, value in members.items() if value is not None}
