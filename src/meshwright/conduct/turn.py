"""What each event tells the conductor of a run that survives; `takeover.py` acts on it."""

from __future__ import annotations

import signal
from dataclasses import replace

from meshwright.base.events import Kind
from meshwright.conduct.actions import Kill, Revive, StopMembers
from meshwright.conduct.lease import lapsed
from meshwright.conduct.limits import Limits
from meshwright.conduct.losing import ACTIVE, LAST, Losing
from meshwright.conduct.members import (
    Begun,
    Condemned,
    Corrupt,
    Disputed,
    Dying,
    Ended,
    Event,
    Executing,
    Heard,
    Held,
    LinksSeen,
    Member,
    Node,
    NodeGone,
    NodeUp,
    Ready,
    RelayoutAsked,
    ResizeAsked,
    Stage,
    StopAsked,
    TableLost,
    Tick,
    Unlinked,
    Up,
)
from meshwright.conduct.protocol import Exit
from meshwright.conduct.reach import Reached

HOUR_S = 3600.0
_GIVE_UP = 20  # times the time that an agent has to start


class Turn(Losing):
    """One event: the state as it becomes, and the actions so far."""

    def take(self, event: Event) -> None:
        """Know what `event` says."""
        match event:
            case Up(number, addresses):
                self.member(number, addresses=addresses)
            case Ready(number):
                self.member(number, ready=True)
            case Executing():
                self._executing(event)
            case Begun(step):
                self.put(step=max(step, self.state.step))
            case Ended():
                self.ended(event)
            case Dying(number, ago_s):
                self.dying(number, ago_s)
            case Condemned(number, cause, ago_s):
                self.doom(number, cause, ago_s)
            case Corrupt(number, cause):
                self._quarantine(number, cause)
            case Disputed():
                self._dispute(event)
            case NodeUp():
                self._node_up(event)
            case NodeGone(node, cause, ago_s):
                self._node_gone(node, cause, ago_s)
            case Unlinked(node):
                self.node(node, linked=False)
            case Heard(node, progressed):
                self._heard(node, progressed)
            case ResizeAsked(replicas):
                self.put(wanted=replicas, resize_s=self.now_s, goal=None)
            case RelayoutAsked(relayout):
                self.put(relayout=relayout, resize_s=self.now_s, goal=None)
            case Held():
                self._held(event)
            case TableLost():
                self.put(table_void=True)
            case StopAsked():
                self._stop()
            case LinksSeen():
                self._links(event)
            case Reached(node, asked_s, missing):
                if asked_s == self.state.asked_s:
                    self.put(reached={**self.state.reached, node: missing})
            case Limits():
                self.put(limits=event)
            case Tick(heard_until_s):
                self._passed(self.now_s if heard_until_s is None else heard_until_s)

    def _executing(self, event: Executing) -> None:
        state = self.state
        # Of an older epoch it says nothing: what it held then may have grown old since.
        if event.epoch == state.epoch and event.member in state.table:
            self.member(event.member, holds=True)
            executing = {**state.executing, event.member: event.step}
            self.put(executing=executing, step=max(state.step, event.step))

    def _held(self, event: Held) -> None:
        state, wanted = self.state, self.state.relayout
        current = event.epoch == state.epoch and event.member in state.table
        if wanted is None or not wanted.saving or not current:
            return
        if event.error is not None:
            self.put(relayout=None, table_void=True)
            what = f"goes on as {wanted.before}: {event.error}"
            self.record(Kind.ALERT, what=what, node=None)
        else:
            held = wanted.held | {event.member}
            self.member(event.member, holds=True)
            self.put(relayout=replace(wanted, held=held))

    def _quarantine(self, number: int, cause: str) -> None:
        """A chip that errs is given up, and whatever it holds."""
        state, member = self.state, self.state.members.get(number)
        if member is None or number in state.quarantined:
            return
        self.put(quarantined=state.quarantined | {number})
        rank = state.table.index(number) if number in state.table else member.lost_rank
        told = {"rank": rank, "member": number, "node": member.node, "step": state.step}
        self.record(Kind.QUARANTINED, **told, cause=cause)
        self.doom(number, cause, 0.0)

    def _dispute(self, event: Disputed) -> None:
        state = self.state
        if event.epoch != state.epoch or state.stage not in ACTIVE:
            return
        if event.redo:
            self.put(disputed=True)
        else:
            self.fail(event.what)

    def _node_up(self, event: NodeUp) -> None:
        known = self.state.nodes.get(event.node, Node(event.slots, progress_s=self.now_s))
        if known.banned:
            self.actions += [Kill(number) for number in sorted(event.living)]
            return
        if not known.alive:
            self.record(Kind.NODE_BACK, node=event.node)
        node = replace(known, alive=True, linked=True, heard_s=self.now_s, told=False)
        self.put(nodes={**self.state.nodes, event.node: node})
        if event.fresh:
            held = [n for n in self.members_of(event.node) if n not in event.living]
            self.lose_members(held, f"the agent of node {event.node} died", 0.0)
        for number in sorted(event.living):
            member = self.state.members.get(number)
            # Given up while nobody could see it, or never known here.
            if member is None or member.node != event.node or member.ended:
                self.actions.append(Kill(number))

    def _node_gone(self, number: int, cause: str, ago_s: float) -> None:
        if number not in self.state.nodes:
            return
        self.node(number, alive=False, linked=False)
        self.lose_members(self.members_of(number), cause, ago_s)
        self._watch_flapping(number)
        self._revive(number)

    def _watch_flapping(self, number: int) -> None:
        """A node that is lost again and again is not used any more: it would use up what all the
        others may be interrupted."""
        before = self.state.nodes[number].gone_s
        gone_s = (*(then for then in before if self.now_s - then < HOUR_S), self.now_s)
        banned = len(gone_s) >= self.state.rules.max_flaps
        self.node(number, gone_s=gone_s, banned=banned)
        if banned:
            cause = f"it was lost {len(gone_s)} times in an hour"
            told = {"node": number, "member": None, "rank": None, "step": self.state.step}
            self.record(Kind.QUARANTINED, **told, cause=cause)

    def _revive(self, number: int) -> None:
        """Have an agent started where there is none; one that never comes is tried again."""
        state, node = self.state, self.state.nodes[number]
        spent = node.banned or node.revivals >= state.rules.max_takeovers
        if state.stage in LAST or state.stop_asked or spent:
            return
        self.node(number, revivals=node.revivals + 1, revived_s=self.now_s)
        self.actions.append(Revive(number))

    def _heard(self, number: int, progressed: bool) -> None:
        node = self.state.nodes.get(number)
        if node is None or not node.alive:
            return
        progress_s = self.now_s if progressed else node.progress_s
        self.node(number, heard_s=self.now_s, progress_s=progress_s, told=False)

    def _links(self, event: LinksSeen) -> None:
        """Each link is told of once."""
        state = self.state
        cut_s = {ends: state.cut_links.get(ends, self.now_s) for ends in sorted(event.cut)}
        told = set(state.told_links)
        for ends in cut_s.keys() - told:
            what = f"nodes {ends[0]} and {ends[1]} do not reach each other by any path"
            self.record(Kind.ALERT, what=what, node=ends[0], link=ends)
        for link in event.slow:
            if link.nodes not in told | cut_s.keys():
                self.record(Kind.ALERT, what=str(link), node=link.nodes[0], link=link.nodes)
        slow = frozenset(link.nodes for link in event.slow)
        self.put(slow_links=slow, cut_links=cut_s, told_links=frozenset(told | slow | event.cut))

    def _stop(self) -> None:
        state = self.state
        if state.stop_asked:
            self.kill_all()
            return
        self.put(stop_asked=True, deadline_s=self.now_s + state.limits.stop_s)
        self.actions.append(StopMembers(tuple(state.living())))

    def _passed(self, heard_until_s: float) -> None:
        for number in self.state.living():
            member = self.state.members[number]
            if member.fenced_s is not None and self.now_s >= member.fenced_s:
                # It cannot be killed; its epoch keeps it out.
                end = Exit(-1, 0, None, signal.SIGKILL, returned=False, ts=0.0)
                self.ended(Ended(number, end, member.doom or "killed"))
            elif not member.addresses and self._is_late(member):
                self.doom(number, "did not start in time", self.now_s - member.started_s)
        for number, node in list(self.state.nodes.items()):
            if node.alive and self.state.stage in ACTIVE:
                self._watch_lease(number, node, heard_until_s)
            elif node.alive and self.state.stage is Stage.FORMING:
                self._watch_start(number, node)
            elif not node.alive and self.now_s - node.revived_s > self.state.limits.start_s:
                self._revive(number)
        self._watch_silence()
        self._watch_deadline()

    def _is_late(self, member: Member) -> bool:
        return self.now_s - member.started_s > self.state.limits.start_s

    def _watch_silence(self) -> None:
        """Give up where no agent was heard for very long: those that live go on by themselves."""
        heard_s = max(node.heard_s for node in self.state.nodes.values())
        silent_s = self.now_s - heard_s
        if self.state.stage in ACTIVE and silent_s > self.state.limits.start_s * _GIVE_UP:
            self.put(stage=Stage.OVER, failure=f"no agent was heard for {silent_s:.0f} s")

    def _watch_start(self, number: int, node: Node) -> None:
        silent_s = self.now_s - node.heard_s
        if silent_s > self.state.limits.start_s:
            self._node_gone(number, f"the agent of node {number} did not start", silent_s)

    def _watch_lease(self, number: int, node: Node, until_s: float) -> None:
        limits = self.state.limits
        silent_s = until_s - node.heard_s
        if silent_s > limits.lease_agent_s / 2 and not node.told:
            self.node(number, told=True)
            what = f"node {number} is silent for {silent_s:.1f} s; its ranks are left alone"
            self.record(Kind.ALERT, what=what, node=number)
        others = [
            other.progress_s
            for key, other in self.state.nodes.items()
            if key != number and other.alive and until_s - other.heard_s < limits.lease_agent_s
        ]
        # If nobody else is heard either, it is the conductor that is cut off.
        if others and lapsed(until_s, node.heard_s, max(others), limits.lease_conductor_s):
            cause = f"node {number} is silent and nobody gets on"
            self._node_gone(number, cause, silent_s)

    def _watch_deadline(self) -> None:
        state = self.state
        if state.deadline_s is None or self.now_s < state.deadline_s:
            return
        if state.stage is Stage.KILLING:
            self.put(stage=Stage.OVER)
        elif state.stage is Stage.TAKING_OVER and not state.stop_asked:
            late = [n for n in state.table if n not in state.executing]
            self.fail(f"members {late} have not taken up their ranks")
        else:
            self.kill_all()
