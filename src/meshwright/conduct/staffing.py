"""Who could take a rank, who is started, and how a table goes out; `takeover.py` decides when."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshwright.base.events import Kind
from meshwright.conduct.actions import Launch, SendTable, StopMembers
from meshwright.conduct.around import behind
from meshwright.conduct.members import Member, Stage
from meshwright.conduct.places import choose
from meshwright.conduct.reach import unreached
from meshwright.conduct.turn import HOUR_S, Turn
from meshwright.plan.homes import deal

_CALM_S = 1.0  # after a takeover: a fork would slow down the step that it has cost
_TABLE_LIMITS = 10  # times the limit of one member: nobody at fault was found all that time


class Staffing(Turn):
    """A turn that knows who is there for what."""

    def idle(self) -> list[int]:
        """Members without a rank, those that are still starting among them."""
        state = self.state

        def is_idle(number: int) -> bool:
            member = state.members[number]
            return number not in state.table and member.doom is None and not member.dying

        return [number for number in state.living() if is_idle(number)]

    def coming(self) -> list[int]:
        """Members that are still starting, and have no rank."""
        return [number for number in self.idle() if not self.state.members[number].up]

    def getting_ready(self) -> bool:
        """Whether somebody without a rank will be ready for one soon."""
        state = self.state
        waited = (state.members[number] for number in self.idle())
        return any(not member.ready and state.nodes[member.node].linked for member in waited)

    def is_behind(self, member: int) -> bool:
        """Whether a link that is slow or cut is between a member and some rank."""
        bad = {*self.state.slow_links, *self.state.cut_links, *self.far()}
        node_of = self.nodes_of_members() if bad else {}
        return bool(bad) and behind(node_of[member], {node_of[n] for n in self.state.table}, bad)

    def far(self) -> frozenset[tuple[int, int]]:
        """Nodes that did not reach each other when that was last tried, if it is not long ago."""
        state = self.state
        fresh = self.now_s - state.asked_s < state.limits.longest_stall_s
        return unreached(state.reached) if fresh else frozenset()

    def is_cut_off(self, member: int) -> bool:
        """Whether a member does not reach all those that still hold a rank."""
        bad = {*self.state.cut_links, *self.far()}
        members = self.state.members
        there = {members[n].node for n in self.state.table if members[n].up}
        return bool(bad) and behind(members[member].node, there, bad)

    def free(self) -> list[int]:
        """Members that could be given a rank, those that could at once before the others, and last
        those behind a bad link."""
        state = self.state

        def is_free(number: int) -> bool:
            member = state.members[number]
            node = state.nodes.get(member.node)
            linked = node is not None and node.alive and node.linked
            return member.up and linked and number not in state.table

        def order(number: int) -> tuple[bool, bool, int]:
            ready = state.members[number].ready
            return self.is_behind(number), not ready, number

        return sorted((number for number in state.members if is_free(number)), key=order)

    def ready(self) -> list[int]:
        """Members that could take a rank at once."""
        return [number for number in self.free() if self.state.members[number].ready]

    def nodes_of_members(self) -> dict[int, int]:
        """The node of each member."""
        return {number: member.node for number, member in self.state.members.items()}

    def send(
        self,
        table: tuple[int, ...],
        replicas: int | None = None,
        first: bool = False,
        moved: tuple[int, ...] = (),
        load: bool = False,
    ) -> None:
        """Give out a table: the `first`, one with other `replicas`, or one that makes losses good
        or has `moved` ranks; with `load` one of another layout."""
        state, through = self.state, self._through(load)
        first = first or load
        lost = [r for r, n in enumerate(table) if not first and not state.members[n].holds]
        epoch = max(state.epoch, state.epoch_floor) + 1
        limit_s = state.limits.takeover_s * _TABLE_LIMITS
        deadline_s = state.deadline_s if state.stop_asked else self.now_s + limit_s
        if not first and state.losses:
            self.put(takeovers=(*state.takeovers, self.now_s))
        shadows = self.shadows_of(table, resized=replicas is not None)
        if what := self._worse(table, shadows):
            self.record(Kind.ADVICE, advice=what)
        self.put(
            stage=Stage.TAKING_OVER,
            epoch=epoch,
            table=table,
            shadows=shadows,
            executing={},
            disputed=False,
            table_void=False,
            deadline_s=None if first and not (load or state.stop_asked) else deadline_s,
        )
        for number in set(state.table) - set(table):  # what it holds grows old
            self.member(number, holds=False, ready=False)
        for number in table if first else ():  # anybody can begin the first step
            self.member(number, holds=True)
        told = SendTable(epoch, table, tuple(lost), replicas, moved, through, shadows)
        self.actions.insert(0, told)  # before anything is written down
        if state.stop_asked:
            self.actions.append(StopMembers(table))

    def _through(self, load: bool) -> Literal["save", "load"] | None:
        wanted = self.state.relayout
        if wanted is None or not wanted.saving:
            return "load" if load else None
        self.put(relayout=replace(wanted, held=frozenset()))
        return "save"

    def shadows_of(self, table: tuple[int, ...], resized: bool = False) -> dict[int, int]:
        """Who shadows each rank of `table`: spares that are ready; nobody anew without need."""
        state, node_of = self.state, self.nodes_of_members()
        if not state.rules.shadow:
            return {}
        ready = [number for number in self.ready() if number not in table]
        nodes = [node_of[number] for number in table]
        return deal(nodes, ready, node_of, {} if resized else state.shadows)

    def _worse(self, table: tuple[int, ...], shadows: dict[int, int]) -> str | None:
        """What is less safe with `table` than with the one before."""
        state, node_of = self.state, self.nodes_of_members()
        before = {node_of[number] for number in state.table}
        nodes = {node_of[number] for number in table}
        if state.shadows and not shadows:
            return "no spare is left to shadow the ranks: they keep each other's state meanwhile"
        near = [rank for rank, spare in shadows.items() if node_of[spare] == node_of[table[rank]]]
        if near and len(state.nodes) > 1 and shadows != state.shadows:
            return f"ranks {near} and their shadows are on one node each: no spare is elsewhere"
        if state.rules.mirrored and len(nodes) == 1 < len(before):
            return f"all ranks are on node {min(nodes)}: their copies would be lost with it"
        return None

    def enlist(self) -> bool:
        """Deal out anew who shadows whom, where a shadow is gone, or a rank has none and all spares
        are ready; whether that was to be done."""
        state = self.state
        shadows = self.shadows_of(state.table)
        gone = not set(state.shadows.values()) <= set(self.idle())
        starting = any(not state.members[number].ready for number in self.idle())
        if shadows == state.shadows or (starting and not gone):
            return False
        self.send(state.table)
        return True

    def is_calm(self) -> bool:
        """Whether the last takeover is a while ago."""
        state = self.state
        return not state.takeovers or self.now_s - state.takeovers[-1] > _CALM_S

    def replenish(self) -> None:
        """Start a spare in the room of one that is gone."""
        state = self.state
        eager = state.stage is Stage.WAITING or self.is_calm()
        if state.stop_asked or state.returned or not eager:
            return
        vacant = len(self.vacant())
        most = min(
            state.rules.spares + vacant - len(self.idle()),
            state.rules.max_takeovers + state.rules.spares - self.launched(),
        )
        for _ in range(most):
            if (node := self.room()) is None:
                return
            self.launch(node)

    def launched(self) -> int:
        """Members that were started in the last hour."""
        return sum(self.now_s - then < HOUR_S for then in self.state.launches)

    def room(self) -> int | None:
        """The linked node with the most free slots; None if all are full."""
        free = self.rooms()
        return max(free, key=lambda number: (free[number], -number), default=None)

    def rooms(self) -> dict[int, int]:
        """The free slots of each linked node that has any."""
        free = {
            number: node.slots - self.held(number)
            for number, node in self.state.nodes.items()
            if node.alive and node.linked
        }
        return {number: slots for number, slots in free.items() if slots > 0}

    def held(self, node: int) -> int:
        """How many chips of a node are taken, or not to be used again."""
        taken = {*self.state.living(), *self.state.quarantined}
        return sum(self.state.members[number].node == node for number in taken)

    def launch(self, node: int) -> None:
        """Have a new member forked."""
        state = self.state
        number = state.next_member
        members = {**state.members, number: Member(node, started_s=self.now_s)}
        self.put(members=members, launches=(*state.launches, self.now_s))
        self.actions.append(Launch(node, number))

    def vacant(self) -> list[int]:
        """Ranks whose member is dead."""
        held_by = [self.state.members[number] for number in self.state.table]
        return [rank for rank, member in enumerate(held_by) if member.ended or member.dying]

    def chosen(self, vacant: list[int]) -> dict[int, int] | None:
        """A member for each vacant rank; None if they are too few."""
        state, nodes = self.state, self.nodes_of_members()
        free = [number for number in self.free() if not self.is_cut_off(number)]
        taken: dict[int, int] = {}
        for rank in vacant:  # who shadows it has its state
            shadow = state.shadows.get(rank)
            if shadow in free:
                taken[rank] = shadow
                free.remove(shadow)
        rest = [rank for rank in vacant if rank not in taken]
        chosen = choose(rest, state.table, free, nodes, state.rules.shapes)
        return None if chosen is None else {**taken, **chosen}
