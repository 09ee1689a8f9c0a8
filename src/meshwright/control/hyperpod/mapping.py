"""What is what: a group of instances is the nodes of a cluster, a tag is a label or a setting.

`docs/howto/hyperpod.md` has the table. What the other side has no place for here and that clients
read again (the group's name, its role, its scripts) is kept in labels that begin with `hyperpod:`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from meshwright.base.errors import ConfigError
from meshwright.catalog import load as catalogue
from meshwright.control.hyperpod.errors import ValidationExceptionError
from meshwright.control.hyperpod.shapes import CreateCluster, Group, Tag
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import ClusterStatus, NodeStatus

SETTING, KEPT = "meshwright:", "hyperpod:"
DEFAULT_GROUP, SPARES_GROUP = "nodes", "spares"
_SETTINGS = {
    "engine": str,
    "chips_per_node": int,
    "spares": int,
    "memory_gib_per_chip": float,
    "seed": int,
    "speed": float,
    "partition": str,
    "namespace": str,
}
_ROLE, _GROUP = "hyperpod:role", "hyperpod:group"
_SCRIPTS = {
    "source_s3_uri": "hyperpod:source",
    "on_create": "hyperpod:on-create",
    "on_init_complete": "hyperpod:on-init-complete",
}
_FIRST_RELEASE = "1.0.0"

CLUSTER_STATUS = {
    ClusterStatus.CREATING: "Creating",
    ClusterStatus.READY: "InService",
    ClusterStatus.UPDATING: "Updating",
    ClusterStatus.DELETING: "Deleting",
    ClusterStatus.FAILED: "Failed",
}
NODE_STATUS = {
    NodeStatus.PENDING: ("Pending", ""),
    NodeStatus.RUNNING: ("Running", ""),
    NodeStatus.UNKNOWN: ("Pending", "cannot be seen now, which is no sign that it has failed"),
    NodeStatus.DRAINING: ("Running", "takes no new work; what runs there leaves"),
    NodeStatus.DRAINED: ("Running", "takes no work"),
    NodeStatus.REBOOTING: ("Pending", "reboots"),
    NodeStatus.REPLACING: ("Pending", "is being replaced"),
    NodeStatus.CHECKING: ("DeepHealthCheckInProgress", ""),
    NodeStatus.FAILED: ("Failure", ""),
}


def the_group(groups: Sequence[Group]) -> Group:
    """The only one. Raises ValidationExceptionError for more, and for spares."""
    for group in groups:
        if "spare" in group.instance_group_name.lower():
            raise ValidationExceptionError(
                f"InstanceGroups: {group.instance_group_name!r} would be spares, which are chips "
                f"here and no group; leave it out and give the tag {SETTING}spares"
            )
    if len(groups) > 1:
        raise ValidationExceptionError(
            f"InstanceGroups: has {len(groups)}, and a cluster is one group of like nodes here; "
            "make a cluster of each"
        )
    if groups[0].instance_count == 0:
        raise ValidationExceptionError("InstanceCount: 0: a cluster has one node at least")
    return groups[0]


def spec_of(asked: CreateCluster) -> ClusterSpec:
    """The cluster that is asked for. Raises ValidationExceptionError."""
    group = the_group(asked.instance_groups)
    labels, settings = _tags(asked.tags)
    document: dict[str, Any] = {
        "name": asked.cluster_name,
        "spares": 0,  # as many nodes as are asked for, and no more
        **settings,
        "instance": _instance(group.instance_type),
        "nodes": group.instance_count,
        "software": group.image_release_version or _FIRST_RELEASE,
        "labels": {**labels, **group_labels(group)},
    }
    return checked(document)


def checked(document: dict[str, Any]) -> ClusterSpec:
    """Raises ValidationExceptionError for what a cluster cannot be, ConfigError for too large a
    one."""
    try:
        return ClusterSpec.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if place == "nodes":  # by its key it is told apart as a limit
            raise ConfigError("nodes", document["nodes"], first["msg"]) from error
        raise ValidationExceptionError(
            f"{place} = {str(first.get('input'))[:60]!r}: {first['msg']}"
        ) from error


def group_labels(group: Group) -> dict[str, str]:
    """What is kept of a group for clients to read again."""
    kept = {_GROUP: group.instance_group_name, _ROLE: group.execution_role}
    scripts = group.life_cycle_config
    for field, label in _SCRIPTS.items():
        if scripts is not None and getattr(scripts, field) is not None:
            kept[label] = getattr(scripts, field)
    return kept


def _tags(tags: Sequence[Tag]) -> tuple[dict[str, str], dict[str, Any]]:
    labels: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for tag in tags:
        if tag.key.startswith(KEPT):
            raise ValidationExceptionError(f"Tags: {tag.key}: keys with {KEPT} are the service's")
        if not tag.key.startswith(SETTING):
            labels[tag.key] = tag.value
            continue
        name = tag.key.removeprefix(SETTING).replace("-", "_")
        if name not in _SETTINGS:
            known = ", ".join(SETTING + key for key in _SETTINGS)
            raise ValidationExceptionError(f"Tags: {tag.key}: no such setting; there are {known}")
        try:
            settings[name] = _SETTINGS[name](tag.value)
        except ValueError:
            word = "number" if _SETTINGS[name] is float else "whole number"
            raise ValidationExceptionError(
                f"Tags: {tag.key} = {tag.value!r}: give a {word}"
            ) from None
    return labels, settings


def _instance(kind: str | None) -> str:
    """Of the catalogue, from `ml.trn2.48xlarge`; `ml.local` is what engine local has."""
    word = (kind or "").removeprefix("ml.")
    if not kind or word == kind:
        raise ValidationExceptionError(
            f"InstanceType: {kind!r}: give one with ml. before it, as ml.trn2.48xlarge"
        )
    found = "local" if word == "local" else catalogue.canonical_name(word)
    if found is None:
        known = ", ".join(instance_type(name) for name in catalogue.names())
        raise ValidationExceptionError(
            f"InstanceType: {kind}: not in the catalogue, which has {known}"
        )
    return found


def instance_type(instance: str) -> str:
    """`ml.trn2.48xlarge` for `trn2`."""
    full = (alias for alias in catalogue.aliases(instance) if "." in alias)
    return f"ml.{next(full, instance)}"


def group_name(spec: ClusterSpec) -> str:
    """Of the nodes; clusters that were made otherwise have one too."""
    return spec.labels.get(_GROUP, DEFAULT_GROUP)


def kept_of(spec: ClusterSpec) -> tuple[str | None, dict[str, str]]:
    """Role and scripts of the group."""
    scripts = {
        "SourceS3Uri": spec.labels.get(_SCRIPTS["source_s3_uri"]),
        "OnCreate": spec.labels.get(_SCRIPTS["on_create"]),
        "OnInitComplete": spec.labels.get(_SCRIPTS["on_init_complete"]),
    }
    return spec.labels.get(_ROLE), {key: value for key, value in scripts.items() if value}


def image_of(software: str) -> tuple[str, str | None]:
    """Image id or release, which one it is by its form: the name of the member, and the value;
    None for software that is neither."""
    if software.startswith("ami-") or software == "default":
        return "ImageId", software
    parts = software.split(".")
    release = len(parts) == 3 and all(part.isdigit() for part in parts)
    return "ImageReleaseVersion", software if release else None
