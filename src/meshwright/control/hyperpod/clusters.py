"""Operations on clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConflictError
from meshwright.control.host import Host
from meshwright.control.hyperpod import mapping, names
from meshwright.control.hyperpod.common import row_of, spec_of, told
from meshwright.control.hyperpod.errors import ResourceInUseError, ValidationExceptionError
from meshwright.control.hyperpod.shapes import (
    CreateCluster,
    Deployment,
    ListClusters,
    OneCluster,
    UpdateCluster,
    UpdateClusterSoftware,
    parse,
)
from meshwright.control.reconcile.orders import node_rows
from meshwright.control.service import clusters, software
from meshwright.control.spec import ClusterChange, ClusterSpec
from meshwright.control.store import tables
from meshwright.control.words import ClusterStatus, NodeStatus, OperationStatus

Answer = dict[str, Any]
_UPDATE_STATUS = {
    OperationStatus.PENDING: "Pending",
    OperationStatus.RUNNING: "InProgress",
    OperationStatus.SUCCEEDED: "Succeeded",
    OperationStatus.FAILED: "Failed",
}
_ABSENT = (NodeStatus.PENDING, NodeStatus.REPLACING, NodeStatus.FAILED)


def operations() -> dict[str, Callable[[Host, Any], Answer]]:
    """Those of this file, by name."""
    return {
        "CreateCluster": create,
        "DescribeCluster": describe,
        "ListClusters": listed,
        "UpdateCluster": change,
        "DeleteCluster": remove,
        "UpdateClusterSoftware": update_software,
    }


def create(host: Host, body: Any) -> Answer:
    """Take a cluster on. A name that is taken is refused, even if all else is the same."""
    spec = mapping.spec_of(parse(CreateCluster, body))
    clusters.refuse(host.engines, spec)
    with host.database.write() as connection:
        try:
            accepted = clusters.create(connection, host.engines, spec)
        except ConflictError as error:
            raise ResourceInUseError(str(error)) from error
    host.wake()
    return {"ClusterArn": names.arn(accepted.cluster.id)}


def describe(host: Host, body: Any) -> Answer:
    """How a cluster is."""
    asked = parse(OneCluster, body)
    with host.database.read() as connection:
        row = row_of(connection, asked.cluster_name)
        nodes = node_rows(connection, row["id"])
        rollout = software.last(connection, row["id"])
    spec = spec_of(row)
    status = status_of(row, rollout)
    groups = [_group(spec, mapping.group_name(spec), nodes[: spec.nodes], status, rollout)]
    if spec.spares:
        spares = nodes[spec.nodes :]
        groups.append(_group(spec, mapping.SPARES_GROUP, spares, status, rollout))
    return told(
        ClusterArn=names.arn(row["id"]),
        ClusterName=row["name"],
        ClusterStatus=status,
        CreationTime=row["created_s"],
        FailureMessage=row["message"] or None,
        InstanceGroups=groups,
        NodeRecovery="None",
    )


def status_of(row: RowMapping, rollout: RowMapping | None) -> str:
    """Of a cluster, in their words."""
    status = ClusterStatus(row["status"])
    under_way = rollout is not None and not OperationStatus(rollout["status"]).final
    if status is ClusterStatus.UPDATING and under_way:
        return "SystemUpdating"
    return mapping.CLUSTER_STATUS[status]


def _group(
    spec: ClusterSpec,
    name: str,
    nodes: Sequence[RowMapping],
    status: str,
    rollout: RowMapping | None,
) -> Answer:
    role, scripts = mapping.kept_of(spec)
    found = Counter(node["software"] for node in nodes)
    kind, wanted = mapping.image_of(spec.software)
    answer = told(
        CurrentCount=sum(node["status"] not in _ABSENT for node in nodes),
        TargetCount=len(nodes),
        InstanceGroupName=name,
        InstanceType=mapping.instance_type(spec.instance),
        ExecutionRole=role,
        LifeCycleConfig=scripts or None,
        Status=status,
        SoftwareUpdateStatus=None if rollout is None else _UPDATE_STATUS[rollout["status"]],
        ImageVersionStatus="UpToDate" if set(found) <= {spec.software} else "UpdateAvailable",
        **{f"Desired{kind}": wanted},
    )
    if len(found) == 1:
        kind, current = mapping.image_of(next(iter(found)))
        answer |= told(**{f"Current{kind}": current})
    return answer


def listed(host: Host, body: Any) -> Answer:
    """Some of all clusters, page by page."""
    asked = parse(ListClusters, body)
    table = tables.clusters
    wanted = []
    if asked.creation_time_after is not None:
        wanted.append(table.c.created_s > asked.creation_time_after)
    if asked.creation_time_before is not None:
        wanted.append(table.c.created_s < asked.creation_time_before)
    with host.database.read() as connection:
        found = connection.execute(select(table).where(*wanted)).mappings().all()
        # Not by LIKE, which takes letters of either case for the same.
        rows = [row for row in found if (asked.name_contains or "") in row["name"]]
        key = "name" if asked.sort_by == "NAME" else "created_s"
        shown, token = names.page(
            rows,
            lambda row: (row[key], row["seq"]),
            asked.sort_order == "Descending",
            asked.max_results,
            asked.next_token,
        )
        summaries = [
            {
                "ClusterArn": names.arn(row["id"]),
                "ClusterName": row["name"],
                "CreationTime": row["created_s"],
                "ClusterStatus": status_of(row, software.last(connection, row["id"])),
            }
            for row in shown
        ]
    return told(ClusterSummaries=summaries, NextToken=token)


def change(host: Host, body: Any) -> Answer:
    """More or fewer instances, and what is kept of their group."""
    asked = parse(UpdateCluster, body)
    group = mapping.the_group(asked.instance_groups)
    with host.database.write() as connection:
        row = row_of(connection, asked.cluster_name)
        spec = spec_of(row)
        name, kind = mapping.group_name(spec), mapping.instance_type(spec.instance)
        _refuse_other("InstanceGroupName", group.instance_group_name, name)
        _refuse_other("InstanceType", group.instance_type or kind, kind)
        release = group.image_release_version or spec.software
        _refuse_other("ImageReleaseVersion", release, spec.software)
        labels = {k: v for k, v in spec.labels.items() if not k.startswith(mapping.KEPT)}
        new = mapping.checked(
            {
                **row["spec"],
                "nodes": group.instance_count,
                "labels": {**labels, **mapping.group_labels(group)},
            }
        )
        wanted = ClusterChange(nodes=new.nodes, labels=dict(new.labels))
        clusters.change(connection, host.engines, row["id"], wanted)
    host.wake()
    return {"ClusterArn": names.arn(row["id"])}


def _refuse_other(member: str, given: str, there: str) -> None:
    if given != there:
        fix = "UpdateClusterSoftware changes it" if "Image" in member else "it cannot be changed"
        raise ValidationExceptionError(f"{member}: {given}: the cluster has {there}; {fix}")


def remove(host: Host, body: Any) -> Answer:
    """End a cluster that has no jobs."""
    asked = parse(OneCluster, body)
    with host.database.write() as connection:
        row = row_of(connection, asked.cluster_name)
        clusters.remove(connection, row["id"])
    host.wake()
    return {"ClusterArn": names.arn(row["id"])}


def update_software(host: Host, body: Any) -> Answer:
    """Other software on all nodes, batch by batch; without a version, that of the cluster on the
    nodes that lack it."""
    asked = parse(UpdateClusterSoftware, body)
    with host.database.write() as connection:
        row = row_of(connection, asked.cluster_name)
        spec = spec_of(row)
        wanted = _software(asked, spec)
        count = len(node_rows(connection, row["id"]))
        config = asked.deployment_config
        wait_s = float(config.wait_interval_in_seconds)
        batch = batch_size(config, count)
        software.roll_out(connection, row["id"], wanted, batch, wait_s)
    host.wake()
    return {"ClusterArn": names.arn(row["id"])}


def _software(asked: UpdateClusterSoftware, spec: ClusterSpec) -> str:
    there = mapping.group_name(spec)
    versions = {asked.image_id} - {None}
    for group in asked.instance_groups or ():
        _refuse_other("InstanceGroupName", group.instance_group_name, there)
        versions |= {group.image_release_version} - {None}
    if len(versions) > 1:
        raise ValidationExceptionError("ImageId and ImageReleaseVersion: give one software, once")
    return next((version for version in versions if version), spec.software)


def batch_size(config: Deployment, nodes: int) -> int:
    """Nodes at a time: one, if nothing is said, so that jobs go on."""
    if config.rolling_update_policy is None:
        return 1
    size = config.rolling_update_policy.maximum_batch_size
    if size.type == "INSTANCE_COUNT":
        return min(size.value, nodes)
    if size.value > 100:
        raise ValidationExceptionError(f"MaximumBatchSize: {size.value} percent: give 1 to 100")
    return max(1, nodes * size.value // 100)
