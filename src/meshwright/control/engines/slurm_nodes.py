"""The nodes of a Slurm cluster: their self-test, and what is done to one of them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence

from meshwright.base.errors import ConfigError, RunError
from meshwright.control.engines.engine import ClusterOrder, DeployStep
from meshwright.control.engines.slurm_client import Commands
from meshwright.control.engines.slurm_words import OURS, Node
from meshwright.control.words import NodeAction, NodeStatus

_CHECK = "meshwright.control.engines.slurm_check"
_CHECK_S = 90.0
_FREE_S = 10  # whole seconds: a self-test never waits longer for nodes that have work
_REBOOT_S = 600.0


class SlurmNodes:
    """Tests and changes them. Everything here may take long."""

    def __init__(self, commands: Commands, python: str) -> None:
        self._commands, self._python = commands, python

    def deploy(self, cluster: ClusterOrder, nodes: Sequence[Node]) -> Iterator[DeployStep]:
        """From a partition to a cluster that is ready. Nodes that have work are not tested."""
        names = ", ".join(node.name for node in nodes)
        yield DeployStep("initialise", f"{len(nodes)} nodes of Slurm: {names}", 0.1)
        heard = [node for node in nodes if not node.unseen]
        yield DeployStep("wire", f"{len(heard)} of {len(nodes)} answer Slurm", 0.2)
        free = [node for node in heard if node.state.rstrip("*+$-") in ("idle", "mixed")]
        if not free:
            yield DeployStep("ready", "no node is free: none was tested", 1.0)
            return
        yield from self._test(cluster, free)
        yield DeployStep("ready", f"{cluster.spec.name} is ready", 1.0)

    def act(self, cluster: ClusterOrder, node: Node, action: NodeAction) -> Iterator[DeployStep]:
        """One action on one node."""
        match action:
            case NodeAction.DRAIN:
                if node.status not in (NodeStatus.DRAINED, NodeStatus.DRAINING):
                    self._update(node, "drain", "asked for")
                yield DeployStep("drain", f"{node.name} takes no new work", 1.0)
            case NodeAction.RESUME:
                yield from self._resume(node)
            case NodeAction.REBOOT:
                yield from self._reboot(node)
            case NodeAction.CHECK:
                yield from self._test(cluster, [node])
                yield DeployStep("ready", f"{node.name} was tested", 1.0)
            case _:
                raise ConfigError(
                    "action",
                    str(action),
                    f"Slurm makes no machines; drain {node.name}, have it replaced, and resume it",
                )

    def _resume(self, node: Node) -> Iterator[DeployStep]:
        out = node.status in (NodeStatus.DRAINED, NodeStatus.DRAINING, NodeStatus.FAILED)
        if out and not node.ours:
            raise ConfigError(
                "action",
                "resume",
                f"{node.name} was taken out of service by {node.by}: {node.reason!r}; "
                f"only they resume it: scontrol update nodename={node.name} state=resume",
            )
        if out:
            self._update(node, "resume", "")
        yield DeployStep("resume", f"{node.name} takes work", 1.0)

    def _reboot(self, node: Node) -> Iterator[DeployStep]:
        reason = f"reason={OURS}reboot"
        words = ("reboot", "ASAP", "nextstate=RESUME", reason, node.name)
        if node.status is NodeStatus.DRAINED and not node.ours:
            raise ConfigError("action", "reboot", f"{node.name} was drained by {node.by}")
        before = self._commands.call("scontrol", "show", "node", node.name, "-o")
        self._commands.call("scontrol", *words, timeout_s=_CHECK_S)
        yield DeployStep("reboot", f"{node.name} reboots when its work is done", 0.3)
        deadline_s = time.monotonic() + _REBOOT_S
        while time.monotonic() < deadline_s:
            now = self._commands.call("scontrol", "show", "node", node.name, "-o")
            if _boot(now) != _boot(before):
                yield DeployStep("reboot", f"{node.name} is back", 1.0)
                return
            time.sleep(1.0)
        raise RunError(f"{node.name} is not back {_REBOOT_S:g} s after it was to reboot")

    def _test(self, cluster: ClusterOrder, nodes: Sequence[Node]) -> Iterator[DeployStep]:
        """A process on each node: does it see our folder, how fast is it?"""
        token = cluster.home / "seen"
        token.write_text(cluster.id)
        where = ["-p", cluster.spec.partition] if cluster.spec.partition else []
        count = str(len(nodes))
        words = ["srun", *where, f"--job-name=mwcheck-{cluster.id}", f"--immediate={_FREE_S}"]
        words += ["-N", count, "-n", count, "-w", ",".join(node.name for node in nodes)]
        try:
            said = self._commands.call(
                *words, self._python, "-m", _CHECK, str(token), timeout_s=_CHECK_S
            )
        except RunError as error:
            raise RunError(f"self-test of {shlex.join(words[-1:])}: {error}") from error
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        blind = [one["node"] for one in found if one["token"] != cluster.id]
        if blind or len(found) < len(nodes):
            raise RunError(f"{cluster.home}: not seen by {', '.join(blind) or 'some nodes'}")
        yield DeployStep("mount", f"all nodes see {cluster.home}", 0.4)
        for phase, key, unit, progress in (
            ("compute", "gflop_s", "GFLOP/s in fp32", 0.6),
            ("memory", "copy_gb_s", "GB/s copied", 0.75),
            ("bandwidth", "write_gb_s", "GB/s written to the shared folder", 0.9),
        ):
            least = min(found, key=lambda one: float(one[key]))
            line = f"at least {least[key]:.1f} {unit}, on {least['node']}"
            yield DeployStep(phase, line, progress, {key: least[key]})

    def _update(self, node: Node, state: str, why: str) -> None:
        reason = [f"reason={OURS}{why}"] if why else []
        words = [f"nodename={node.name}", f"state={state}", *reason]
        self._commands.call("scontrol", "update", *words, timeout_s=_CHECK_S)


def _boot(shown: str) -> str:
    """When the machine booted, as `scontrol show node` says."""
    return next((word for word in shown.split() if word.startswith("BootTime=")), "")
