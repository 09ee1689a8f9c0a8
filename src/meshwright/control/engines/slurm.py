"""Engine `slurm`: the nodes of a partition, one job of Slurm for each attempt.

How a run lives there, and why so: docs/decisions/0020-runs-under-slurm.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.catalog import load
from meshwright.control.engines.engine import (
    ClusterOrder,
    ClusterReport,
    DeployStep,
    Fault,
    NodeReport,
    RunOrder,
    RunReport,
)
from meshwright.control.engines.slurm_batch import node_numbers
from meshwright.control.engines.slurm_client import Commands, Picture, Watcher, ask_daemons
from meshwright.control.engines.slurm_decide import Answer
from meshwright.control.engines.slurm_nodes import SlurmNodes
from meshwright.control.engines.slurm_runs import SlurmRuns
from meshwright.control.engines.slurm_words import Node
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import Health, NodeAction, NodeStatus

_STALE_S = 10.0  # a picture that is older tells nothing


class SlurmEngine:
    """See `Engine`. `settings` are added to the environment of Slurm's commands (SLURM_CONF);
    `python` is the interpreter on the nodes, which has Meshwright installed."""

    name = "slurm"

    def __init__(
        self, settings: Mapping[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self._commands = Commands(dict(settings or {}))
        self._runs = SlurmRuns(self._commands, python)
        self._nodes = SlurmNodes(self._commands, python)
        self._watchers: dict[str, Watcher] = {}

    def refuse(self, spec: ClusterSpec) -> None:
        """Raise ConfigError where the partition is not there, or has too few nodes."""
        found = self._ask(spec)
        needed = spec.nodes + -(-spec.spares // self.chips_per_node(spec))
        if needed > len(found):
            raise ConfigError(
                "nodes",
                f"{needed}, those of the spares included",
                f"partition {spec.partition or '(the default one)'} has {len(found)}; ask for as "
                "many or fewer",
            )

    def chips_per_node(self, spec: ClusterSpec) -> int:
        """As asked for, or the instance's."""
        if spec.chips_per_node is not None:
            return spec.chips_per_node
        return load.instance(spec.instance).chips_per_node or 1

    def deploy(self, cluster: ClusterOrder) -> Iterator[DeployStep]:
        """Find the nodes; see that they share the folder of the cluster, and test them."""
        self.refuse(cluster.spec)
        cluster.home.mkdir(parents=True, exist_ok=True)
        nodes = self._ask(cluster.spec)[: cluster.node_count]
        yield from self._nodes.deploy(cluster, nodes)

    def destroy(self, cluster: ClusterOrder) -> None:
        """End its jobs. Nodes stay as they are: Slurm has them."""
        self._runs.destroy(cluster)

    def observe(self, cluster: ClusterOrder, now_s: float) -> ClusterReport:
        """What Slurm says of its nodes. One that it does not hear is UNKNOWN, unless its machine
        refuses connections."""
        picture = self._picture(cluster)
        if picture is None:
            why = self._watcher(cluster.spec).error or "Slurm's controller does not answer"
            blind = [_blind(n, why, cluster) for n in range(cluster.node_count)]
            return ClusterReport(now_s, tuple(blind), None)
        nodes = picture.nodes[: cluster.node_count]
        answers = ask_daemons([node for node in nodes if node.unseen])
        found = [
            _report(number, node, answers.get(node.name, Answer.UNASKED), cluster)
            for number, node in enumerate(nodes)
        ]
        lacking = range(len(found), cluster.node_count)
        found += [_blind(n, "the partition has no such node", cluster) for n in lacking]
        return ClusterReport(picture.asked_s, tuple(found), None)

    def act(self, cluster: ClusterOrder, node: int, action: NodeAction) -> Iterator[DeployStep]:
        """Through scontrol. What somebody else has drained is theirs: it is not resumed."""
        nodes = self._ask(cluster.spec)
        if node >= len(nodes):
            raise ConfigError("node", node, f"the partition has nodes 0 to {len(nodes) - 1}")
        yield from self._nodes.act(cluster, nodes[node], action)

    def inject(self, cluster: ClusterOrder, fault: Fault) -> None:
        """None can be."""
        raise ConfigError(
            "kind",
            str(fault.kind),
            f"{cluster.spec.name} has real machines; use one of engine local or simulated",
        )

    def clear(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Nothing was done."""

    def start(self, cluster: ClusterOrder, run: RunOrder) -> Mapping[str, Any]:
        """One job of Slurm: `slurm_job` is its number."""
        nodes = self._ask(cluster.spec)
        numbers = node_numbers(run)
        if numbers[-1] >= len(nodes):
            raise RunError(f"partition {cluster.spec.partition}: node {numbers[-1]} is gone")
        return self._runs.start(cluster, run, [nodes[number] for number in numbers])

    def look(self, cluster: ClusterOrder, run: RunOrder) -> RunReport:
        """By locks, marks and Slurm together; does what follows from it."""
        return self._runs.look(cluster, run, self._picture(cluster))

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """Word is left in the folder of the job: Slurm need not answer."""
        self._runs.stop(cluster, run, hard)

    def close(self) -> None:
        """End our threads; jobs and conductors go on."""
        for watcher in self._watchers.values():
            watcher.close()
        self._runs.close()

    def _watcher(self, spec: ClusterSpec) -> Watcher:
        if spec.partition not in self._watchers:
            self._watchers[spec.partition] = Watcher(self._commands, spec.partition)
        return self._watchers[spec.partition]

    def _picture(self, cluster: ClusterOrder) -> Picture | None:
        picture = self._watcher(cluster.spec).picture()
        return picture if picture and time.time() - picture.asked_s < _STALE_S else None

    def _ask(self, spec: ClusterSpec) -> tuple[Node, ...]:
        found = self._commands.nodes(spec.partition)
        if not found:
            raise ConfigError("partition", spec.partition, "Slurm has none of that name: `sinfo`")
        return found


def _report(number: int, node: Node, answer: Answer, cluster: ClusterOrder) -> NodeReport:
    status, health, message = node.status, node.health, node.reason
    if status is NodeStatus.UNKNOWN:
        message = message or f"Slurm says {node.state}"
        if answer is Answer.REFUSED:
            status, health = NodeStatus.FAILED, Health.FAILED
            message = f"slurmd does not run there: port {node.port} refuses connections"
    chips = (health,) * cluster.chips_of(number)
    return NodeReport(number, status, health, chips, address=node.address, message=message)


def _blind(number: int, why: str, cluster: ClusterOrder) -> NodeReport:
    chips = (Health.UNKNOWN,) * cluster.chips_of(number)
    return NodeReport(number, NodeStatus.UNKNOWN, Health.UNKNOWN, chips, message=why)
