"""What the tables say as engines and the scheduler take it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, select
from sqlalchemy.engine import RowMapping

from meshwright.control.engines.engine import ClusterOrder, RunOrder
from meshwright.control.scheduler import ChipState, ClusterState, JobState
from meshwright.control.service import clusters as cluster_service
from meshwright.control.service import faults as fault_service
from meshwright.control.service.jobs import job_file, run_dir
from meshwright.control.spec import ClusterSpec
from meshwright.control.store.tables import clusters, faults, nodes
from meshwright.control.words import ClusterStatus, Health, JobStatus, NodeStatus

_WORKING = (ClusterStatus.READY, ClusterStatus.UPDATING, ClusterStatus.FAILED)


def cluster_rows(connection: Connection) -> list[RowMapping]:
    """All clusters, oldest first."""
    return list(connection.execute(select(clusters).order_by(clusters.c.seq)).mappings())


def node_rows(connection: Connection, cluster: str) -> list[RowMapping]:
    """Nodes of a cluster by their numbers."""
    query = select(nodes).where(nodes.c.cluster_id == cluster).order_by(nodes.c.number)
    return list(connection.execute(query).mappings())


def cluster_order(connection: Connection, row: RowMapping, home: Path) -> ClusterOrder:
    """A cluster as its engine shall have it."""
    where = (faults.c.cluster_id == row["id"]) & (faults.c.status != fault_service.REFUSED)
    found = connection.execute(select(faults).where(where).order_by(faults.c.seq)).mappings()
    asked = node_rows(connection, row["id"])
    jobs = cluster_service.active_jobs(connection, row["id"])
    return ClusterOrder(
        id=row["id"],
        spec=ClusterSpec.model_validate(row["spec"]),
        chips_per_node=row["chips_per_node"],
        home=home / "clusters" / row["id"],
        created_s=row["created_s"],
        faults=tuple(fault_service.as_fault(fault) for fault in found),
        runs=tuple(run_order(job, home) for job in jobs if JobStatus(job["status"]).holds_chips),
        replaced_s={n["number"]: n["replaced_s"] for n in asked if n["replaced_s"] is not None},
        drained=frozenset(node["number"] for node in asked if node["drained"]),
    )


def run_order(job: RowMapping, home: Path) -> RunOrder:
    """The present attempt at a job."""
    return RunOrder(
        job_id=job["id"],
        attempt=job["attempt"],
        run_dir=run_dir(home, job["id"]),
        job_file=job_file(home, job["id"]),
        chips=tuple((node, chip) for node, chip in job["placement"]),
        ranks=job["ranks"],
        started_s=job["attempt_s"] or 0.0,
        handle=job["handle"] or {},
    )


def cluster_state(row: RowMapping, of_it: Sequence[RowMapping]) -> ClusterState:
    """A cluster as the scheduler takes it."""
    chips = []
    for node in of_it:
        why = _node_trouble(node)
        chips += [
            ChipState((node["number"], chip), why or _chip_trouble(health))
            for chip, health in enumerate(node["chips"])
        ]
    why_not = "" if row["status"] in _WORKING else f"is {row['status']}"
    return ClusterState(row["id"], tuple(chips), why_not)


def job_state(row: RowMapping) -> JobState:
    """A job as the scheduler takes it."""
    holds = JobStatus(row["status"]).holds_chips
    return JobState(
        id=row["id"],
        cluster=row["cluster_id"],
        ranks=row["ranks"],
        spares=row["spares"],
        priority=row["priority"],
        seq=row["seq"],
        waits=row["status"] == JobStatus.QUEUED,
        holds=tuple((node, chip) for node, chip in row["placement"]) if holds else (),
    )


def _node_trouble(node: RowMapping) -> str:
    if node["drained"]:
        return "are on drained nodes"
    if node["status"] != NodeStatus.RUNNING:
        return f"are on nodes that are {node['status']}"
    return ""


def _chip_trouble(health: str) -> str:
    return "" if health in (Health.HEALTHY, Health.DEGRADED) else f"are {health}"
