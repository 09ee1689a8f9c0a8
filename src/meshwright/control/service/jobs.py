"""Jobs: what can be asked of them, each within one transaction."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.engine import RowMapping

from meshwright.base.config import apply_override
from meshwright.base.errors import ConfigError, ConflictError, NotFoundError
from meshwright.conduct.stores import store_of
from meshwright.control.paging import page
from meshwright.control.service import clusters
from meshwright.control.service.events import new_id, tell
from meshwright.control.spec import ClusterSpec, JobRequest
from meshwright.control.store.tables import jobs
from meshwright.control.views import CheckpointView, JobDetail, JobView, at
from meshwright.control.words import ClusterStatus, JobStatus
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout


def submit(connection: Connection, asked: JobRequest) -> JobView:
    """Take a job on. Raises ConfigError for one that cannot run, or never on that cluster."""
    cluster = clusters.row_of(connection, asked.cluster)
    if cluster["status"] == ClusterStatus.DELETING:
        raise ConflictError(f"cluster {cluster['name']}: is being deleted; name another")
    job = _sealed(resolve_job(_tables_of(asked)), ClusterSpec.model_validate(cluster["spec"]))
    spares = job.cluster.spares if job.resilience.survives else 0
    _refuse_never(cluster, job.layout.world, spares)
    job_id = new_id("job")
    row = {
        "id": job_id,
        "name": asked.name or job.job.name,
        "cluster_id": cluster["id"],
        "job": job.model_dump(mode="json"),
        "labels": asked.labels,
        "ranks": job.layout.world,
        "spares": spares,
        "priority": asked.priority,
        "max_restarts": asked.max_restarts,
        "status": JobStatus.QUEUED,
        "message": "",
        "attempt": 0,
        "restarts": 0,
        "placement": [],
        "moving": 0,
        "events_read": 0,
        "step": 0,
        "created_s": time.time(),
    }
    connection.execute(jobs.insert().values(**row))
    tell(connection, "job_submitted", cluster=cluster["id"], job=job_id, data={"name": row["name"]})
    return describe(connection, job_id)


def ask_to_stop(connection: Connection, job: str) -> JobView:
    """One that waits is stopped at once, one that runs saves first; one that has ended stays as it
    ended. Asking twice is asking once."""
    row = row_of(connection, job)
    status = JobStatus(row["status"])
    if status.final:
        raise ConflictError(f"job {row['id']}: is {status} already")
    if row["stop_asked_s"] is None:
        now_s = time.time()
        values: dict[str, Any] = {"stop_asked_s": now_s}
        if status is JobStatus.QUEUED:
            values |= {"status": JobStatus.STOPPED, "ended_s": now_s}
            values |= {"message": "stopped before it began" if not row["attempt"] else "stopped"}
        else:
            values |= {"status": JobStatus.STOPPING}
        connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
        tell_status(connection, row, JobStatus(values["status"]), "asked to stop")
    return describe(connection, row["id"])


def tell_status(connection: Connection, row: RowMapping, status: JobStatus, message: str) -> None:
    """The event of a job's new status."""
    words = {"status": status.value, "attempt": row["attempt"], "message": message}
    tell(connection, "job_status", cluster=row["cluster_id"], job=row["id"], data=words)


def row_of(connection: Connection, job: str) -> RowMapping:
    """By id. Raises NotFoundError."""
    found = connection.execute(select(jobs).where(jobs.c.id == job)).mappings().first()
    if found is None:
        raise NotFoundError(f"job {job}: there is none; GET /v1/jobs lists them")
    return found


def describe(connection: Connection, job: str) -> JobView:
    """Raises NotFoundError."""
    return view(row_of(connection, job))


def detail(connection: Connection, job: str, home: Path) -> JobDetail:
    """Raises NotFoundError."""
    row = row_of(connection, job)
    run = str(run_dir(home, row["id"]))
    return JobDetail(**view(row).model_dump(), job=row["job"], run=run)


def listed(
    connection: Connection,
    limit: int,
    cursor: str | None,
    cluster: str | None,
    status: JobStatus | None,
) -> tuple[list[JobView], str | None]:
    """A page of them. Raises NotFoundError for a cluster that is not there."""
    query = select(jobs)
    if cluster:
        query = query.where(jobs.c.cluster_id == clusters.row_of(connection, cluster)["id"])
    if status:
        query = query.where(jobs.c.status == status)
    rows, following = page(connection, query, jobs.c.seq, limit, cursor)
    return [view(row) for row in rows], following


def run_dir(home: Path, job: str) -> Path:
    """The run of a job, all its attempts."""
    return home / "runs" / job


def job_file(home: Path, job: str) -> Path:
    """Its resolved job file; stands beside the run, whose folder the run itself makes."""
    return home / "runs" / f"{job}.toml"


def view(row: RowMapping) -> JobView:
    """A row as it is answered."""
    return JobView(
        id=row["id"],
        name=row["name"],
        cluster=row["cluster_id"],
        status=JobStatus(row["status"]),
        message=row["message"],
        attempt=row["attempt"],
        restarts=row["restarts"],
        priority=row["priority"],
        ranks=row["ranks"],
        spares=row["spares"],
        placement=[tuple(place) for place in row["placement"]],
        layout=Layout.model_validate(row["job"]["layout"]).label,
        steps=row["job"]["job"]["steps"],
        step=row["step"],
        loss=row["loss"],
        tokens_per_s=row["tokens_per_s"],
        stop_asked=row["stop_asked_s"] is not None,
        unknown_since=at(row["unknown_since_s"]),
        labels=row["labels"],
        created_at=at(row["created_s"]),
        started_at=at(row["attempt_s"]),
        running_at=at(row["running_s"]),
        ended_at=at(row["ended_s"]),
    )


def _sealed(job: Job, spec: ClusterSpec) -> Job:
    """With the key of its cluster for its commits, where it names none itself."""
    key = spec.encryption.key if spec.encryption.enabled else ""
    if not key or job.checkpoint.encrypt:
        return job
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"encrypt": key})})


def _tables_of(asked: JobRequest) -> dict[str, Any]:
    if asked.job is not None:
        found: dict[str, Any] = {key: _copied(value) for key, value in asked.job.items()}
    else:
        try:
            found = tomllib.loads(asked.job_toml or "")
        except (ValueError, RecursionError) as error:
            raise ConfigError("job_toml", "...", f"not valid TOML: {error}") from error
    for override in asked.overrides:
        apply_override(found, override)
    return found


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _refuse_never(cluster: RowMapping, ranks: int, spares: int) -> None:
    spec = ClusterSpec.model_validate(cluster["spec"])
    total = spec.nodes * cluster["chips_per_node"] + spec.spares
    if ranks + spares > total:
        raise ConfigError(
            "job.layout",
            f"{ranks} chips and {spares} spares",
            f"cluster {cluster['name']} has {total} chips; give the job a smaller layout, "
            "or the cluster more nodes",
        )


def checkpoints(row: RowMapping, home: Path) -> list[CheckpointView]:
    """The commits of a job, oldest first; none before the first. Raises CheckpointError."""
    job = resolve_job(row["job"])
    at_store = store_of(job, run_dir(home, row["id"]))
    return [
        CheckpointView(
            job=row["id"],
            id=commit.id,
            branch=at_store.branch,
            step=commit.step,
            depth=commit.depth,
            created_at=at(commit.time_s),
            encrypted=bool(at_store.encrypt),
        )
        for commit in at_store.commits()
    ]
