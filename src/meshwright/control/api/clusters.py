"""Routes of clusters, their hardware, nodes and faults."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from meshwright.base.errors import InputError
from meshwright.control.api.problems import documented
from meshwright.control.api.seams import Cursor, Id, Key, Limit, Served, done, told
from meshwright.control.service import clusters, faults, hardware, telemetry
from meshwright.control.spec import (
    BulkRequest,
    ClusterChange,
    ClusterSpec,
    FaultRequest,
    NodeActionRequest,
)
from meshwright.control.views import (
    Accepted,
    ClusterView,
    FaultView,
    HardwareView,
    ItemResult,
    Page,
    SeriesView,
)

router = APIRouter(prefix="/v1/clusters", tags=["clusters"])

Node = Annotated[int, Path(ge=0, le=1_000_000)]


@router.post(
    "",
    operation_id="CreateTrainiumCluster",
    responses=documented(409),
    status_code=202,
    response_model=Accepted,
)
def create(spec: ClusterSpec, host: Served, key: Key = None) -> Any:
    """Make a cluster: by default 64 chips, 4 nodes x 16, in a torus. The operation tells how far
    it is: initialise, wire, mount storage, self-test, ready."""
    clusters.refuse(host.engines, spec)
    asked = spec.model_dump(mode="json")
    return done(
        host,
        "CreateTrainiumCluster",
        key,
        asked,
        202,
        lambda connection: clusters.create(connection, host.engines, spec),
    )


@router.get(
    "",
    operation_id="ListClusters",
    response_model=Page[ClusterView],
    responses=documented(),
)
def listed(host: Served, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Clusters, oldest first."""
    with host.database.read() as connection:
        items, following = clusters.listed(connection, limit, cursor)
    return told(Page(items=items, cursor=following))


@router.post(":bulk", operation_id="BulkClusterAction", responses=documented())
def bulk(asked: BulkRequest, host: Served) -> list[ItemResult]:
    """The same for several clusters; one that cannot be done does not keep the others from it."""
    return [_one_of_several(host, asked, name) for name in asked.clusters]


def _one_of_several(host: Served, asked: BulkRequest, name: str) -> ItemResult:
    try:
        with host.database.write() as connection:
            if asked.change is not None:
                accepted = clusters.change(connection, host.engines, name, asked.change)
            else:
                accepted = clusters.remove(connection, name)
    except InputError as error:
        return ItemResult(name=name, ok=False, error=str(error), operation=None)
    host.wake()
    return ItemResult(name=name, ok=True, error="", operation=accepted.operation.id)


@router.get("/{cluster}", operation_id="DescribeCluster", responses=documented(404))
def describe(cluster: Id, host: Served) -> ClusterView:
    """One cluster, by id or name."""
    with host.database.read() as connection:
        return clusters.describe(connection, cluster)


@router.patch(
    "/{cluster}",
    operation_id="UpdateCluster",
    responses=documented(404, 409),
    status_code=202,
    response_model=Accepted,
)
def change(cluster: Id, asked: ClusterChange, host: Served, key: Key = None) -> Any:
    """Other nodes, spares or labels."""
    words = {"cluster": cluster, **asked.model_dump(mode="json")}
    return done(
        host,
        "UpdateCluster",
        key,
        words,
        202,
        lambda connection: clusters.change(connection, host.engines, cluster, asked),
    )


@router.delete(
    "/{cluster}",
    operation_id="DeleteCluster",
    responses=documented(404, 409),
    status_code=202,
    response_model=Accepted,
)
def remove(cluster: Id, host: Served, key: Key = None) -> Any:
    """End a cluster that has no jobs."""
    return done(
        host,
        "DeleteCluster",
        key,
        {"cluster": cluster},
        202,
        lambda connection: clusters.remove(connection, cluster),
    )


@router.get(
    "/{cluster}/hardware",
    operation_id="DescribeClusterHardware",
    response_model=HardwareView,
    responses=documented(404),
)
def describe_hardware(
    cluster: Id,
    host: Served,
    node: Annotated[int | None, Query(ge=0, le=1_000_000, description="this one alone")] = None,
    chip: Annotated[int | None, Query(ge=0, le=1000, description="within the node")] = None,
    brief: Annotated[bool, Query(description="without figures and links")] = False,
) -> Response:
    """Nodes, chips with their sixteen figures, links, firmware and health."""
    with host.database.read() as connection:
        row = clusters.row_of(connection, cluster)
        recorder = host.recorder(row["id"])
        found = hardware.describe(connection, cluster, recorder, node, chip, brief)
    return told(found)


@router.get(
    "/{cluster}/metrics",
    operation_id="GetClusterMetrics",
    response_model=SeriesView,
    responses=documented(404),
)
def metrics(
    cluster: Id,
    host: Served,
    figure: Annotated[str, Query(max_length=64, description="as in the hardware's units")],
    node: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    chip: Annotated[int | None, Query(ge=0, le=1000, description="within the node")] = None,
    grain_s: Annotated[int, Query(description="1, 60 or 3600")] = 1,
    start: Annotated[float | None, Query(description="seconds since 1970", ge=0, le=1e11)] = None,
    end: Annotated[float | None, Query(description="seconds since 1970", ge=0, le=1e11)] = None,
) -> Response:
    """The history of one figure, of all chips, those of a node, or one: the last 100 intervals
    where no times are given."""
    last_s = time.time() if end is None else end
    first_s = last_s - 100 * grain_s if start is None else start
    with host.database.read() as connection:
        row = clusters.row_of(connection, cluster)
        numbers = _numbers(clusters.view(connection, row), node, chip)
        recorder = host.recorder(row["id"])
        found = telemetry.series(
            connection, recorder, row["id"], figure, numbers, grain_s, first_s, last_s
        )
    return told(found)


def _numbers(cluster: ClusterView, node: int | None, chip: int | None) -> list[int]:
    """Numbers in the cluster of the chips that are asked for."""
    return [
        number
        for number in range(cluster.chips)
        if node in (None, number // cluster.chips_per_node)
        and chip in (None, number % cluster.chips_per_node)
    ]


@router.post(
    "/{cluster}/nodes/{node}/action",
    operation_id="ActOnNode",
    responses=documented(404, 409),
    status_code=202,
    response_model=Accepted,
)
def act(cluster: Id, node: Node, asked: NodeActionRequest, host: Served, key: Key = None) -> Any:
    """Drain, resume, reboot, replace or check a node."""
    words = {"cluster": cluster, "node": node, "action": asked.action.value}
    return done(
        host,
        "ActOnNode",
        key,
        words,
        202,
        lambda connection: clusters.act(connection, cluster, node, asked.action),
    )


@router.post(
    "/{cluster}/faults",
    operation_id="InjectFault",
    status_code=201,
    response_model=FaultView,
    responses=documented(404, 409),
)
def inject(cluster: Id, asked: FaultRequest, host: Served, key: Key = None) -> Any:
    """Do harm on purpose."""
    words = {"cluster": cluster, **asked.model_dump(mode="json")}
    return done(
        host,
        "InjectFault",
        key,
        words,
        201,
        lambda connection: faults.inject(connection, cluster, asked),
    )


@router.get("/{cluster}/faults", operation_id="ListFaults", responses=documented(404))
def list_faults(
    cluster: Id, host: Served, limit: Limit = 50, cursor: Cursor = None
) -> Page[FaultView]:
    """Faults that were injected, oldest first."""
    with host.database.read() as connection:
        items, following = faults.listed(connection, cluster, limit, cursor)
    return Page(items=items, cursor=following)


@router.delete(
    "/{cluster}/faults/{fault}",
    operation_id="ClearFault",
    response_model=FaultView,
    responses=documented(404, 409),
)
def clear(cluster: Id, fault: Id, host: Served, key: Key = None) -> Any:
    """Have a fault end."""
    words = {"cluster": cluster, "fault": fault}
    return done(
        host,
        "ClearFault",
        key,
        words,
        200,
        lambda connection: faults.clear(connection, cluster, fault),
    )
