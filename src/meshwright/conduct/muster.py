"""How a run that survives is set up: who starts where, and by which rules it goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.conduct.limits import Limits, limits
from meshwright.conduct.members import Member, Node, Rules, Stage, State
from meshwright.conduct.places import Shapes, resized, shapes
from meshwright.plan.job import Job
from meshwright.plan.layout import coordinates
from meshwright.plan.resilience import Keeping, best_keeping

_LEAST_FLAPS = 3  # losses of a node that may have befallen it


@dataclass(frozen=True)
class Muster:
    """The set-up of the run of `job`."""

    job: Job

    @cached_property
    def shapes(self) -> Shapes:
        """The sizes that the job can take."""
        return shapes(self.job)

    @property
    def world(self) -> int:
        """Ranks at the start."""
        return self.job.layout.world

    @property
    def nodes(self) -> int:
        """Agents."""
        return self.job.cluster.nodes

    @property
    def limits(self) -> Limits:
        """Before anything was measured."""
        return limits(self.job.resilience.longest_stall_s)

    def home_of(self, member: int) -> int:
        """The node of one of the first members: replicas apart where they can be, so that those
        who hold the same state are not lost together; spares from the last node on."""
        replicas = self.job.layout.dp_replicate
        if member < self.world and replicas % self.nodes == 0:
            _, replica, _ = self.shapes.place(member, replicas)
            return replica * self.nodes // replicas
        if member < self.world:
            return member * self.nodes // self.world
        return self.nodes - 1 - (member - self.world) % self.nodes

    def slots(self, node: int) -> int:
        """Members that a node has room for."""
        members = range(self.world + self.job.cluster.spares)
        return sum(self.home_of(member) == node for member in members)

    def keeping(self, nodes: Sequence[int]) -> Keeping:
        """Who keeps whose state, where the ranks are on `nodes`."""
        job = resized(self.job, self.shapes.replicas(len(nodes)))
        experts, kind = bool(job.model.n_experts), job.resilience.redundancy
        return best_keeping(job.layout, kind, experts, nodes)

    def first_state(self, now_s: float, epoch_floor: int) -> State:
        """The run before any agent has come."""
        members = range(self.world + self.job.cluster.spares)
        resilience = self.job.resilience
        return State(
            rules=Rules(
                spares=self.job.cluster.spares,
                on_no_spare=resilience.on_no_spare,
                max_takeovers=resilience.max_takeovers,
                max_flaps=max(_LEAST_FLAPS, resilience.max_takeovers // 4),
                shapes=self.shapes,
                keeping=self.keeping,
                shadow=resilience.redundancy == "shadow",
                mirrored=resilience.redundancy in ("mirror", "parity"),
            ),
            limits=self.limits,
            table=tuple(range(self.world)),
            members={m: Member(self.home_of(m), started_s=now_s) for m in members},
            nodes={
                n: Node(self.slots(n), linked=False, heard_s=now_s, progress_s=now_s)
                for n in range(self.nodes)
            },
            epoch_floor=epoch_floor,
        )

    def role(self, rank: int, replicas: int) -> str:
        """Ranks of one role do the same work."""
        return f"stage {coordinates(resized(self.job, replicas).layout, rank).pp}"

    def layout(self, replicas: int) -> dict[str, Any]:
        """The layout with so many replicas, as plain JSON."""
        return resized(self.job, replicas).layout.model_dump(mode="json")

    def label(self, replicas: int) -> str:
        """What people call that layout."""
        return resized(self.job, replicas).layout.label


def adopted(
    fresh: State, hellos: Mapping[int, Mapping[str, Any]], last_step: int
) -> tuple[State, dict[str, Any] | None]:
    """The run as its agents know it, by node, and the newest table that any of them was given.

    `fresh` is the run before any agent has come. Members of agents that have not said anything are
    in the table alone: they are lost if their agent is.
    """
    tables = [hello["table"] for hello in hellos.values() if hello["table"] is not None]
    newest: dict[str, Any] | None = max(tables, key=lambda table: table["epoch"], default=None)
    members: dict[int, Member] = {}
    executing: dict[int, int] = {}
    for node, hello in hellos.items():
        members |= {number: Member(node) for number in hello["launched"]}
        held = {} if newest is None else {n: int(r) for r, n in newest["members"].items()}
        for said in hello["members"]:
            at, rank = said["executing"], held.get(said["member"])
            here = newest is not None and at is not None and at[0] == newest["epoch"]
            given = newest is not None and rank is not None and rank not in newest["lost"]
            members[said["member"]] = Member(
                node,
                addresses=tuple(said["addresses"]),
                ready=said["ready"],
                holds=given or (here and rank is not None),
            )
            if here:
                executing[said["member"]] = at[1]
    members = {**fresh.members, **members} if newest is None else members
    if newest is None:
        return replace(fresh, members=members), None
    table = tuple(newest["members"][str(rank)] for rank in range(len(newest["members"])))
    for number in table:
        members.setdefault(number, Member(newest["homes"][str(number)], holds=True))
    found = replace(
        fresh,
        table=table,
        shadows={int(rank): number for rank, number in newest.get("shadows", {}).items()},
        goal=newest.get("goal"),
        members=members,
        stage=Stage.TAKING_OVER,
        epoch=newest["epoch"],
        executing=executing,
        step=last_step + 1,
    )
    return found, newest
