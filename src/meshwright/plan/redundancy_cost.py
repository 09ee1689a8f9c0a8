"""What each kind of redundancy takes of a run: host memory, traffic, time. Pure.

Bytes are exact: they follow from the flat groups of each rank. Seconds are bounds of what a step
waits for: the bytes over the links that carry them and the memory that they pass through; what
goes on beside the step, as the update that a shadow makes, is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.base.errors import ConfigError
from meshwright.catalog.hardware import Cluster
from meshwright.plan.homes import deal
from meshwright.plan.job import Job
from meshwright.plan.layout import coordinates
from meshwright.plan.own_rank import BYTES, Rank
from meshwright.plan.own_step import Step
from meshwright.plan.resilience import Keeping, Redundancy, keeping

Survives = Literal["nothing", "a rank", "a node"]
KINDS: tuple[Redundancy, ...] = ("twin", "shadow", "mirror", "parity")
HOST_BYTES_S = (
    25e9  # assumed: one of eight chips' share of the memory of a server with accelerators
)
HOST_SHARE = 2.0  # assumed: such a share of it, in memories of a chip, may hold others' state
_STATE = 12  # bytes an element: master and two moments in fp32
_UPDATE = 2 * _STATE + 4  # bytes of memory an element that AdamW reads and writes


@dataclass(frozen=True)
class Speeds:
    """Bytes/s between two members that keep each other's state, its latency in s, and bytes/s of a
    member's share of its host's memory, and how much of that it may fill."""

    link_bytes_s: float
    latency_s: float
    host_bytes_s: float
    host_bytes: float

    @classmethod
    def of(cls, cluster: Cluster, nodes: int) -> Speeds:
        """Those of `cluster`, where a run has `nodes` agents."""
        level = cluster.levels[-1 if nodes > 1 or cluster.nodes > 1 else 0]
        chip, own = cluster.chip, cluster.name.startswith("local")
        host = chip.memory_bandwidth_bytes_s if own else HOST_BYTES_S
        room = HOST_SHARE * chip.memory_bytes
        return cls(level.bandwidth_bytes_s, level.latency_s, host, room)


@dataclass(frozen=True)
class State:
    """Of each rank: elements of its masters, and flat groups. Bytes of an element's gradient."""

    masters: Sequence[int]
    groups: Sequence[int]
    grad_bytes: int


@dataclass(frozen=True)
class Price:
    """`host_bytes` is held by the member that holds most for others, `host_total_bytes` by all;
    `wire_bytes` leaves the rank that sends most in a step; `seconds` is what a step waits."""

    kind: str
    survives: Survives
    host_bytes: float
    host_total_bytes: float
    wire_bytes: float
    seconds: float

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def state_of(job: Job) -> State:
    """The state of the ranks of `job`; those of one pipeline rank have as much."""
    layout = job.layout
    found: dict[int, Step] = {}
    for rank in range(layout.world):
        found.setdefault(coordinates(layout, rank).pp, Step(Rank(job, rank)))
    at = [found[coordinates(layout, rank).pp] for rank in range(layout.world)]
    masters = [sum(group.shard for group in step.groups) for step in at]
    return State(masters, [len(step.groups) for step in at], BYTES[layout.grad_precision])


def price(
    how: Keeping,
    state: State,
    speeds: Speeds,
    nodes: Sequence[int] = (),
    shadows: Mapping[int, int] | None = None,
    node_of: Mapping[int, int] | None = None,
) -> Price:
    """What `how` takes of ranks with `state` on `nodes`; `shadows` has the spare of each rank,
    `node_of` the node of each spare."""
    world = len(state.masters)
    where = tuple(nodes) or (0,) * world
    log, kept = state.grad_bytes, _STATE + state.grad_bytes
    held: dict[int, float] = {}
    coming: dict[int, float] = {}
    work = 0.0
    sent = 0.0
    if how.kind == "mirror":
        for rank, keeper in how.keepers.items():
            held[keeper] = held.get(keeper, 0.0) + kept * state.masters[rank]
            coming[keeper] = coming.get(keeper, 0.0) + log * state.masters[rank]
        sent = log * max(state.masters)
        work = _UPDATE / kept * max(held.values())
    elif how.kind == "shadow":
        for rank, spare in (shadows or {}).items():
            held[spare] = held.get(spare, 0.0) + kept * state.masters[rank]
            coming[spare] = coming.get(spare, 0.0) + log * state.masters[rank]
        sent = log * max(state.masters)
    elif how.kind == "parity":
        for group in how.parity:
            keeper = how.keepers[group[0]]
            most = max(state.masters[rank] for rank in group)
            held[keeper] = held.get(keeper, 0.0) + kept * most
            bytes_ = kept * sum(state.masters[rank] for rank in group)
            coming[keeper] = coming.get(keeper, 0.0) + bytes_
        sent = kept * max(state.masters)
        copies = 2 * kept + 3 * _STATE  # what a flat group was, and how it has changed
        work = copies * max(state.masters) + 3 * max(coming.values())
    turns = 0 if how.kind in ("none", "twin") else 2
    if how.kind == "parity":
        turns *= 2 * max(state.groups)
    traffic = max([sent, *coming.values()])
    return Price(
        kind=how.kind,
        survives=survives(how, where, shadows or {}, node_of or {}),
        host_bytes=max(held.values(), default=0.0),
        host_total_bytes=sum(held.values()),
        wire_bytes=sent,
        seconds=traffic / speeds.link_bytes_s
        + turns * speeds.latency_s
        + work / speeds.host_bytes_s,
    )


def survives(
    how: Keeping, nodes: Sequence[int], shadows: Mapping[int, int], node_of: Mapping[int, int]
) -> Survives:
    """The most that may be lost at once so that no state is."""
    if how.kind == "none":
        return "nothing"
    if len(set(nodes)) == 1:
        return "a rank"
    apart = False
    if how.kind == "twin":
        apart = all(any(nodes[t] != nodes[r] for t in twins) for r, twins in enumerate(how.twins))
    elif how.kind == "mirror":
        apart = all(nodes[rank] != nodes[keeper] for rank, keeper in how.keepers.items())
    elif how.kind == "shadow":
        apart = all(nodes[rank] != node_of[spare] for rank, spare in shadows.items())
    elif how.kind == "parity":
        lines = [[nodes[rank] for rank in (*group, how.keepers[group[0]])] for group in how.parity]
        apart = all(len(set(line)) == len(line) for line in lines)
    return "a node" if apart else "a rank"


def prices(job: Job, cluster: Cluster, nodes: Sequence[int], spares: Sequence[int]) -> list[Price]:
    """The kinds that `job` can have, cheapest first; `nodes` has the node of each rank, `spares`
    that of each spare."""
    state, speeds = state_of(job), Speeds.of(cluster, len(set(nodes)))
    world, experts = job.layout.world, bool(job.model.n_experts)
    node_of = {world + i: node for i, node in enumerate(spares)}
    shadows = deal(nodes, node_of, node_of, {})
    found = []
    for kind in KINDS:
        try:
            how = keeping(job.layout, kind, experts, nodes, bool(shadows))
        except ConfigError:
            continue
        if how.kind == kind:
            found.append(price(how, state, speeds, nodes, shadows, node_of))
    return sorted(found, key=lambda one: one.seconds)


def cheapest(found: Sequence[Price], nodes: int, room_bytes: float) -> Price | None:
    """What "auto" takes: of the kinds that survive the loss of a node, where there are several, or
    else that of a rank, and whose copies fit into `room_bytes` of a member, the one that a step
    waits least for. None where there is none."""
    fitting = [one for one in found if one.host_bytes <= room_bytes] or list(found)
    of_node = [one for one in fitting if one.survives == "a node"]
    return next(iter(of_node if nodes > 1 and of_node else fitting), None)


def chosen(job: Job, found: Sequence[Price], room_bytes: float, nodes: int) -> Price | None:
    """What the run of `job` is kept by; None where nothing is."""
    kind = job.resilience.redundancy
    if kind == "auto":
        return cheapest(found, nodes, room_bytes)
    named = next((one for one in found if one.kind == kind), None)
    fallback = next((one for one in found if one.kind == "mirror"), None)  # of a parity of one
    return named or (fallback if kind == "parity" else None)
