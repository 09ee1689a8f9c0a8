"""Faults that are injected on purpose: asked for here, done by the service that leads."""

from __future__ import annotations

import time

from sqlalchemy import Connection, select, update
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConfigError, NotFoundError
from meshwright.control.engines.engine import Fault
from meshwright.control.paging import page
from meshwright.control.service import clusters
from meshwright.control.service.events import new_id, tell
from meshwright.control.spec import FaultRequest
from meshwright.control.store.tables import faults
from meshwright.control.views import FaultView, at
from meshwright.control.words import FaultKind

ASKED, ACTIVE, CLEARING, OVER, REFUSED = "ASKED", "ACTIVE", "CLEARING", "OVER", "REFUSED"


def inject(connection: Connection, cluster: str, asked: FaultRequest) -> FaultView:
    """Take one on. Raises NotFoundError for a node, ConfigError for a chip that is not there."""
    row = clusters.row_of(connection, cluster)
    node = clusters.node_of(connection, row, asked.node)
    chips = len(node["chips"])
    if asked.chip is not None and asked.chip >= chips:
        raise ConfigError("chip", asked.chip, f"node {asked.node} has chips 0 to {chips - 1}")
    whole = (FaultKind.NODE_DOWN, FaultKind.NODE_UNREACHABLE)
    if asked.kind in whole and asked.chip is not None:
        raise ConfigError("chip", asked.chip, f"{asked.kind} befalls a whole node; leave it out")
    now_s, fault = time.time(), new_id("flt")
    until_s = None if asked.seconds is None else now_s + asked.seconds
    values = {
        "id": fault,
        "cluster_id": row["id"],
        **asked.model_dump(mode="json", exclude={"seconds"}),
        "since_s": now_s,
        "until_s": until_s,
        "status": ASKED,
        "message": "",
    }
    connection.execute(faults.insert().values(**values))
    words = {"fault": fault, "what": asked.kind.value}
    tell(connection, "fault_asked", cluster=row["id"], node=asked.node, chip=asked.chip, data=words)
    return describe(connection, row["id"], fault)


def clear(connection: Connection, cluster: str, fault: str) -> FaultView:
    """Have a fault end; one that is over stays so. Raises NotFoundError."""
    found = describe(connection, cluster, fault)
    if found.status in (ASKED, ACTIVE):
        where = (faults.c.id == fault) & faults.c.status.in_((ASKED, ACTIVE))
        values = {"status": CLEARING, "until_s": time.time()}
        connection.execute(update(faults).where(where).values(**values))
    return describe(connection, cluster, fault)


def describe(connection: Connection, cluster: str, fault: str) -> FaultView:
    """Raises NotFoundError."""
    row = clusters.row_of(connection, cluster)
    query = select(faults).where(faults.c.cluster_id == row["id"], faults.c.id == fault)
    found = connection.execute(query).mappings().first()
    if found is None:
        raise NotFoundError(f"fault {fault}: cluster {row['name']} has none of that id")
    return view(found)


def listed(
    connection: Connection, cluster: str, limit: int, cursor: str | None
) -> tuple[list[FaultView], str | None]:
    """A page of those of a cluster."""
    row = clusters.row_of(connection, cluster)
    query = select(faults).where(faults.c.cluster_id == row["id"])
    rows, following = page(connection, query, faults.c.seq, limit, cursor)
    return [view(found) for found in rows], following


def view(row: RowMapping) -> FaultView:
    """A row as it is answered."""
    return FaultView(
        id=row["id"],
        cluster=row["cluster_id"],
        kind=FaultKind(row["kind"]),
        node=row["node"],
        chip=row["chip"],
        severity=row["severity"],
        status=row["status"],
        message=row["message"],
        since=at(row["since_s"]),
        until=at(row["until_s"]),
    )


def as_fault(row: RowMapping) -> Fault:
    """A row as an engine takes it."""
    return Fault(
        id=row["id"],
        kind=FaultKind(row["kind"]),
        node=row["node"],
        chip=row["chip"],
        severity=row["severity"],
        since_s=row["since_s"],
        until_s=row["until_s"],
    )
