"""Routes of operations, events, plans and the service itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from sqlalchemy import select

from meshwright.control.api.problems import documented
from meshwright.control.api.seams import Cursor, Id, Limit, Served
from meshwright.control.host import Host
from meshwright.control.paging import page
from meshwright.control.service import clusters, events, operations, plans
from meshwright.control.spec import PlanRequest
from meshwright.control.store import tables
from meshwright.control.views import EventView, LogLine, OperationView, Page, PlanView, ServiceView

router = APIRouter(prefix="/v1")

After = Annotated[int, Query(ge=0, lt=1 << 62, description="number of the last event seen")]
_LOOK_S = 0.25
_BEAT_S = 10.0  # proxies cut lines on which nothing comes
_AT_ONCE = 500


@router.get("/service", operation_id="DescribeService", tags=["service"], responses=documented())
def service(host: Served) -> ServiceView:
    """Which service this is, and which one leads."""
    return host.describe()


@router.get(
    "/operations", operation_id="ListOperations", tags=["operations"], responses=documented()
)
def list_operations(host: Served, limit: Limit = 50, cursor: Cursor = None) -> Page[OperationView]:
    """Long work, oldest first."""
    table = tables.operations
    with host.database.read() as connection:
        rows, following = page(connection, select(table), table.c.seq, limit, cursor)
    return Page(items=[operations.view(row) for row in rows], cursor=following)


@router.get(
    "/operations/{operation}",
    operation_id="DescribeOperation",
    tags=["operations"],
    responses=documented(404),
)
def operation(operation: Id, host: Served) -> OperationView:
    """How far one is."""
    with host.database.read() as connection:
        return operations.describe(connection, operation)


@router.get(
    "/operations/{operation}/log",
    operation_id="GetOperationLog",
    tags=["operations"],
    responses=documented(404),
)
def operation_log(operation: Id, host: Served) -> list[LogLine]:
    """What was done, line by line."""
    with host.database.read() as connection:
        return operations.log(connection, operation)


@router.post(
    "/plans", operation_id="CreatePlan", tags=["plans"], status_code=201, responses=documented()
)
def create_plan(asked: PlanRequest, host: Served) -> PlanView:
    """The best layouts of a model on a cluster."""
    plan = plans.answer(asked)
    with host.database.write() as connection:
        return plans.keep(connection, asked, plan)


@router.get("/plans", operation_id="ListPlans", tags=["plans"], responses=documented())
def list_plans(host: Served, limit: Limit = 50, cursor: Cursor = None) -> Page[PlanView]:
    """Plans, oldest first."""
    with host.database.read() as connection:
        items, following = plans.listed(connection, limit, cursor)
    return Page(items=items, cursor=following)


@router.get("/plans/{plan}", operation_id="DescribePlan", tags=["plans"], responses=documented(404))
def describe_plan(plan: Id, host: Served) -> PlanView:
    """One plan."""
    with host.database.read() as connection:
        return plans.describe(connection, plan)


@router.get("/events", operation_id="ListEvents", tags=["events"], responses=documented(404))
def list_events(
    host: Served,
    after: After = 0,
    limit: Limit = 100,
    cluster: Annotated[str | None, Query(max_length=64)] = None,
    newest: Annotated[
        bool, Query(description="of the last `limit` numbers alone, whosever those were")
    ] = False,
) -> list[EventView]:
    """What has happened, oldest first."""
    with host.database.read() as connection:
        if newest:
            after = max(after, events.newest(connection) - limit)
        wanted = clusters.id_of(connection, cluster) if cluster else None
        return events.since(connection, after, limit, cluster=wanted)


@router.get(
    "/events/stream",
    operation_id="StreamEvents",
    tags=["events"],
    response_class=StreamingResponse,
    responses=documented(404)
    | {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream(
    request: Request,
    host: Served,
    after: Annotated[
        int | None, Query(ge=0, lt=1 << 62, description="default: from now on")
    ] = None,
    cluster: Annotated[str | None, Query(max_length=64)] = None,
    job: Annotated[str | None, Query(max_length=64)] = None,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$")] = None,
) -> StreamingResponse:
    """What happens, as server-sent events, each with its number as id: who comes back with
    Last-Event-ID misses none."""
    wanted, newest = await run_in_threadpool(_begin, host, cluster)
    if last_event_id is not None:
        after = int(last_event_id)
    start = newest if after is None else after
    lines = _follow(request, host, start, wanted, job)
    return StreamingResponse(
        lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


def _begin(host: Host, cluster: str | None) -> tuple[str | None, int]:
    with host.database.read() as connection:
        wanted = clusters.id_of(connection, cluster) if cluster else None
        return wanted, events.newest(connection)


async def _follow(
    request: Request, host: Host, after: int, cluster: str | None, job: str | None
) -> AsyncIterator[str]:
    yield ": here\n\n"
    quiet_s = 0.0
    while not (request.app.state.ending.is_set() or await request.is_disconnected()):
        found = await run_in_threadpool(_since, host, after, cluster, job)
        for event in found:
            yield f"id: {event.seq}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
            after = event.seq
        quiet_s = 0.0 if found else quiet_s + _LOOK_S
        if quiet_s >= _BEAT_S:
            yield ": still here\n\n"
            quiet_s = 0.0
        if len(found) < _AT_ONCE:
            await asyncio.sleep(_LOOK_S)


def _since(host: Host, after: int, cluster: str | None, job: str | None) -> list[EventView]:
    with host.database.read() as connection:
        return events.since(connection, after, _AT_ONCE, cluster, job)
