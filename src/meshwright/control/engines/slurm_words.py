"""What Slurm's commands write, as values; and its states in our words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.control.words import Health, NodeStatus

NODE_FORMAT = "%N|%T|%o|%c|%G|%u|%E"  # of `sinfo -N -o`: a reason may hold a bar, and is last
PORT_FORMAT = "NodeList:|,Port:"  # of `sinfo -N -O`, which alone knows ports
JOB_FORMAT = "%i|%T|%N|%j|%k|%r"  # of `squeue -o`
OURS = "meshwright: "  # how every reason that we give begins
_DEFAULT_PORT = 6818

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"})
_LIVING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "REQUEUE_FED", "RESIZING", "SIGNALING"})
_ACTIVE = _WAITING | _LIVING | {"STAGE_OUT", "STOPPED"}

# Flags that `sinfo` puts behind a state; `*` is the one that says that nobody sees the node.
_FLAGS = "*~#!%$@^-+"
_STATUS = {
    "idle": NodeStatus.RUNNING,
    "allocated": NodeStatus.RUNNING,
    "mixed": NodeStatus.RUNNING,
    "completing": NodeStatus.RUNNING,
    "planned": NodeStatus.RUNNING,
    "reserved": NodeStatus.RUNNING,
    "blocked": NodeStatus.RUNNING,
    "draining": NodeStatus.DRAINING,
    "drained": NodeStatus.DRAINED,
    "maint": NodeStatus.DRAINED,
    "down": NodeStatus.FAILED,
    "error": NodeStatus.FAILED,
    "fail": NodeStatus.FAILED,
    "failing": NodeStatus.FAILED,
    "inval": NodeStatus.FAILED,
    "reboot": NodeStatus.REBOOTING,
    "rebooting": NodeStatus.REBOOTING,
    "reboot_issued": NodeStatus.REBOOTING,
    "future": NodeStatus.PENDING,
    "powered_down": NodeStatus.PENDING,
    "powering_down": NodeStatus.PENDING,
    "powering_up": NodeStatus.PENDING,
}
_HEALTH = {
    NodeStatus.UNKNOWN: Health.UNKNOWN,
    NodeStatus.PENDING: Health.UNKNOWN,
    NodeStatus.FAILED: Health.FAILED,
}


@dataclass(frozen=True)
class Node:
    """A node as `sinfo` shows it."""

    name: str
    state: str  # with its flags
    address: str
    port: int
    cpus: int
    gres: str  # "gpu:h100:8(S:0-1)"; empty if it has none
    reason: str
    by: str  # who gave the reason

    @property
    def unseen(self) -> bool:
        """Whether the controller does not hear it."""
        return "*" in self.state or self.state.startswith("unk")

    @property
    def status(self) -> NodeStatus:
        """That nobody hears a node is no evidence that it has failed."""
        word = self.state.rstrip(_FLAGS)
        status = _STATUS.get(word, NodeStatus.UNKNOWN)
        if self.unseen and status is not NodeStatus.DRAINED:
            return NodeStatus.UNKNOWN
        if "@" in self.state or "^" in self.state:
            return NodeStatus.REBOOTING
        return status

    @property
    def health(self) -> Health:
        """As far as Slurm knows: one that was drained for a reason is not what it was."""
        if self.status in (NodeStatus.DRAINED, NodeStatus.DRAINING):
            return Health.DEGRADED
        return _HEALTH.get(self.status, Health.HEALTHY)

    @property
    def ours(self) -> bool:
        """Whether it was we who took it out of service."""
        return self.reason.startswith(OURS)


@dataclass(frozen=True)
class SlurmJob:
    """A job as `squeue` shows it."""

    id: int
    state: str
    nodes: tuple[str, ...]
    name: str
    comment: str
    reason: str

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or is being cleared away."""
        return self.state in _ACTIVE

    @property
    def waiting(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in _WAITING

    @property
    def attempt(self) -> int:
        """Of our job that it is; 0 if it does not say."""
        found = re.fullmatch(r"attempt=([0-9]+)", self.comment)
        return int(found[1]) if found else 0


def parse_nodes(text: str, ports: str) -> tuple[Node, ...]:
    """Nodes by name, each once, in the order of their names."""
    port_of = dict(_halves(line) for line in ports.splitlines() if "|" in line)
    found = {}
    for line in text.splitlines():
        name, state, address, cpus, gres, by, reason = line.split("|", 6)
        port = port_of.get(name, "")
        found[name] = Node(
            name,
            state,
            address,
            int(port) if port.isdigit() else _DEFAULT_PORT,
            int(cpus) if cpus.isdigit() else 1,
            "" if gres == "(null)" else gres,
            "" if reason == "none" else reason,
            by,
        )
    return tuple(found[name] for name in sorted(found, key=_natural))


def parse_jobs(text: str) -> tuple[SlurmJob, ...]:
    """Jobs that are ours, oldest first."""
    found = []
    for line in text.splitlines():
        number, state, nodes, name, comment, reason = line.split("|", 5)
        if number.isdigit():
            comment = "" if comment == "(null)" else comment
            found.append(SlurmJob(int(number), state, expand(nodes), name, comment, reason))
    return tuple(sorted(found, key=lambda job: job.id))


def expand(hostlist: str) -> tuple[str, ...]:
    """The names of `n[01-03,07],m1`."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", hostlist):
        names += _expanded(part)
    return tuple(names)


def gres_name(gres: str) -> str:
    """What the chips of a node are called in `--gres`: `gpu` of `gpu:h100:8(S:0)`."""
    return gres.partition(":")[0]


def _expanded(part: str) -> list[str]:
    opening, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, tail = rest.partition("]")
    tails = _expanded(tail) if tail else [""]
    return [f"{opening}{number}{end}" for number in _numbers(ranges) for end in tails]


def _numbers(ranges: str) -> Iterable[str]:
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _halves(line: str) -> tuple[str, str]:
    name, _, rest = line.partition("|")
    return name.strip(), rest.strip()


def _natural(name: str) -> list[tuple[int, str]]:
    """So that n2 comes before n10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]
