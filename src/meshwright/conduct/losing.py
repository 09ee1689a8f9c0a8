"""One event of a run that survives: the state as it becomes, and how ranks lose their members.

`turn.py` has all that events can tell.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.actions import Action, Kill, KillAll, Record
from meshwright.conduct.members import Ended, Loss, Stage, State

ACTIVE = (Stage.TAKING_OVER, Stage.RUNNING, Stage.WAITING)
LAST = (Stage.ENDING, Stage.KILLING, Stage.OVER)


class Losing:
    """A state, and the actions so far."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state, self.now_s = state, now_s
        self.actions: list[Action] = []

    def put(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def member(self, number: int, **changes: Any) -> None:
        known = self.state.members.get(number)
        if known is not None and not known.ended:
            self.put(members={**self.state.members, number: replace(known, **changes)})

    def node(self, number: int, **changes: Any) -> None:
        if known := self.state.nodes.get(number):
            self.put(nodes={**self.state.nodes, number: replace(known, **changes)})

    # --- losses

    def ended(self, event: Ended) -> None:
        """A member is dead, and its rank is lost unless it has returned or been given away."""
        state, number = self.state, event.member
        member = state.members.get(number)
        if member is None or member.ended:
            return
        self.member(number, ended=True)
        if not event.exit.failed:
            self.put(returned=state.returned | {number})
        cause = member.doom or event.cause
        ago_s = member.doom_ago_s if member.doom else event.ago_s
        if member.lost_rank is not None:
            self._explain(member.lost_rank, replace(event, cause=cause))
            return
        if number not in state.table or number in self.state.returned:
            return
        if state.stage not in LAST and not self._is_our_stop(event):
            rank = state.table.index(number)
            self.put(deaths=(*state.deaths, replace(event.exit, rank=rank, member=number)))
        self.lose(number, cause, self.now_s - ago_s, event.exit)

    def dying(self, number: int, ago_s: float) -> None:
        """A rank is given away at once; how its member ended is written down once that is known."""
        state, member = self.state, self.state.members.get(number)
        if member is None or member.ended or member.dying:
            return
        self.member(number, dying=True, holds=False)
        if number in state.table and state.stage in ACTIVE:
            self.member(number, lost_rank=state.table.index(number))
            since_s = member.doom_ago_s if member.doom else ago_s
            self._note_loss(number, member.doom or "died", self.now_s - since_s)

    def _explain(self, rank: int, event: Ended) -> None:
        """Say of a loss that is being made good, or is by now, how it came about."""
        state, number = self.state, event.member
        mine = [loss for loss in state.losses if loss.member == number]
        step = mine[0].step if mine else state.step
        if mine:
            told = [replace(x, cause=event.cause) if x in mine else x for x in state.losses]
            death = replace(event.exit, rank=rank, member=number)
            self.put(losses=tuple(told), deaths=(*state.deaths, death))
        said = {"rank": rank, "member": number, "step": step, "cause": event.cause}
        self.record(Kind.RANK_LOST, **said, exit=event.exit)

    def _is_our_stop(self, event: Ended) -> bool:
        """Our own SIGTERM may have found it before it could handle that."""
        return self.state.stop_asked and event.exit.signal == signal.SIGTERM

    def lose(self, number: int, cause: str, fault_s: float, exit_: Any = None) -> None:
        state = self.state
        if state.stage in ACTIVE:
            rank = self._note_loss(number, cause, fault_s)
            told = {"rank": rank, "member": number, "step": state.step, "cause": cause}
            self.record(Kind.RANK_LOST, **told, exit=exit_)

    def _note_loss(self, number: int, cause: str, fault_s: float) -> int:
        state = self.state
        rank = state.table.index(number)
        loss = Loss(rank, number, cause, state.step, fault_s, self.now_s)
        known = (*state.history, (self.now_s, rank, state.step))
        self.put(losses=(*state.losses, loss), history=known)
        return rank

    def doom(self, number: int, cause: str, ago_s: float) -> None:
        member = self.state.members.get(number)
        if member is None or member.ended or member.doom is not None:
            return
        fenced_s = self.now_s + self.state.rules.kill_s
        self.member(number, doom=cause, doom_ago_s=ago_s, fenced_s=fenced_s)
        self.actions.append(Kill(number))

    def members_of(self, node: int) -> list[int]:
        """Those on `node` that are not known to be dead."""
        return [n for n in self.state.living() if self.state.members[n].node == node]

    def lose_members(self, numbers: list[int], cause: str, ago_s: float) -> None:
        """These have died together, `ago_s` ago."""
        for number in numbers:
            self.member(number, ended=True, doom=cause)
            if number in self.state.table:
                self.lose(number, cause, self.now_s - ago_s)

    # --- ways out

    def fail(self, failure: str | None) -> None:
        """End the run as failed: for `failure`, or else for what the first death says."""
        deadline_s = self.now_s + self.state.rules.settle_s
        self.put(stage=Stage.ENDING, deadline_s=deadline_s, failure=failure or "")
        if not self.state.living():
            self.put(stage=Stage.OVER)

    def kill_all(self) -> None:
        if self.state.stage is not Stage.KILLING:
            deadline_s = self.now_s + self.state.rules.kill_s
            self.put(stage=Stage.KILLING, deadline_s=deadline_s)
            self.actions.append(KillAll())

    def record(self, kind: Kind, **fields: Any) -> None:
        self.actions.append(Record(kind, fields))
