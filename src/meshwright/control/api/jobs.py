"""Routes of jobs: what they do, how far they are, and what they have kept."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from meshwright.base.errors import ConflictError
from meshwright.conduct.asking import ask
from meshwright.control import runs, scheduler
from meshwright.control.api.problems import documented
from meshwright.control.api.seams import Cursor, Id, Key, Limit, Served, done, told
from meshwright.control.reconcile import orders
from meshwright.control.reconcile.runs import snapshot
from meshwright.control.service import events, jobs
from meshwright.control.spec import JobRequest, ResizeRequest
from meshwright.control.views import (
    CheckpointView,
    EventView,
    ExplainView,
    JobDetail,
    JobView,
    LogText,
    MetricLine,
    Page,
)
from meshwright.control.words import JobStatus

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

After = Annotated[int, Query(ge=0, lt=1 << 62)]
Many = Annotated[int, Query(ge=1, le=10_000)]


@router.post(
    "",
    operation_id="SubmitTrainingJob",
    status_code=201,
    response_model=JobView,
    responses=documented(404, 409),
)
def submit(asked: JobRequest, host: Served, key: Key = None) -> Any:
    """Have a job trained on a cluster."""
    words = asked.model_dump(mode="json")
    return done(
        host,
        "SubmitTrainingJob",
        key,
        words,
        201,
        lambda connection: jobs.submit(connection, asked),
    )


@router.get(
    "",
    operation_id="ListTrainingJobs",
    response_model=Page[JobView],
    responses=documented(404),
)
def listed(
    host: Served,
    cluster: Annotated[str | None, Query(max_length=64)] = None,
    status: JobStatus | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    """Jobs, oldest first."""
    with host.database.read() as connection:
        items, following = jobs.listed(connection, limit, cursor, cluster, status)
    return told(Page(items=items, cursor=following))


@router.get("/{job}", operation_id="DescribeTrainingJob", responses=documented(404))
def describe(job: Id, host: Served) -> JobDetail:
    """One job, with its job file."""
    with host.database.read() as connection:
        return jobs.detail(connection, job, host.home)


@router.get("/{job}/events", operation_id="ListJobEvents", responses=documented(404))
def list_events(job: Id, host: Served, after: After = 0, limit: Limit = 100) -> list[EventView]:
    """What has happened to it, oldest first, after the event of number `after`."""
    with host.database.read() as connection:
        jobs.row_of(connection, job)
        return events.since(connection, after, limit, job=job)


@router.get("/{job}/metrics", operation_id="GetJobMetrics", responses=documented(404))
def metrics(job: Id, host: Served, after: After = 0, limit: Many = 1000) -> list[MetricLine]:
    """Losses and times of steps after step `after`; where they are more than `limit`, some of
    them, evenly spread."""
    with host.database.read() as connection:
        jobs.row_of(connection, job)
    found = runs.metrics(jobs.run_dir(host.home, job), after, limit)
    return [MetricLine(**line) for line in found]


@router.get("/{job}/logs", operation_id="GetJobLog", responses=documented(404))
def log(
    job: Id,
    host: Served,
    name: Annotated[str | None, Query(max_length=128, description="the first by default")] = None,
) -> LogText:
    """The end of one of its logs, and the names of all."""
    with host.database.read() as connection:
        jobs.row_of(connection, job)
    run = jobs.run_dir(host.home, job)
    names = runs.logs(run)
    wanted = name or next(iter(names), None)
    text = runs.log_text(run, wanted) if wanted else ""
    return LogText(name=wanted or "", names=names, text=text)


@router.post(
    "/{job}/stop",
    operation_id="StopTrainingJob",
    response_model=JobView,
    responses=documented(404, 409),
)
def stop(job: Id, host: Served, key: Key = None) -> Any:
    """Have a job save and end; one that waits ends at once."""
    return done(
        host,
        "StopTrainingJob",
        key,
        {"job": job},
        200,
        lambda connection: jobs.ask_to_stop(connection, job),
    )


@router.post("/{job}/resize", operation_id="ResizeTrainingJob", responses=documented(404, 409))
def resize(job: Id, asked: ResizeRequest, host: Served) -> dict[str, Any]:
    """Go on in another layout on the chips it has, without a stop; for runs that survive losses."""
    with host.database.read() as connection:
        row = jobs.row_of(connection, job)
    if row["status"] != JobStatus.RUNNING:
        raise ConflictError(f"job {job}: is {row['status']}; it can be resized while it runs")
    answer = ask(jobs.run_dir(host.home, job), {"op": "resize", "layout": asked.layout})
    if error := answer.get("error"):
        raise ConflictError(f"job {job}: {error}")
    return answer


@router.get("/{job}/explain", operation_id="ExplainTrainingJob", responses=documented(404))
def explain(job: Id, host: Served) -> ExplainView:
    """Why it waits, or where it is."""
    with host.database.read() as connection:
        row = jobs.row_of(connection, job)
        state = orders.job_state(row)
        found = snapshot(connection, {row["cluster_id"]})
    cluster = next((one for one in found.clusters if one.id == row["cluster_id"]), None)
    why = scheduler.Waiting(0, (), {}, "")
    if state.waits and cluster is not None:
        why = scheduler.explain(found, state)
    return ExplainView(
        job=job,
        status=JobStatus(row["status"]),
        sentence=why.sentence or _where(state, row["status"]),
        free_chips=why.free,
        needed_chips=state.needs,
        ahead=list(why.ahead),
        unusable=why.unusable,
    )


def _where(state: scheduler.JobState, status: str) -> str:
    if not state.holds:
        return f"is {status}, and holds no chips"
    nodes = sorted({node for node, _ in state.holds})
    words = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
    return f"holds {len(state.holds)} chips on {len(nodes)} nodes ({words})"


@router.get("/{job}/checkpoints", operation_id="ListCheckpoints", responses=documented(404, 409))
def checkpoints(job: Id, host: Served) -> list[CheckpointView]:
    """The commits of its state, oldest first."""
    with host.database.read() as connection:
        row = jobs.row_of(connection, job)
    return jobs.checkpoints(row, host.home)
