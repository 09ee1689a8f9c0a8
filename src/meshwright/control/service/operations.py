"""Long work: taken on in the transaction that asks for it, done by the service that leads."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import NotFoundError
from meshwright.control.service.events import new_id, tell
from meshwright.control.store.tables import operation_lines, operations
from meshwright.control.views import LogLine, OperationView, at
from meshwright.control.words import OperationStatus

OPEN = tuple(status for status in OperationStatus if not status.final)


def take_on(
    connection: Connection, kind: str, cluster: str, request: dict[str, Any] | None = None
) -> OperationView:
    """A new one. `kind`: create, update, delete, act, software."""
    operation = new_id("op")
    values = {
        "id": operation,
        "kind": kind,
        "cluster_id": cluster,
        "request": request or {},
        "status": OperationStatus.PENDING,
        "phase": "",
        "progress": 0.0,
        "error": "",
        "figures": {},
        "created_s": time.time(),
    }
    connection.execute(operations.insert().values(**values))
    tell(
        connection, "operation_accepted", cluster=cluster, operation=operation, data={"what": kind}
    )
    return describe(connection, operation)


def open_ones(connection: Connection, cluster: str) -> list[str]:
    """Those on a cluster that have not ended, oldest first."""
    of_it = (operations.c.cluster_id == cluster) & operations.c.status.in_(OPEN)
    query = select(operations.c.id).where(of_it).order_by(operations.c.seq)
    return list(connection.execute(query).scalars())


def row_of(connection: Connection, operation: str) -> RowMapping:
    """Raises NotFoundError."""
    query = select(operations).where(operations.c.id == operation)
    found = connection.execute(query).mappings().first()
    if found is None:
        raise NotFoundError(f"operation {operation}: there is none; GET /v1/operations lists them")
    return found


def describe(connection: Connection, operation: str) -> OperationView:
    """Raises NotFoundError."""
    return view(row_of(connection, operation))


def log(connection: Connection, operation: str) -> list[LogLine]:
    """What was written about it, oldest first. Raises NotFoundError."""
    row_of(connection, operation)
    query = select(operation_lines).where(operation_lines.c.operation_id == operation)
    rows = connection.execute(query.order_by(operation_lines.c.seq)).mappings()
    return [LogLine(at=at(row["ts"]), phase=row["phase"], line=row["line"]) for row in rows]


def view(row: RowMapping) -> OperationView:
    """A row as it is answered."""
    return OperationView(
        id=row["id"],
        kind=row["kind"],
        cluster=row["cluster_id"],
        status=OperationStatus(row["status"]),
        phase=row["phase"],
        progress=row["progress"],
        error=row["error"],
        figures=row["figures"],
        created_at=at(row["created_s"]),
        ended_at=at(row["ended_s"]),
    )
