"""Runs of the conductor in made-up time: every schedule of faults, delays and crashes that a seed
gives, checked at each moment against what must never happen.

The decisions are those of a real run (`takeover.decide`, `muster.adopted`, `lease.lapsed`); agents,
members and the network are stand-ins (`simulated.py`). What is checked:

- one holder: no two members ever take the same rank of the same epoch for theirs;
- evidence: a rank changes hands only if its member is dead or cut off from the others;
- one recovery: a member is replaced at most once, and never one that could go on;
- true state: a rank that is not said to be lost has the state of the last step;
- an end: the run finishes, or fails for want of chips or state, in bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from meshwright.conduct.actions import Action, SendTable
from meshwright.conduct.links import SlowLink
from meshwright.conduct.members import Event, LinksSeen, NodeGone, Stage, State, Unlinked
from meshwright.conduct.muster import Muster
from meshwright.conduct.shelf import Shelf
from meshwright.conduct.simulated import SIGKILL, Clock, Line, SimAgent, SimMember
from meshwright.conduct.simulated_conductor import SimConductor
from meshwright.conduct.takeover import decide

_BEAT_S = 1.0
_DIAL_S = 0.5
_STEP_S = 0.5
_MEET_S = 0.05
_NOBODY = "nobody is left who holds the state"

Decide = Callable[[State, Sequence[Event], float], tuple[State, list[Action]]]


class ViolationError(AssertionError):
    """Something that must never happen has happened."""


@dataclass
class Verdict:
    """What came of one schedule."""

    stage: Stage
    step: int
    failure: str | None
    alerts: int
    takeovers: int
    replaced: list[int]  # members whose rank was given away
    restarts: int  # of members that held a rank and had not died by a fault


class Simulation:
    """One run."""

    def __init__(
        self,
        seed: int,
        muster: Muster,
        steps: int = 40,
        decide: Decide = decide,
        epochs_of_one: int = 1000,
    ) -> None:
        self.clock = Clock(seed)
        self.random = self.clock.random
        self.muster, self.steps, self.decide = muster, steps, decide
        self.epochs_of_one = epochs_of_one
        self.generation = 0
        self.conductor: SimConductor | None = None
        lease_s = muster.limits.lease_agent_s
        self.agents = {n: SimAgent(n, self.clock, lease_s) for n in range(muster.nodes)}
        self.control_cut_until = dict.fromkeys(self.agents, 0.0)
        self.data_cut_until = dict.fromkeys(self.agents, 0.0)
        self.slow: set[tuple[int, int]] = set()
        self.told_cut: set[tuple[int, int]] = set()
        self.was_cut: set[int] = set()  # members whose node was ever cut off from the others
        self.step = 0
        self.holders: dict[tuple[int, int], int] = {}
        self.tables: dict[int, dict[str, Any]] = {}
        self.met: set[int] = set()
        self.replaced: list[int] = []
        self.given_away: set[tuple[int, int]] = set()  # by which conductor, and whose rank
        self.faulted: set[int] = set()
        self.alerts = self.takeovers = self.relayouts = 0
        self.shelves = 0
        self.hire()
        for node in self.agents:
            self.clock.after(self.random.uniform(0.0, 1.0), partial(self._serve, node))
        self.clock.after(_STEP_S, self._advance)

    # --- the world

    def hire(self) -> None:
        """Start a conductor: the first, or one more after a crash."""
        self.generation += 1
        self.conductor = SimConductor(self, adopt=self.generation > 1)

    def shelf(self) -> Shelf:
        """Where a conductor has state saved: made-up folders, all different."""

        def folder(_n_bytes: int) -> Path:
            self.shelves += 1
            return Path(f"/{self.shelves}")

        return Shelf(make=folder)

    def fire(self) -> None:
        """The conductor crashes, and all lines with it."""
        if self.conductor is not None:
            self.conductor.alive = False
        self.conductor = None
        for agent in self.agents.values():
            if agent.line is not None:
                agent.line.open = False

    def cut(self, node: int, seconds: float, data: bool) -> None:
        """Cut the node's line to the conductor, and with `data` those to all other nodes."""
        until_s = self.clock.now_s + seconds
        self.control_cut_until[node] = max(self.control_cut_until[node], until_s)
        line = self.agents[node].line
        if data:
            self.data_cut_until[node] = max(self.data_cut_until[node], until_s)
            self.was_cut |= set(self.agents[node].members)
        if line is not None and line.open:
            line.open = False
            conductor = self.conductor
            if conductor is not None:  # it may see the end of the line
                self.clock.after(0.01, lambda: conductor.apply(Unlinked(node)))

    def slow_link(self, a: int, b: int) -> None:
        """Members find the link between two nodes slow, for good."""
        self.slow.add((min(a, b), max(a, b)))
        self._see_links()

    def cut_paths(self, node: int, seconds: float) -> None:
        """Cut the node's paths to all other nodes, and not its line to the conductor."""
        until_s = self.clock.now_s + seconds
        self.data_cut_until[node] = max(self.data_cut_until[node], until_s)
        self.was_cut |= set(self.agents[node].members)
        self.clock.after(self.random.uniform(0.5, 1.5), partial(self._see_links, self.random))
        for delay_s in (self.random.uniform(1.5, 2.0), seconds + self.random.uniform(0.01, 6.0)):
            self.clock.after(delay_s, self._see_links)

    def _see_links(self, one: Random | None = None) -> None:
        """Members tell what they know of the links that ranks use; at first of one or two."""
        now_s = self.clock.now_s
        away = [node for node, until_s in self.data_cut_until.items() if now_s < until_s]
        used = set(self.tables[max(self.tables)]["homes"].values()) if self.tables else set()
        cut = sorted({(min(a, b), max(a, b)) for a in away for b in used if a in used and a != b})
        self.told_cut = {ends for ends in self.told_cut if set(ends) & set(away)}
        self.told_cut |= set(cut if one is None else cut[: one.randint(1, 2)])
        slow = tuple(SlowLink(ends, 9.0, "small messages") for ends in sorted(self.slow))
        if self.conductor is not None:
            self.conductor.apply(LinksSeen(slow, frozenset(self.told_cut)))

    def unreached(self, node: int, others: Sequence[int]) -> frozenset[int]:
        """Whom a node does not reach now."""
        away = {n for n, until_s in self.data_cut_until.items() if self.clock.now_s < until_s}
        return frozenset(n for n in others if n != node and {n, node} & away)

    def kill(self, number: int) -> None:
        """A member dies."""
        for agent in self.agents.values():
            if number in agent.members:
                self.faulted.add(number)
                agent.end(number, SIGKILL)

    def freeze(self, number: int) -> None:
        """A member stops, and is still there."""
        for agent in self.agents.values():
            if number in agent.members and agent.members[number].frozen_s is None:
                self.faulted.add(number)
                agent.members[number].frozen_s = self.clock.now_s

    def kill_agent(self, node: int, seen: bool) -> None:
        """An agent dies with its members; `seen`: on the machine of the conductor."""
        agent = self.agents[node]
        self.faulted |= {m.number for m in agent.members.values() if m.alive}
        agent.die()
        if seen and self.conductor is not None:
            conductor = self.conductor
            self.clock.after(0.01, lambda: conductor.apply(NodeGone(node, "its agent died")))

    def revive(self, node: int) -> None:
        """A new agent for a node; the old one, if it still lives, is ended."""

        def start() -> None:
            for number in list(self.agents[node].members):
                self.agents[node].end(number, SIGKILL)
            self.agents[node].die()
            lease_s = self.muster.limits.lease_agent_s
            self.agents[node] = SimAgent(node, self.clock, lease_s)
            self.agents[node].progress_s = self.agents[node].renewed_s = self.clock.now_s

        self.clock.after(self.random.uniform(0.5, 3.0), start)

    def member(self, number: int) -> SimMember | None:
        """The worker of that number, dead or alive."""
        found = (a.members[number] for a in self.agents.values() if number in a.members)
        return next(found, None)

    def _could_go_on(self, number: int) -> bool:
        """Whether a worker lives, and is not stopped for want of a lease."""
        agent = next((a for a in self.agents.values() if number in a.members), None)
        return agent is not None and not agent.stopped and agent.members[number].alive

    def _serve(self, node: int) -> None:
        """An agent's next second."""
        agent, now_s = self.agents[node], self.clock.now_s
        if agent.alive:
            linked = agent.line is not None and agent.line.open
            reachable = self.conductor is not None and now_s >= self.control_cut_until[node]
            if not linked and reachable:
                assert self.conductor is not None
                line = Line(self.clock)
                agent.join(line, self.conductor.ear(node, agent, line))
            agent.beat()
        delay_s = _BEAT_S if agent.alive and agent.line and agent.line.open else _DIAL_S
        self.clock.after(delay_s, partial(self._serve, node))

    def _advance(self) -> None:
        """One step of the ranks, where all of a table can reach each other."""
        self.clock.after(_STEP_S, self._advance)
        believed = [
            m for a in self.agents.values() for m in a.members.values() if m.alive and m.rank >= 0
        ]
        for member in believed:
            key = (member.epoch, member.rank)
            if self.holders.setdefault(key, member.number) != member.number:
                raise ViolationError(f"two members hold rank {member.rank} in epoch {member.epoch}")
        going = [epoch for epoch in {m.epoch for m in believed} if self._is_whole(epoch)]
        if len(going) > 1:
            raise ViolationError(f"epochs {going} both get on")
        for epoch in going:
            if epoch in self.met:
                self._take_step(epoch)
            else:
                self.met.add(epoch)
                self.clock.after(_MEET_S, partial(self._meet, epoch))

    def _is_whole(self, epoch: int) -> bool:
        table = self.tables[epoch]["members"]
        nodes = set()
        for rank, number in table.items():
            member = self.member(number)
            if member is None or not member.alive or member.frozen_s is not None or not member.up:
                return False
            if member.epoch != epoch or member.rank != int(rank):
                return False
            nodes |= {node for node, agent in self.agents.items() if number in agent.members}
        if any(self.agents[node].stopped for node in nodes):
            return False
        cut = [node for node in nodes if self.clock.now_s < self.data_cut_until[node]]
        return not cut or len(nodes) == 1

    def _meet(self, epoch: int) -> None:
        """All members of a table are there: who has no state gets it, and all run."""
        if not self._is_whole(epoch):
            self.met.discard(epoch)
            return
        table = self.tables[epoch]
        members = {int(r): self.member(number) for r, number in table["members"].items()}
        for rank, member in members.items():
            assert member is not None
            if rank not in table["lost"] and member.step != self.step:
                raise ViolationError(f"rank {rank} is not lost, and has step {member.step}")
        for agent in self.agents.values():
            for member in agent.members.values():
                if member.alive and member.epoch == epoch and member.rank >= 0:
                    member.step, agent.progress_s = self.step, self.clock.now_s
                    if table["through"] and table["through"]["saving"]:
                        member.executing = None
                        agent.report("held", member=member.number, epoch=epoch)
                        continue
                    member.executing = [epoch, self.step]
                    agent.report("executing", member=member.number, at=member.executing)

    def _take_step(self, epoch: int) -> None:
        if any(m.executing is None for m in self._members_of(epoch)):
            return
        self.step += 1
        for agent in self.agents.values():
            mine = [m for m in agent.members.values() if m.alive and m.epoch == epoch]
            for member in mine:
                if member.rank >= 0:
                    member.step = self.step
                    agent.progress_s = self.clock.now_s
                    if self.step >= self.steps:
                        agent.end(member.number, None)
        if self.conductor is not None:
            self.conductor.heard_step(self.step)

    def _members_of(self, epoch: int) -> list[SimMember]:
        numbers = self.tables[epoch]["members"].values()
        return [member for number in numbers if (member := self.member(number)) is not None]

    # --- one schedule

    def play(self, limit_s: float) -> Verdict:
        """Until the run is over. Raises ViolationError."""
        while self.conductor is None or self.conductor.state.stage is not Stage.OVER:
            if self.clock.now_s > limit_s:
                raise ViolationError(f"no end after {limit_s:g} s: {self._describe()}")
            self.clock.step()
        return self.verdict()

    def run_until(self, time_s: float) -> None:
        """Let time pass until then."""
        while self.clock.now_s < time_s:
            self.clock.step()

    def verdict(self) -> Verdict:
        """What has come of it so far."""
        state = self.conductor.state if self.conductor is not None else None
        stage = state.stage if state is not None else Stage.RUNNING
        failure = state.failure if state is not None else None
        restarts = len([number for number in self.replaced if number not in self.faulted])
        return Verdict(
            stage, self.step, failure, self.alerts, self.takeovers, self.replaced, restarts
        )

    def _describe(self) -> str:
        state = self.conductor.state if self.conductor is not None else None
        if state is None:
            return "no conductor"
        ended = [n for n in state.table if state.members[n].ended]
        return f"{state.stage.name}, step {self.step}, table {state.table}, ended {ended}"

    def check_failure(self, failure: str) -> None:
        """Whether a run that is given up could in truth not have gone on."""
        able = [
            m.number
            for agent in self.agents.values()
            for m in agent.members.values()
            if m.alive and m.frozen_s is None and m.rank >= 0 and 0 <= self.step == m.step
        ]
        if failure in ("", _NOBODY) and set(able) - self.was_cut:
            raise ViolationError(f"given up ({failure}) though members {able} hold the state")

    def check_table(self, before: tuple[int, ...], action: SendTable, state: State) -> None:
        """Whether ranks change hands for a reason, and once."""
        if action.dp_replicate is not None or action.through == "load" or state.epoch <= 1:
            return
        for rank, (old, new) in enumerate(zip(before, action.members, strict=True)):
            if old == new or rank in action.moved:
                continue
            if self._could_go_on(old) and old not in self.was_cut | self.faulted:
                raise ViolationError(f"rank {rank} was taken from member {old} without evidence")
            # An heir that never saw the table of its predecessor does the same again.
            if (self.generation, old) in self.given_away:
                raise ViolationError(f"member {old} was replaced twice")
            self.given_away.add((self.generation, old))
            if old not in self.replaced:
                self.replaced.append(old)
