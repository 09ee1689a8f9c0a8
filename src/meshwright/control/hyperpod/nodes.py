"""Operations on nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConflictError, NotFoundError
from meshwright.control.host import Host
from meshwright.control.hyperpod import mapping, names
from meshwright.control.hyperpod.common import row_of, spec_of, told
from meshwright.control.hyperpod.errors import ValidationExceptionError
from meshwright.control.hyperpod.shapes import (
    DescribeClusterNode,
    ListClusterNodes,
    ManyNodes,
    SomeNodes,
    parse,
)
from meshwright.control.reconcile.orders import node_rows
from meshwright.control.service import clusters
from meshwright.control.service.software import KIND as SOFTWARE
from meshwright.control.spec import ClusterChange, ClusterSpec
from meshwright.control.store import tables
from meshwright.control.words import ClusterStatus, NodeAction, NodeStatus, OperationStatus

Answer = dict[str, Any]
_OPEN = tuple(status for status in OperationStatus if not status.final)
_UNDER_WAY = {
    NodeAction.REBOOT: ("Pending", "reboots"),
    NodeAction.REPLACE: ("Pending", "is being replaced"),
    NodeAction.CHECK: ("DeepHealthCheckInProgress", ""),
}


def operations() -> dict[str, Callable[[Host, Any], Answer]]:
    """Those of this file, by name."""
    return {
        "ListClusterNodes": listed,
        "DescribeClusterNode": describe,
        "BatchReplaceClusterNodes": replace,
        "BatchRebootClusterNodes": reboot,
        "BatchDeleteClusterNodes": delete,
    }


@dataclass(frozen=True)
class _Scene:
    """A cluster's nodes, and what goes on with them."""

    cluster: RowMapping
    spec: ClusterSpec
    nodes: Sequence[RowMapping]
    acts: Mapping[int, NodeAction]  # open, by node
    software: str | None  # that is being rolled out

    def instance(self, node: RowMapping) -> str:
        """Its id."""
        return names.instance_id(self.cluster["id"], node["number"], node["replaced_s"])

    def logical(self, node: RowMapping) -> str:
        """Its other name."""
        return names.logical_id(self.cluster["name"], node["number"])

    def group(self, node: RowMapping) -> str:
        """In which it is."""
        spare = node["number"] >= self.spec.nodes
        return mapping.SPARES_GROUP if spare else mapping.group_name(self.spec)

    def launched_s(self, node: RowMapping) -> float:
        """When its machine came."""
        return float(node["replaced_s"] or self.cluster["created_s"])

    def status(self, node: RowMapping) -> Answer:
        """`ClusterInstanceStatusDetails`: what is asked of it goes before what is seen of it."""
        word, message = mapping.NODE_STATUS[NodeStatus(node["status"])]
        if self.cluster["status"] == ClusterStatus.DELETING:
            word, message = "ShuttingDown", ""
        elif (act := self.acts.get(node["number"])) in _UNDER_WAY:
            word, message = _UNDER_WAY[act]
        elif self.software not in (None, node["software"]) and node["drained"]:
            word, message = "SystemUpdating", f"gets {self.software}"
        return told(Status=word, Message=node["message"] or message or None)


def _look(connection: Connection, ref: str) -> _Scene:
    row = row_of(connection, ref)
    table = tables.operations
    query = select(table).where(table.c.cluster_id == row["id"], table.c.status.in_(_OPEN))
    found = connection.execute(query.order_by(table.c.seq.desc())).mappings().all()
    acts = {
        op["request"]["node"]: NodeAction(op["request"]["action"])
        for op in found
        if op["kind"] == "act"
    }
    rolled = [op["request"]["software"] for op in found if op["kind"] == SOFTWARE]
    nodes = node_rows(connection, row["id"])
    return _Scene(row, spec_of(row), nodes, acts, rolled[0] if rolled else None)


def listed(host: Host, body: Any) -> Answer:
    """Some of a cluster's nodes, page by page."""
    asked = parse(ListClusterNodes, body)
    with host.database.read() as connection:
        scene = _look(connection, asked.cluster_name)
    after, before = asked.creation_time_after, asked.creation_time_before
    rows = [
        node
        for node in scene.nodes
        if (after is None or scene.launched_s(node) > after)
        and (before is None or scene.launched_s(node) < before)
        and (asked.instance_group_name_contains or "") in scene.group(node)
    ]

    def place(node: RowMapping) -> names.Place:
        by_name = asked.sort_by == "NAME"
        return (scene.group(node) if by_name else scene.launched_s(node), node["number"])

    descending = asked.sort_order == "Descending"
    shown, token = names.page(rows, place, descending, asked.max_results, asked.next_token)
    summaries = []
    for node in shown:
        summary = _summary(scene, node)
        if asked.include_node_logical_ids:
            summary["NodeLogicalId"] = scene.logical(node)
        summaries.append(summary)
    return told(ClusterNodeSummaries=summaries, NextToken=token)


def describe(host: Host, body: Any) -> Answer:
    """One node."""
    asked = parse(DescribeClusterNode, body)
    if (asked.node_id is None) == (asked.node_logical_id is None):
        raise ValidationExceptionError("NodeId, NodeLogicalId: give one of them")
    with host.database.read() as connection:
        scene = _look(connection, asked.cluster_name)
    for node in scene.nodes:
        logical = scene.logical(node)
        if asked.node_id == scene.instance(node) or asked.node_logical_id == logical:
            _, scripts = mapping.kept_of(scene.spec)
            kind, wanted = mapping.image_of(scene.spec.software)
            details = told(
                **_summary(scene, node),
                NodeLogicalId=logical,
                LifeCycleConfig=scripts or None,
                **{f"Desired{kind}": wanted},
            )
            return {"NodeDetails": details}
    name = asked.node_id or asked.node_logical_id
    raise NotFoundError(f"node {name}: cluster {scene.cluster['name']} has none of that id now")


def _summary(scene: _Scene, node: RowMapping) -> Answer:
    kind, current = mapping.image_of(node["software"])
    new = node["software"] == scene.spec.software
    return told(
        InstanceGroupName=scene.group(node),
        InstanceId=scene.instance(node),
        InstanceType=mapping.instance_type(scene.spec.instance),
        LaunchTime=scene.launched_s(node),
        InstanceStatus=scene.status(node),
        ImageVersionStatus="UpToDate" if new else "UpdateAvailable",
        **{f"Current{kind}": current},
    )


def reboot(host: Host, body: Any) -> Answer:
    """Several nodes; one that cannot be does not keep the others from it."""
    return _act(host, parse(SomeNodes, body), NodeAction.REBOOT)


def replace(host: Host, body: Any) -> Answer:
    """As `reboot`; the machine that comes has another instance id and the same logical id."""
    return _act(host, parse(SomeNodes, body), NodeAction.REPLACE)


def _act(host: Host, asked: SomeNodes, action: NodeAction) -> Answer:
    result = _Result("ErrorCode", "InstanceIdNotFound", "InvalidInstanceStatus")
    with host.database.write() as connection:
        scene = _look(connection, asked.cluster_name)
        taken = set(scene.acts)
        for item in _items(scene, asked, result):
            number = item.node["number"]
            # One that is sent again, as clients do by themselves, must not do it twice.
            if number in taken:
                result.refuse(item, f"something is being done to node {number} already")
                continue
            try:
                clusters.act(connection, scene.cluster["id"], number, action)
            except ConflictError as error:
                result.refuse(item, str(error))
                continue
            taken.add(number)
            result.take(item)
    host.wake()
    return result.answer()


def delete(host: Host, body: Any) -> Answer:
    """The last nodes of a cluster, since nodes are numbered without gaps; others are refused."""
    asked = parse(ManyNodes, body)
    result = _Result("Code", "NodeIdNotFound", "InvalidNodeStatus")
    with host.database.write() as connection:
        scene = _look(connection, asked.cluster_name)
        items = _items(scene, asked, result)
        wanted = {item.node["number"] for item in items}
        left = scene.spec.nodes
        while not scene.spec.spares and left - 1 in wanted and left > 1:
            left -= 1
        failed, code = "", result.invalid
        if left < scene.spec.nodes:
            try:
                clusters.change(
                    connection, host.engines, scene.cluster["id"], ClusterChange(nodes=left)
                )
            except ConflictError as error:
                in_use = scene.cluster["status"] in (ClusterStatus.READY, ClusterStatus.FAILED)
                failed, code = str(error), "NodeIdInUse" if in_use else code
        for item in items:
            if item.node["number"] < left:
                last = "only the last nodes of a cluster without spares can go, and not all"
                result.refuse(item, last)
            elif failed:
                result.refuse(item, failed, code)
            else:
                result.take(item)
    host.wake()
    return result.answer()


@dataclass(frozen=True)
class _Item:
    """A node that was named, and how."""

    name: str
    logical: bool
    node: RowMapping


class _Result:
    """How each went, by the kind of name that it was given by."""

    def __init__(self, code_member: str, unknown: str, invalid: str) -> None:
        self._member, self._unknown, self.invalid = code_member, unknown, invalid
        self._lists: dict[str, list[Any]] = {}

    def take(self, item: _Item) -> None:
        """It is taken on."""
        self._add("SuccessfulNodeLogicalIds" if item.logical else "Successful", item.name)

    def refuse(self, item: _Item, why: str, code: str | None = None) -> None:
        """It is not."""
        self._fail(item.name, item.logical, code or self.invalid, why)

    def miss(self, name: str, logical: bool) -> None:
        """There is none."""
        self._fail(name, logical, self._unknown, "the cluster has no node of that id now")

    def _fail(self, name: str, logical: bool, code: str, why: str) -> None:
        key = "NodeLogicalId" if logical else "NodeId"
        words = {key: name, self._member: code, "Message": why}
        self._add("FailedNodeLogicalIds" if logical else "Failed", words)

    def _add(self, member: str, value: Any) -> None:
        self._lists.setdefault(member, []).append(value)

    def answer(self) -> Answer:
        """Lists that are not empty."""
        return dict(self._lists)


def _items(scene: _Scene, asked: SomeNodes, result: _Result) -> list[_Item]:
    """What is named, each once. Raises ValidationExceptionError if nothing is."""
    if not asked.node_ids and not asked.node_logical_ids:
        raise ValidationExceptionError("NodeIds, NodeLogicalIds: name at least one node")
    found: list[_Item] = []
    for logical, given in ((False, asked.node_ids), (True, asked.node_logical_ids)):
        naming = scene.logical if logical else scene.instance
        there = {naming(node): node for node in scene.nodes}
        for name in dict.fromkeys(given):
            if name in there:
                found.append(_Item(name, logical, there[name]))
            else:
                result.miss(name, logical)
    return found
