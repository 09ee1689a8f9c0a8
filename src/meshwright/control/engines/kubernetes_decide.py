"""States of nodes and runs on Kubernetes, from what its API server and the run itself say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.control.engines.engine import RunReport
from meshwright.control.engines.slurm_decide import End
from meshwright.control.words import NodeStatus, RunState

DRAINED = "meshwright.dev/drained"  # an annotation: it was we who did it


@dataclass(frozen=True)
class Seen:
    """What can be seen of an attempt."""

    answered: bool  # the API server did
    jobset: Mapping[str, Any] | None
    survives: bool
    begun: bool  # its leader has begun
    held: bool  # its leader lives
    ended: bool  # its leader has left its last word
    stop: bool  # it was asked to end
    ready: bool
    end: End
    error: str


def judge(seen: Seen) -> RunReport:
    """The state of an attempt. What the run shows by itself comes first."""
    if seen.ended and not seen.held:
        return _ended(seen)
    if seen.held:
        return RunReport(RunState.RUNNING if seen.ready else RunState.STARTING)
    if not seen.answered:
        return RunReport(RunState.UNKNOWN, "the API server does not answer")
    if seen.jobset is None:
        if seen.stop:
            return RunReport(RunState.STOPPED, "ended on request")
        return RunReport(RunState.LOST, "its JobSet is gone")
    if failed := _condition(seen.jobset, "Failed"):
        return RunReport(RunState.LOST if seen.begun else RunState.FAILED, failed)
    if seen.begun and not seen.survives:
        return RunReport(RunState.LOST, "its pod is gone")
    if seen.begun:  # Kubernetes makes a new pod
        return RunReport(RunState.RUNNING, "nobody conducts it")
    suspended = seen.jobset.get("spec", {}).get("suspend", False)
    return RunReport(RunState.STARTING, "waits in its queue" if suspended else "waits for its pods")


def _ended(seen: Seen) -> RunReport:
    if seen.end is End.FINISHED:
        return RunReport(RunState.FINISHED)
    if seen.stop:
        return RunReport(RunState.STOPPED)
    if seen.end is End.INTERRUPTED:
        return RunReport(RunState.LOST, "Kubernetes has ended it: evicted or preempted")
    return RunReport(RunState.FAILED, seen.error or "it ended and did not say why")


def _condition(thing: Mapping[str, Any], kind: str) -> str:
    """What a condition that holds says; empty if it does not hold."""
    for one in thing.get("status", {}).get("conditions", ()):
        if one["type"] == kind and one["status"] == "True":
            return one.get("message") or one.get("reason") or kind
    return ""


def node_status(node: Mapping[str, Any]) -> tuple[NodeStatus, str]:
    """Of a node, and one line on what is wrong. Its kubelet's silence is no evidence of failure."""
    ready = next(
        (one for one in node.get("status", {}).get("conditions", ()) if one["type"] == "Ready"),
        None,
    )
    if ready is None:
        return NodeStatus.PENDING, "it has not joined yet"
    if ready["status"] == "Unknown":
        return NodeStatus.UNKNOWN, ready.get("message", "")
    if ready["status"] == "False":
        return NodeStatus.FAILED, ready.get("message", "")
    if node.get("spec", {}).get("unschedulable"):
        return NodeStatus.DRAINED, drained_by(node)
    return NodeStatus.RUNNING, ""


def drained_by(node: Mapping[str, Any]) -> str:
    """Who has cordoned it, as far as that can be told."""
    said = (node["metadata"].get("annotations") or {}).get(DRAINED)
    return f"meshwright: {said}" if said else "cordoned by somebody else"
