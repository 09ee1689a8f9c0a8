"""What has happened to a cluster, as HyperPod tells it. Events of jobs are not among it: they are
the REST API's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, and_, or_, select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import NotFoundError
from meshwright.control.host import Host
from meshwright.control.hyperpod import mapping, names
from meshwright.control.hyperpod.common import row_of, spec_of, told
from meshwright.control.hyperpod.shapes import DescribeClusterEvent, ListClusterEvents, parse
from meshwright.control.reconcile.orders import node_rows
from meshwright.control.spec import ClusterSpec
from meshwright.control.store.tables import events

Answer = dict[str, Any]
_GROUP_KINDS = ("cluster_changed",)
_BAD = ("FAILED", "REFUSED")
_DOUBTFUL = ("DEGRADED", "UNKNOWN")
_WARNINGS = ("fault", "fault_asked", "engine_trouble")
_SKIPPED = "operation_progress"  # the log of the operation has it


def operations() -> dict[str, Callable[[Host, Any], Answer]]:
    """Those of this file, by name."""
    return {"ListClusterEvents": listed, "DescribeClusterEvent": describe}


class _Teller:
    """Of one cluster's events."""

    def __init__(self, connection: Connection, ref: str) -> None:
        """Raises NotFoundError."""
        self.cluster = row_of(connection, ref)
        self.spec: ClusterSpec = spec_of(self.cluster)
        self.nodes = {row["number"]: row for row in node_rows(connection, self.cluster["id"])}
        self.mine = and_(
            events.c.cluster_id == self.cluster["id"],
            events.c.job_id.is_(None),
            events.c.kind != _SKIPPED,
        )

    def instance(self, node: int) -> tuple[str, float] | None:
        """The id of the machine that a node is now, and since when it is that."""
        row = self.nodes.get(node)
        if row is None:
            return None
        found = names.instance_id(self.cluster["id"], node, row["replaced_s"])
        return found, row["replaced_s"] or 0.0

    def summary(self, row: RowMapping) -> Answer:
        """`ClusterEventSummary`. What befell a machine that is gone has no instance id."""
        node, group, instance = row["node"], None, None
        if node is not None:
            group = mapping.group_name(self.spec)
            if node >= self.spec.nodes:
                group = mapping.SPARES_GROUP
            now = self.instance(node)
            instance = now[0] if now is not None and row["ts"] >= now[1] else None
        elif row["kind"] in _GROUP_KINDS:
            group = mapping.group_name(self.spec)
        return told(
            EventId=names.event_id(self.cluster["id"], row["seq"]),
            ClusterArn=names.arn(self.cluster["id"]),
            ClusterName=self.cluster["name"],
            InstanceGroupName=group,
            InstanceId=instance,
            ResourceType=_resource(row),
            EventTime=row["ts"],
            Description=describe_row(row),
            EventLevel=level(row),
        )

    def details(self, row: RowMapping) -> Answer:
        """`ClusterEventDetail`."""
        why = row["data"].get("message") or row["data"].get("error")
        failure = told(FailureMessage=why or None)
        metadata: Answer = {"Cluster": failure}
        if row["node"] is not None:
            logical = names.logical_id(self.cluster["name"], row["node"])
            metadata = {"Instance": {**failure, "NodeLogicalId": logical}}
        elif row["kind"] in _GROUP_KINDS:
            metadata = {"InstanceGroupScaling": {"TargetCount": row["data"]["nodes"]}}
        return {**self.summary(row), "EventDetails": {"EventMetadata": metadata}}


def listed(host: Host, body: Any) -> Answer:
    """Some of them, page by page."""
    asked = parse(ListClusterEvents, body)
    with host.database.read() as connection:
        teller = _Teller(connection, asked.cluster_name)
        where = [teller.mine, *_filters(teller, asked)]
        descending = asked.sort_order == "Descending"
        if asked.next_token:
            last = names.place_of(asked.next_token)[1]
            where.append(events.c.seq < last if descending else events.c.seq > last)
        order = events.c.seq.desc() if descending else events.c.seq
        query = select(events).where(*where).order_by(order).limit(asked.max_results + 1)
        rows = connection.execute(query).mappings().all()
        shown = rows[: asked.max_results]
        found = [teller.summary(row) for row in shown]
    more = len(rows) > len(shown)
    token = names.token_of((shown[-1]["ts"], shown[-1]["seq"])) if more else None
    return told(Events=found, NextToken=token)


def describe(host: Host, body: Any) -> Answer:
    """One of them."""
    asked = parse(DescribeClusterEvent, body)
    with host.database.read() as connection:
        teller = _Teller(connection, asked.cluster_name)
        seq = names.event_seq(teller.cluster["id"], asked.event_id)
        query = select(events).where(teller.mine, events.c.seq == seq)
        row = connection.execute(query).mappings().first()
        if row is None:
            name = teller.cluster["name"]
            raise NotFoundError(f"event {asked.event_id}: cluster {name} has none of that id")
        return {"EventDetails": teller.details(row)}


def _filters(teller: _Teller, asked: ListClusterEvents) -> list[Any]:
    found: list[Any] = []
    if asked.event_time_after is not None:
        found.append(events.c.ts > asked.event_time_after)
    if asked.event_time_before is not None:
        found.append(events.c.ts < asked.event_time_before)
    if asked.resource_type == "Instance":
        found.append(events.c.node.is_not(None))
    elif asked.resource_type is not None:
        of_group = events.c.kind.in_(_GROUP_KINDS)
        found.append(events.c.node.is_(None))
        found.append(of_group if asked.resource_type == "InstanceGroup" else ~of_group)
    if asked.instance_group_name is not None:
        found.append(_of_group(teller.spec, asked.instance_group_name))
    if asked.node_id is not None:
        found.append(_of_instance(teller, asked.node_id))
    return found


def _of_group(spec: ClusterSpec, name: str) -> Any:
    if name == mapping.group_name(spec):
        return or_(events.c.node < spec.nodes, events.c.kind.in_(_GROUP_KINDS))
    if name == mapping.SPARES_GROUP and spec.spares:
        return events.c.node >= spec.nodes
    raise NotFoundError(f"group {name}: the cluster has {mapping.group_name(spec)}")


def _of_instance(teller: _Teller, instance: str) -> Any:
    for number in teller.nodes:
        found = teller.instance(number)
        if found is not None and found[0] == instance:
            return and_(events.c.node == number, events.c.ts >= found[1])
    raise NotFoundError(f"node {instance}: the cluster has none of that id now")


def _resource(row: RowMapping) -> str:
    if row["node"] is not None:
        return "Instance"
    return "InstanceGroup" if row["kind"] in _GROUP_KINDS else "Cluster"


def level(row: RowMapping) -> str:
    """How bad it is."""
    data = row["data"]
    words = {data.get("status"), data.get("health")}
    if words & set(_BAD) or data.get("error"):
        return "Error"
    return "Warn" if words & set(_DOUBTFUL) or row["kind"] in _WARNINGS else "Info"


def describe_row(row: RowMapping) -> str:
    """One line for a person: `node status: status=RUNNING health=HEALTHY`."""
    words = row["kind"].replace("_", " ")
    if row["chip"] is not None:
        words += f" of chip {row['chip']}"
    told_of = " ".join(f"{key}={value}" for key, value in row["data"].items() if value != "")
    return f"{words}: {told_of}" if told_of else words
