"""What HyperPod's clients may ask for. Names, bounds and patterns are those of botocore's model of
SageMaker; members that would have no effect here are not taken, and so are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_pascal

from meshwright.control.hyperpod.errors import ValidationExceptionError

_NAME = r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=_NAME)]
ClusterRef = Annotated[
    str,
    Field(
        max_length=256,
        pattern=r"^(arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]*:[0-9]{12}:cluster/[a-z0-9]{12}"
        r"|[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62})$",
    ),
]
InstanceId = Annotated[str, Field(max_length=256, pattern=r"^i-[a-f0-9]{8}(?:[a-f0-9]{9})?$")]
LogicalId = Annotated[str, Field(max_length=128, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9\-]*[a-zA-Z0-9]$")]
Release = Annotated[str, Field(max_length=64, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")]
Image = Annotated[str, Field(max_length=21, pattern=r"^(ami-[0-9a-fA-F]{8,17}|default)$")]
Moment = Annotated[float, Field(ge=0, le=1e11)]  # seconds since 1970
Order = Literal["Ascending", "Descending"]
Model = TypeVar("Model", bound="Shape")


class Shape(BaseModel):
    """Known members only, of just the types that are asked for."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=to_pascal
    )


class Empty(Shape):
    """Nothing."""


class LifeCycleConfig(Shape):
    """Kept and told again: no scripts are run."""

    source_s3_uri: Annotated[str | None, Field(max_length=256)] = None
    on_create: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    on_init_complete: Annotated[str | None, Field(min_length=1, max_length=128)] = None


class Group(Shape):
    """`ClusterInstanceGroupSpecification`."""

    instance_group_name: Name
    instance_type: str | None = Field(default=None, max_length=64)
    instance_count: int = Field(ge=0, le=6758)
    execution_role: str = Field(min_length=20, max_length=256)  # as long as a label may be
    life_cycle_config: LifeCycleConfig | None = None
    on_start_deep_health_checks: list[Literal["InstanceStress", "InstanceConnectivity"]] | None = (
        Field(default=None, min_length=1, max_length=3)
    )
    image_release_version: Release | None = None


class Tag(Shape):
    """A label, or with `meshwright:` before its key a setting."""

    key: str = Field(min_length=1, max_length=128)
    value: str = Field(max_length=256)


class CreateCluster(Shape):
    """A cluster is one group here."""

    cluster_name: Name
    instance_groups: list[Group] = Field(min_length=1, max_length=100)
    tags: list[Tag] = Field(default=[], max_length=50)
    node_recovery: Literal["None"] | None = None


class UpdateCluster(Shape):
    """Another count of instances."""

    cluster_name: ClusterRef
    instance_groups: list[Group] = Field(min_length=1, max_length=100)
    node_recovery: Literal["None"] | None = None


class OneCluster(Shape):
    """Of operations that need no more than its name."""

    cluster_name: ClusterRef


class Listing(Shape):
    """What lists have in common."""

    max_results: int = Field(default=10, ge=1, le=100)
    next_token: str | None = Field(default=None, max_length=8192)
    sort_order: Order = "Ascending"


class ListClusters(Listing):
    """Some of all clusters."""

    creation_time_after: Moment | None = None
    creation_time_before: Moment | None = None
    name_contains: str | None = Field(default=None, max_length=63)
    sort_by: Literal["CREATION_TIME", "NAME"] = "CREATION_TIME"


class ListClusterNodes(Listing):
    """Some of a cluster's nodes."""

    cluster_name: ClusterRef
    creation_time_after: Moment | None = None
    creation_time_before: Moment | None = None
    instance_group_name_contains: Name | None = None
    sort_by: Literal["CREATION_TIME", "NAME"] = "CREATION_TIME"
    include_node_logical_ids: bool = False


class ListClusterEvents(Listing):
    """Some of what has happened to a cluster, the newest first."""

    cluster_name: ClusterRef
    instance_group_name: Name | None = None
    node_id: InstanceId | None = None
    event_time_after: Moment | None = None
    event_time_before: Moment | None = None
    resource_type: Literal["Cluster", "InstanceGroup", "Instance"] | None = None
    sort_by: Literal["EventTime"] = "EventTime"
    sort_order: Order = "Descending"


class DescribeClusterEvent(Shape):
    """One of them."""

    cluster_name: ClusterRef
    event_id: str = Field(pattern=r"^[a-f0-9]{8}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{12}$")


class DescribeClusterNode(Shape):
    """One node, by either of its names."""

    cluster_name: ClusterRef
    node_id: InstanceId | None = None
    node_logical_id: LogicalId | None = None


class SomeNodes(Shape):
    """Nodes to reboot or to replace."""

    cluster_name: ClusterRef
    node_ids: list[InstanceId] = Field(default=[], max_length=25)
    node_logical_ids: list[LogicalId] = Field(default=[], max_length=25)


class ManyNodes(SomeNodes):
    """Nodes to delete."""

    node_ids: list[InstanceId] = Field(default=[], max_length=3000)
    node_logical_ids: list[LogicalId] = Field(default=[], max_length=99)


class Capacity(Shape):
    """`CapacitySizeConfig`."""

    type: Literal["INSTANCE_COUNT", "CAPACITY_PERCENTAGE"]
    value: int = Field(ge=1)


class RollingPolicy(Shape):
    """How many at a time."""

    maximum_batch_size: Capacity


class Deployment(Shape):
    """`DeploymentConfiguration`; alarms to roll back by do not exist here."""

    rolling_update_policy: RollingPolicy | None = None
    wait_interval_in_seconds: int = Field(default=0, ge=0, le=3600)


class SoftwareGroup(Shape):
    """The group, and what it shall run."""

    instance_group_name: Name
    image_release_version: Release | None = None


class UpdateClusterSoftware(Shape):
    """Other software on all nodes."""

    cluster_name: ClusterRef
    instance_groups: list[SoftwareGroup] | None = Field(default=None, min_length=1, max_length=100)
    deployment_config: Deployment = Deployment.model_construct(
        rolling_update_policy=None, wait_interval_in_seconds=0
    )
    image_id: Image | None = None


def parse(shape: type[Model], body: Any) -> Model:
    """What was asked. Raises ValidationExceptionError that names the member."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        said = first["msg"]
        if first["type"] == "extra_forbidden":
            said = "is not taken here; leave it out (docs/howto/hyperpod.md says what is)"
        raise ValidationExceptionError(f"{where}: {said}") from error
