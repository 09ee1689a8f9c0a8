"""What has happened, in one order that everybody sees."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, and_, func, select
from sqlalchemy.engine import RowMapping

from meshwright.control.store.tables import events
from meshwright.control.views import EventView, at

STEP = "job_step"  # told at every look at a run that has gone on
_STEPS_KEPT_S = 86_400.0


def new_id(kind: str) -> str:
    """`job-3f2a…`: a name that nothing else has."""
    return f"{kind}-{secrets.token_hex(6)}"


def tell(
    connection: Connection,
    kind: str,
    *,
    cluster: str | None = None,
    job: str | None = None,
    operation: str | None = None,
    node: int | None = None,
    chip: int | None = None,
    ts: float | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write one event, in the transaction of what it tells of."""
    connection.execute(
        events.insert().values(
            ts=time.time() if ts is None else ts,
            kind=kind,
            cluster_id=cluster,
            job_id=job,
            operation_id=operation,
            node=node,
            chip=chip,
            data=dict(data or {}),
        )
    )


def newest(connection: Connection) -> int:
    """The number of the last event; 0 if there is none."""
    return connection.execute(select(func.max(events.c.seq))).scalar() or 0


def since(
    connection: Connection,
    after: int,
    limit: int,
    cluster: str | None = None,
    job: str | None = None,
) -> list[EventView]:
    """Events after number `after`, oldest first, of all or of one cluster or job."""
    wanted = [events.c.seq > after]
    if cluster:
        wanted.append(events.c.cluster_id == cluster)
    if job:
        wanted.append(events.c.job_id == job)
    query = select(events).where(and_(*wanted)).order_by(events.c.seq).limit(limit)
    return [view(row) for row in connection.execute(query).mappings()]


def forget_old(connection: Connection, now_s: float) -> None:
    """Drop steps of jobs that are a day old: runs keep them, and all other events stay."""
    old = (events.c.kind == STEP) & (events.c.ts < now_s - _STEPS_KEPT_S)
    connection.execute(events.delete().where(old))


def view(row: RowMapping) -> EventView:
    """A row as it is answered."""
    return EventView(
        seq=row["seq"],
        at=at(row["ts"]),
        kind=row["kind"],
        cluster=row["cluster_id"],
        job=row["job_id"],
        operation=row["operation_id"],
        node=row["node"],
        chip=row["chip"],
        data=row["data"],
    )
