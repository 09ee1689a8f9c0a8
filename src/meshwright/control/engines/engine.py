"""What an engine is: it makes the nodes of a cluster, starts runs on them, and says what it sees.

The service calls an engine from one thread of the one service that leads. Every call may be made
again after a crash, with the same words, and then does nothing twice: engines keep no truth of
their own but what is on the machines they start things on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, Health, NodeAction, NodeStatus, RunState

Sample = npt.NDArray[np.float32]  # (chips, 16), see control.figures


@dataclass(frozen=True)
class Fault:
    """One that was injected. Times are of the wall clock, in seconds."""

    id: str
    kind: FaultKind
    node: int
    chip: int | None  # within the node; None: all of it
    severity: float
    since_s: float
    until_s: float | None


@dataclass(frozen=True)
class RunOrder:
    """One attempt at a job: what is to be started, the same words each time it is asked for."""

    job_id: str
    attempt: int  # from 1; a higher one ends what is left of a lower one
    run_dir: Path  # of the job, the same for all attempts: a later one goes on with it
    job_file: Path  # a resolved job file that is on the disk
    chips: tuple[tuple[int, int], ...]  # (node, chip) of each rank, then of each spare
    ranks: int  # the first of them train, the rest are spares
    started_s: float  # wall clock at which this attempt was decided
    handle: Mapping[str, Any] = field(default_factory=dict)  # what `start` answered, once it has


@dataclass(frozen=True)
class ClusterOrder:
    """A cluster as it should be."""

    id: str
    spec: ClusterSpec
    chips_per_node: int
    home: Path  # a folder of its own
    created_s: float
    faults: Sequence[Fault] = ()
    runs: Sequence[RunOrder] = ()  # that should be on it
    # When the present machine of a node came into being, if later than the cluster.
    replaced_s: Mapping[int, float] = field(default_factory=dict)
    drained: frozenset[int] = frozenset()

    @property
    def chips(self) -> int:
        """In all: the spares stand on nodes of their own, after the others."""
        return self.spec.nodes * self.chips_per_node + self.spec.spares

    @property
    def node_count(self) -> int:
        """Of all nodes, those of the spares included."""
        return -(-self.chips // self.chips_per_node)

    def chips_of(self, node: int) -> int:
        """How many chips are on a node; chip `c` of node `n` is number `n * chips_per_node + c`."""
        return min(self.chips_per_node, self.chips - node * self.chips_per_node)


@dataclass(frozen=True)
class NodeReport:
    """What can be seen of a node. A node that cannot be seen is UNKNOWN, and never FAILED."""

    number: int
    status: NodeStatus
    health: Health
    chips: tuple[Health, ...]
    links: tuple[Health, ...] = ()  # of each chip, all its links taken together
    address: str = ""
    firmware: str = ""
    message: str = ""  # one line on what is wrong


@dataclass(frozen=True)
class ClusterReport:
    """What can be seen of a cluster at `ts` (wall clock, seconds)."""

    ts: float
    nodes: tuple[NodeReport, ...]
    sample: Sample | None  # None: this engine cannot tell now


@dataclass(frozen=True)
class RunReport:
    """What can be seen of an attempt. Steps and losses are read from its run directory."""

    state: RunState
    message: str = ""  # why it failed, or why it cannot be seen
    orphaned: bool = False  # its conductor is gone while its ranks train: start it again


@dataclass(frozen=True)
class DeployStep:
    """One thing done on the way to a cluster that is ready."""

    phase: str  # initialise, wire, mount, compute, memory, bandwidth, fp8, drill, ready
    line: str  # for the deployment log
    progress: float  # 0 to 1, of the whole
    figures: Mapping[str, float] = field(default_factory=dict)  # measured; units in the names


class Engine(Protocol):
    """One way to start processes on nodes. Calls raise `MeshwrightError` with one line when they
    cannot be carried out; the service tries again."""

    name: str

    def refuse(self, spec: ClusterSpec) -> None:
        """Raise ConfigError, naming the key, for a cluster that this engine cannot make."""

    def chips_per_node(self, spec: ClusterSpec) -> int:
        """Of a cluster so asked for."""

    def deploy(self, cluster: ClusterOrder) -> Iterator[DeployStep]:
        """Make it ready, or find that it is; a self-test is the last part."""

    def destroy(self, cluster: ClusterOrder) -> None:
        """End everything on it that this engine has started."""

    def observe(self, cluster: ClusterOrder, now_s: float) -> ClusterReport:
        """What can be seen of it now; in a second it is asked again."""

    def act(self, cluster: ClusterOrder, node: int, action: NodeAction) -> Iterator[DeployStep]:
        """Reboot, replace, check, drain or resume one node."""

    def inject(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Do it. Raises ConfigError for a kind that this engine cannot do."""

    def clear(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Undo it."""

    def start(self, cluster: ClusterOrder, run: RunOrder) -> Mapping[str, Any]:
        """Start an attempt, or find that it was started; a handle, as plain JSON."""

    def look(self, cluster: ClusterOrder, run: RunOrder) -> RunReport:
        """What can be seen of an attempt."""

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """Ask an attempt to save and end; `hard`: end it now. It may have ended."""

    def close(self) -> None:
        """The service ends; what runs goes on."""
