"""Other software for a cluster, batch by batch, so that jobs move and go on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection, select, update
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConflictError
from meshwright.control.service import clusters, operations
from meshwright.control.service.events import tell
from meshwright.control.store import tables
from meshwright.control.views import Accepted
from meshwright.control.words import ClusterStatus, OperationStatus

KIND = "software"  # of the operation


def roll_out(
    connection: Connection, cluster: str, software: str, batch: int, wait_s: float
) -> Accepted:
    """Bring all nodes that have other software to `software`, `batch` nodes at a time, with
    `wait_s` between batches. Raises ConflictError while something else goes on, or on a cluster
    that is not ready."""
    row = clusters.row_of(connection, cluster)
    if row["status"] != ClusterStatus.READY:
        raise ConflictError(
            f"cluster {row['name']}: is {row['status']}; its software can be changed once it is "
            "READY"
        )
    of_it = tables.nodes.c.cluster_id == row["id"]
    query = select(tables.nodes).where(of_it).order_by(tables.nodes.c.number)
    nodes = connection.execute(query).mappings().all()
    request = {
        "software": software,
        "nodes": [node["number"] for node in nodes if node["software"] != software],
        "drained": _drained_by_hand(nodes, last(connection, row["id"])),
        "batch": batch,
        "wait_s": wait_s,
    }
    values = {
        "spec": {**row["spec"], "software": software},
        "status": ClusterStatus.UPDATING,
        "message": "",
        "updated_s": time.time(),
    }
    connection.execute(
        update(tables.clusters).where(tables.clusters.c.id == row["id"]).values(**values)
    )
    words = {"software": software, "nodes": request["nodes"], "batch": batch}
    tell(connection, "software_asked", cluster=row["id"], data=words)
    operation = operations.take_on(connection, KIND, row["id"], request)
    return Accepted(cluster=clusters.describe(connection, row["id"]), operation=operation)


def _drained_by_hand(nodes: Sequence[RowMapping], before: RowMapping | None) -> list[int]:
    """Those that shall stay drained; not those that a roll-out left so when it failed."""
    left: set[int] = set()
    if before is not None and before["status"] == OperationStatus.FAILED:
        left = set(before["request"]["nodes"]) - set(before["request"]["drained"])
    return [n["number"] for n in nodes if n["drained"] and n["number"] not in left]


def last(connection: Connection, cluster: str) -> RowMapping | None:
    """The newest operation of that kind on a cluster, by its id."""
    table = tables.operations
    query = select(table).where(table.c.cluster_id == cluster, table.c.kind == KIND)
    return connection.execute(query.order_by(table.c.seq.desc()).limit(1)).mappings().first()
