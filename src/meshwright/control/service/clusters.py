"""Clusters: what can be asked of them, each within one transaction."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, or_, select, update
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConfigError, ConflictError, NotFoundError
from meshwright.control.engines.engine import Engine
from meshwright.control.paging import page
from meshwright.control.service import operations
from meshwright.control.service.events import new_id, tell
from meshwright.control.spec import ClusterChange, ClusterSpec
from meshwright.control.store.tables import clusters, events, jobs, nodes
from meshwright.control.views import Accepted, ClusterView, at
from meshwright.control.words import ClusterStatus, Health, JobStatus, NodeAction, NodeStatus

ACTIVE = tuple(status for status in JobStatus if not status.final)
_HOLDING = tuple(status for status in JobStatus if status.holds_chips)
_CHANGEABLE = (ClusterStatus.READY, ClusterStatus.FAILED)


def create(connection: Connection, engines: Mapping[str, Engine], spec: ClusterSpec) -> Accepted:
    """Take a new cluster on, which `refuse` has let pass. Raises ConfigError for one that cannot
    be, ConflictError if its name is taken."""
    chips_per_node = engine_of(engines, spec).chips_per_node(spec)
    _refuse_spares(spec, chips_per_node)
    taken = select(clusters.c.id).where(clusters.c.name == spec.name)
    if connection.execute(taken).first():
        raise ConflictError(f"name {spec.name}: there is a cluster of that name; take another")
    now_s, cluster = time.time(), new_id("clu")
    row = {
        "id": cluster,
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "chips_per_node": chips_per_node,
        "status": ClusterStatus.CREATING,
        "message": "",
        "figures": {},
        "created_s": now_s,
        "updated_s": now_s,
    }
    connection.execute(clusters.insert().values(**row))
    _have_nodes(connection, cluster, spec, chips_per_node)
    tell(connection, "cluster_created", cluster=cluster, data={"name": spec.name})
    operation = operations.take_on(connection, "create", cluster)
    return Accepted(cluster=describe(connection, cluster), operation=operation)


def refuse(engines: Mapping[str, Engine], spec: ClusterSpec) -> None:
    """Raise ConfigError for a cluster that its engine cannot make. It may take the engine a second:
    not to be asked within a transaction."""
    engine_of(engines, spec).refuse(spec)


def change(
    connection: Connection, engines: Mapping[str, Engine], cluster: str, asked: ClusterChange
) -> Accepted:
    """Other nodes, spares or labels. Raises ConflictError while something else goes on, or if jobs
    hold what would go."""
    row = row_of(connection, cluster)
    _refuse_busy(row, "changed")
    spec = ClusterSpec.model_validate(
        {**row["spec"], **asked.model_dump(mode="json", exclude_none=True)}
    )
    _refuse_spares(spec, row["chips_per_node"])
    _refuse_held(connection, row, spec)
    refuse(engines, spec)
    values = {"spec": spec.model_dump(mode="json"), "updated_s": time.time()}
    values["status"] = ClusterStatus.UPDATING
    connection.execute(update(clusters).where(clusters.c.id == row["id"]).values(**values))
    _have_nodes(connection, row["id"], spec, row["chips_per_node"])
    words = {"nodes": spec.nodes, "spares": spec.spares}
    tell(connection, "cluster_changed", cluster=row["id"], data=words)
    operation = operations.take_on(connection, "update", row["id"])
    return Accepted(cluster=describe(connection, row["id"]), operation=operation)


def remove(connection: Connection, cluster: str) -> Accepted:
    """End a cluster; one with jobs is refused, and so is one that is going already."""
    row = row_of(connection, cluster)
    if row["status"] == ClusterStatus.DELETING:
        raise ConflictError(f"cluster {row['name']}: is being deleted already")
    if open_ones := operations.open_ones(connection, row["id"]):
        raise ConflictError(
            f"cluster {row['name']}: operation {open_ones[0]} is under way; delete it after that"
        )
    held = [f"{job['name']} ({job['id']})" for job in active_jobs(connection, row["id"])]
    if held:
        raise ConflictError(
            f"cluster {row['name']}: has {len(held)} jobs that have not ended, {held[0]} among "
            "them; stop them first"
        )
    _set_status(connection, row["id"], ClusterStatus.DELETING)
    operation = operations.take_on(connection, "delete", row["id"])
    return Accepted(cluster=describe(connection, row["id"]), operation=operation)


def act(connection: Connection, cluster: str, node: int, action: NodeAction) -> Accepted:
    """Take on what is asked of one node."""
    row = row_of(connection, cluster)
    _refuse_busy(row, "acted on")
    found = node_of(connection, row, node)
    wanted = {"node": node, "action": action.value}
    if action in (NodeAction.DRAIN, NodeAction.RESUME):
        drained = action is NodeAction.DRAIN
        if not drained and not found["drained"]:
            raise ConflictError(f"node {node}: is not drained; there is nothing to resume")
        where = (nodes.c.cluster_id == row["id"]) & (nodes.c.number == node)
        connection.execute(update(nodes).where(where).values(drained=int(drained)))
        if drained:
            move_jobs(connection, row["id"], node)
    words = {"action": action.value}
    tell(connection, "node_action_asked", cluster=row["id"], node=node, data=words)
    operation = operations.take_on(connection, "act", row["id"], wanted)
    return Accepted(cluster=describe(connection, row["id"]), operation=operation)


def move_jobs(connection: Connection, cluster: str, node: int) -> None:
    """Jobs on a node that is drained save, stop, and wait for other chips; also if the node takes
    work again meanwhile, for they have been asked to stop."""
    for job in active_jobs(connection, cluster):
        if any(place[0] == node for place in job["placement"]):
            where = jobs.c.id == job["id"]
            connection.execute(update(jobs).where(where).values(moving=1))


def row_of(connection: Connection, cluster: str) -> RowMapping:
    """By id or name. Raises NotFoundError."""
    query = select(clusters).where(or_(clusters.c.id == cluster, clusters.c.name == cluster))
    found = connection.execute(query).mappings().first()
    if found is None:
        raise NotFoundError(f"cluster {cluster}: there is none; GET /v1/clusters lists them")
    return found


def id_of(connection: Connection, cluster: str) -> str:
    """Of a cluster, by id or name; events of one that is gone are found by its id. Raises
    NotFoundError."""
    told = select(events.c.seq).where(events.c.cluster_id == cluster).limit(1)
    if connection.execute(told).first():
        return cluster
    return str(row_of(connection, cluster)["id"])


def node_of(connection: Connection, cluster: RowMapping, node: int) -> RowMapping:
    """Raises NotFoundError."""
    where = (nodes.c.cluster_id == cluster["id"]) & (nodes.c.number == node)
    found = connection.execute(select(nodes).where(where)).mappings().first()
    if found is None:
        most = connection.execute(
            select(nodes.c.number)
            .where(nodes.c.cluster_id == cluster["id"])
            .order_by(nodes.c.number.desc())
        ).scalar()
        raise NotFoundError(f"node {node}: cluster {cluster['name']} has nodes 0 to {most}")
    return found


def active_jobs(connection: Connection, cluster: str) -> list[RowMapping]:
    """Jobs of a cluster that have not ended, oldest first."""
    query = select(jobs).where(jobs.c.cluster_id == cluster, jobs.c.status.in_(ACTIVE))
    return list(connection.execute(query.order_by(jobs.c.seq)).mappings())


def describe(connection: Connection, cluster: str) -> ClusterView:
    """By id or name. Raises NotFoundError."""
    return view(connection, row_of(connection, cluster))


def listed(
    connection: Connection, limit: int, cursor: str | None
) -> tuple[list[ClusterView], str | None]:
    """A page of them."""
    rows, following = page(connection, select(clusters), clusters.c.seq, limit, cursor)
    return _views(connection, rows), following


def view(connection: Connection, row: RowMapping) -> ClusterView:
    """A row as it is answered."""
    return _views(connection, [row])[0]


def _views(connection: Connection, rows: Sequence[RowMapping]) -> list[ClusterView]:
    """Rows as they are answered, by two questions for all of them."""
    ids = [row["id"] for row in rows]
    columns = (nodes.c.cluster_id, nodes.c.status, nodes.c.chips)
    chips: dict[str, list[str]] = defaultdict(list)
    for node in connection.execute(select(*columns).where(nodes.c.cluster_id.in_(ids))):
        if node.status != NodeStatus.FAILED:
            chips[node.cluster_id] += node.chips
    holding: dict[str, dict[str, int]] = defaultdict(dict)
    held = select(jobs.c.cluster_id, jobs.c.id, jobs.c.placement).where(
        jobs.c.cluster_id.in_(ids), jobs.c.status.in_(_HOLDING)
    )
    for job in connection.execute(held.order_by(jobs.c.seq)):
        holding[job.cluster_id][job.id] = len(job.placement)
    return [_view(row, chips[row["id"]], holding[row["id"]]) for row in rows]


def _view(row: RowMapping, chips: Sequence[str], holding: Mapping[str, int]) -> ClusterView:
    spec = ClusterSpec.model_validate(row["spec"])
    total = spec.nodes * row["chips_per_node"] + spec.spares
    return ClusterView(
        id=row["id"],
        name=row["name"],
        status=ClusterStatus(row["status"]),
        message=row["message"],
        engine=spec.engine,
        nodes=-(-total // row["chips_per_node"]),
        chips=total,
        chips_per_node=row["chips_per_node"],
        spares=spec.spares,
        healthy_chips=sum(health == Health.HEALTHY for health in chips),
        chips_in_use=sum(holding.values()),
        jobs=list(holding),
        figures=row["figures"],
        spec=spec,
        created_at=at(row["created_s"]),
        updated_at=at(row["updated_s"]),
    )


def engine_of(engines: Mapping[str, Engine], spec: ClusterSpec) -> Engine:
    """Raises ConfigError for one that this service does not have."""
    if spec.engine not in engines:
        known = ", ".join(sorted(engines))
        fix = f"this service has {known}; `meshwright up --help` says how to give it others"
        raise ConfigError("engine", spec.engine, fix)
    return engines[spec.engine]


def _refuse_spares(spec: ClusterSpec, chips_per_node: int) -> None:
    chips = spec.nodes * chips_per_node
    most = 4 * -(-chips // 64)
    if spec.spares > most:
        raise ConfigError(
            "spares", spec.spares, f"{chips} chips take 0 to {most}, 4 for each 64; ask for less"
        )


def _refuse_busy(row: RowMapping, what: str) -> None:
    if row["status"] not in _CHANGEABLE:
        raise ConflictError(
            f"cluster {row['name']}: is {row['status']}; it can be {what} when that is over"
        )


def _refuse_held(connection: Connection, row: RowMapping, spec: ClusterSpec) -> None:
    total = spec.nodes * row["chips_per_node"] + spec.spares
    for job in active_jobs(connection, row["id"]):
        numbers = [node * row["chips_per_node"] + chip for node, chip in job["placement"]]
        if max(numbers, default=-1) >= total or job["ranks"] + job["spares"] > total:
            raise ConflictError(
                f"cluster {row['name']}: job {job['id']} needs chips that would go; stop it first"
            )


def _have_nodes(
    connection: Connection, cluster: str, spec: ClusterSpec, chips_per_node: int
) -> None:
    """Rows for the nodes that shall be, and none for others."""
    total = spec.nodes * chips_per_node + spec.spares
    count = -(-total // chips_per_node)
    of_it = nodes.c.cluster_id == cluster
    connection.execute(nodes.delete().where(of_it & (nodes.c.number >= count)))
    known = set(connection.execute(select(nodes.c.number).where(of_it)).scalars())
    rows: list[dict[str, Any]] = []
    for number in range(count):
        chips = min(chips_per_node, total - number * chips_per_node)
        health = [Health.UNKNOWN.value] * chips
        if number in known:
            _fit_chips(connection, of_it & (nodes.c.number == number), chips)
            continue
        rows.append(
            {
                "cluster_id": cluster,
                "number": number,
                "status": NodeStatus.PENDING,
                "health": Health.UNKNOWN,
                "chips": health,
                "links": health,
                "address": "",
                "firmware": "",
                "software": spec.software,
                "message": "",
                "drained": 0,
            }
        )
    if rows:
        connection.execute(nodes.insert(), rows)


def _fit_chips(connection: Connection, where: Any, chips: int) -> None:
    found = connection.execute(select(nodes.c.chips, nodes.c.links).where(where)).mappings().one()
    if len(found["chips"]) != chips:
        more = [Health.UNKNOWN.value] * chips
        values = {key: (list(found[key]) + more)[:chips] for key in ("chips", "links")}
        connection.execute(update(nodes).where(where).values(**values))


def _set_status(connection: Connection, cluster: str, status: ClusterStatus) -> None:
    values = {"status": status, "updated_s": time.time()}
    connection.execute(update(clusters).where(clusters.c.id == cluster).values(**values))
    tell(connection, "cluster_status", cluster=cluster, data={"status": status.value})
