"""The words of the scheduler: how things are on a cluster, and what is to be done.

All are frozen and know no effects: the service, the replay of traces and the tests hand the same
snapshots to the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WHOLE = 1000  # thousandths of a chip


@dataclass(frozen=True, slots=True)
class Task:
    """One of the equal members of a gang; what it takes is on one node."""

    chips: int = 1  # whole ones
    share: int = 0  # instead of whole chips: thousandths of one
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] = frozenset()  # chips that it can run on; empty: any


@dataclass(frozen=True, slots=True)
class Held:
    """What one task holds: chips of one node, by their numbers within it."""

    node: int
    chips: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node, and what of it nobody holds."""

    number: int
    free: tuple[int, ...]  # of each chip in thousandths; 0 for one that is bad
    domains: tuple[str, ...] = ()  # from the nearest (leaf, rack) to the widest; names are unique
    cpu_milli: int = 0  # free
    memory_mib: int = 0  # free
    model: str = ""
    why_not: str = ""  # why it takes no work, as "are drained"; empty if it does
    hazard_per_h: float = 0.0  # failures to be expected
    spare: bool = False  # held ready: ranks go elsewhere while they can, spares come here


@dataclass(frozen=True, slots=True)
class Level:
    """How chips reach each other whose nearest common domain is of this level."""

    name: str  # "node", then as domains are named: "leaf", "rack", "pod"; last "cluster"
    bandwidth_gb_s: float  # of one chip, one way, while all talk
    latency_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Topology:
    """Levels from the inside of a node to the whole cluster: two more than a node has domains."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a layout, and what it sends."""

    name: str  # "tp", "cp", "ep", "dp_shard", "dp_replicate", "pp"
    size: int
    bytes_per_step: float  # sent by one rank, not hidden behind computing
    messages: float = 0.0  # of one rank in a step, each waits for the latency


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a step of a job takes and sends; axes from the innermost on, as ranks are numbered."""

    axes: tuple[Axis, ...]
    compute_s: float


@dataclass(frozen=True, slots=True)
class JobState:
    """A job that waits (`held` is empty) or runs."""

    id: str
    seq: int  # by age
    task: Task = field(default=Task())
    count: int = 1  # tasks that must start together
    spares: int = 0  # further tasks, held ready; `held` has them last
    priority: int = 0
    team: str = ""
    submitted_s: float = 0.0
    held: tuple[Held, ...] = ()
    started_s: float = 0.0  # its present attempt
    saved_s: float | None = None  # its last checkpoint; None: work since the start would be lost
    restart_s: float = 60.0  # what a restart costs
    run_s: float | None = None  # what is left of it by prediction, from now on; None: unknown
    service_chip_s: float = 0.0  # what it has had in all its attempts
    required: str = ""  # level: the whole gang within one domain of it
    preferred: str = ""  # level: so if it can be had
    slice: int = 0  # each so many tasks within one domain of slice_level
    slice_level: str = ""
    preemptible: bool = True
    preemptions: int = 0  # so far
    least: int | None = None  # an elastic one runs with `least` to `most` tasks, by `grain`
    most: int | None = None
    grain: int = 1
    check: bool = False  # of health: gives way to every job, and counts for nobody
    ending: bool = False  # is being stopped: what it holds will be free soon
    traffic: Traffic | None = None

    @property
    def chips_of_task(self) -> float:
        """A share counts as what it is."""
        return self.task.chips if not self.task.share else self.task.share / WHOLE


@dataclass(frozen=True, slots=True)
class Team:
    """Who shares: a quota of its own, what it lends to others of its cohort, what it borrows."""

    name: str
    nominal: float  # chips
    borrow_limit: float | None = None  # above nominal; None: all that others lend
    lend_limit: float | None = None  # of nominal; None: all that is idle
    weight: float = 1.0  # of its fair share in what is borrowed
    cohort: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the scheduler decides; every bound that keeps it from loops stands here."""

    least_run_s: float = 300.0  # nobody is preempted sooner, except checks
    most_preemptions: int = 3  # of one job
    reservations: int = 1  # jobs at the head of the queue that keep what they wait for
    preempts: bool = True
    shares: bool = True  # among equals the team that has least of its share goes first
    short_first: bool = True  # among equals the job with least predicted work goes first
    patience_s: float = 86_400.0  # who has waited so long goes first among equals


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How things are on one cluster."""

    now_s: float
    nodes: tuple[NodeState, ...]
    jobs: tuple[JobState, ...]
    topology: Topology | None = None  # None: nodes are equal neighbours
    teams: tuple[Team, ...] = ()  # empty: no quotas
    rules: Rules = field(default=Rules())


@dataclass(frozen=True, slots=True)
class Terms:
    """What a place is worth, in what it was judged by; kept with the decision."""

    step_s: float = 0.0  # predicted there
    ideal_s: float = 0.0  # predicted where everything is near
    axes_s: dict[str, float] = field(default_factory=dict)  # of each axis, in a step
    span: dict[str, int] = field(default_factory=dict)  # domains it touches, by level
    fragmentation_chips: float = 0.0  # chips that become of no use to the jobs of late
    risk_chip_s: float = 0.0  # to be lost by failures in an hour
    contention_s: float = 0.0  # of links shared with other jobs, in a step
    spare_near: bool = False  # a spare in its nearest domain

    @property
    def quality(self) -> float:
        """1 where everything is near."""
        return self.ideal_s / self.step_s if self.step_s else 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """A job starts here; tasks in the order of ranks, then spares."""

    job: str
    held: tuple[Held, ...]
    terms: Terms
    why: str = ""  # "first in the queue", "fills a gap", "after making room"


@dataclass(frozen=True, slots=True)
class Preempt:
    """A job is stopped after saving, if it can, so that another may start."""

    job: str
    by: str
    lost_chip_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """An elastic job goes on with these tasks, from its next step on."""

    job: str
    held: tuple[Held, ...]
    why: str = ""


Decision = Start | Preempt | Resize
