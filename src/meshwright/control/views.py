"""What the service answers: the documents of its API. Times are ISO 8601 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field

from meshwright.control.spec import ClusterSpec
from meshwright.control.words import (
    ClusterStatus,
    FaultKind,
    Health,
    JobStatus,
    NodeStatus,
    OperationStatus,
)

Item = TypeVar("Item")


@overload
def at(seconds: float) -> datetime: ...
@overload
def at(seconds: None) -> None: ...
def at(seconds: float | None) -> datetime | None:
    """A moment of the wall clock."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class View(BaseModel):
    """A document that stays as it is."""

    model_config = ConfigDict(frozen=True)


class ClusterView(View):
    """A cluster."""

    id: str
    name: str
    status: ClusterStatus
    message: str = Field(description="one line on what is wrong, or empty")
    engine: str
    nodes: int = Field(description="those of the spares included")
    chips: int = Field(description="spares included")
    chips_per_node: int
    spares: int
    healthy_chips: int
    chips_in_use: int
    jobs: list[str] = Field(description="ids of those that hold chips")
    figures: dict[str, float] = Field(description="of the last self-test; units in the names")
    spec: ClusterSpec
    created_at: datetime
    updated_at: datetime


class ChipView(View):
    """A chip; `figures` by the names of control.figures, null where the engine cannot tell."""

    chip: int = Field(description="within the node")
    health: Health
    links: Health
    spare: bool = Field(description="stands on a node of spares")
    job: str | None
    rank: int | None = Field(description="in its job; null for a spare of it")
    figures: dict[str, float | None]


class NodeView(View):
    """A machine."""

    number: int
    name: str
    status: NodeStatus
    health: Health
    message: str
    address: str
    firmware: str
    software: str
    drained: bool
    seen_at: datetime | None
    chips: list[ChipView]


class LinkView(View):
    """A link between two chips, each as [node, chip]."""

    ends: tuple[tuple[int, int], tuple[int, int]]
    level: str
    bandwidth_gb_s: float = Field(description="one way, 1e9 bytes a second")
    health: Health


class HardwareView(View):
    """`DescribeClusterHardware`."""

    cluster: str
    sampled_at: datetime | None = Field(description="when the figures were taken")
    units: dict[str, str] = Field(description="of the figures")
    nodes: list[NodeView]
    links: list[LinkView]


class SeriesView(View):
    """The history of one figure: for each chip asked for, a value for each time."""

    figure: str
    unit: str
    grain_s: int
    times: list[float] = Field(description="seconds since 1970, where each interval begins")
    chips: list[int] = Field(description="numbers in the cluster")
    mean: list[list[float | None]]
    low: list[list[float | None]]
    high: list[list[float | None]]


class JobView(View):
    """A job."""

    id: str
    name: str
    cluster: str
    status: JobStatus
    message: str = Field(description="why it waits, failed or was started again")
    attempt: int
    restarts: int
    priority: int
    ranks: int
    spares: int
    placement: list[tuple[int, int]] = Field(description="(node, chip): ranks, then spares")
    layout: str
    steps: int
    step: int
    loss: float | None
    tokens_per_s: float | None
    stop_asked: bool
    unknown_since: datetime | None = Field(description="nobody has seen it since")
    labels: dict[str, str]
    created_at: datetime
    started_at: datetime | None = Field(description="when its present attempt was decided")
    running_at: datetime | None = Field(description="when all its ranks were ready at last")
    ended_at: datetime | None


class JobDetail(JobView):
    """A job, with its resolved job file."""

    job: dict[str, Any]
    run: str = Field(description="folder of its run, on the machines of the cluster")


class ExplainView(View):
    """Why a job waits, or why it is where it is."""

    job: str
    status: JobStatus
    sentence: str
    free_chips: int
    needed_chips: int
    ahead: list[str] = Field(description="jobs that go first")
    unusable: dict[str, int] = Field(description="chips that cannot be had, by why")


class OperationView(View):
    """Long work."""

    id: str
    kind: str
    cluster: str
    status: OperationStatus
    phase: str
    progress: float = Field(ge=0, le=1)
    error: str
    figures: dict[str, float]
    created_at: datetime
    ended_at: datetime | None


class LogLine(View):
    """One line of a log of deployment."""

    at: datetime
    phase: str
    line: str


class EventView(View):
    """Something that has happened. Numbers grow; some are left out."""

    seq: int
    at: datetime
    kind: str
    cluster: str | None
    job: str | None
    operation: str | None
    node: int | None
    chip: int | None
    data: dict[str, Any]


class FaultView(View):
    """A fault that was injected."""

    id: str
    cluster: str
    kind: FaultKind
    node: int
    chip: int | None
    severity: float
    status: str = Field(description="ASKED, ACTIVE, CLEARING, OVER or REFUSED")
    message: str
    since: datetime
    until: datetime | None


class CheckpointView(View):
    """A commit of a job's state."""

    job: str
    id: str
    branch: str
    step: int
    depth: int = Field(description="changes of single steps to be replayed to read it")
    created_at: datetime
    encrypted: bool


class PlanView(View):
    """What the planner answered."""

    id: str
    created_at: datetime
    question: dict[str, Any]
    plan: dict[str, Any]


class MetricLine(View):
    """One step of a job, as its run wrote it (base.events.Metrics)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    step: int
    loss: float | None = None


class LogText(View):
    """The end of one log file of a job."""

    name: str
    names: list[str] = Field(description="the logs that there are")
    text: str


class Accepted(View):
    """Long work has been taken on, and is written down."""

    cluster: ClusterView
    operation: OperationView


class ItemResult(View):
    """How one of several went."""

    name: str
    ok: bool
    error: str
    operation: str | None


class ServiceView(View):
    """The service itself."""

    version: str
    id: str
    leads: bool
    leader: str | None
    started_at: datetime
    database: str


class Page(BaseModel, Generic[Item]):
    """A part of a list; `cursor` names the next part, null after the last."""

    items: list[Item]
    cursor: str | None
