"""What the conductor of a run that survives does next: pure, so that every order of events can be
tried (`simulation.py`).

Each event changes what is known (`turn.py`); then one look at all of it decides. So an event that
comes late, twice or in another order leads to the same end. A member loses its rank on positive
evidence only: it is dead, its agent is dead, or its agent's lease has lapsed while nobody gets on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.actions import Action, StopMembers
from meshwright.conduct.losing import LAST
from meshwright.conduct.members import Event, Relayout, Stage, State
from meshwright.conduct.places import crowded, grown, shrunk
from meshwright.conduct.rerouting import Rerouting
from meshwright.conduct.turn import HOUR_S


def decide(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
    """The state after `events`, which came together, and what to do, in this order; `now_s` only
    goes forward."""
    if state.stage is Stage.OVER:
        return state, []
    turn = _Settling(state, now_s)
    for event in events:
        turn.take(event)
    turn.settle()
    return turn.state, turn.actions


class _Settling(Rerouting):
    """A turn that ends in what the state as a whole asks for."""

    def settle(self) -> None:
        """Do what the state as a whole asks for."""
        if self.state.stage in LAST:
            if self.state.stage is not Stage.OVER and not self.state.living():
                self.put(stage=Stage.OVER)
            return
        if self.state.stage is Stage.FORMING:
            self._form()
        elif self.state.returned & set(self.state.table):
            self._wind_up()
        elif vacant := self.vacant():
            self._fill(vacant)
        elif self.state.disputed or self.state.table_void:
            self.send(self.state.table)
        elif self._all_hold():
            self._change_layout()
        elif self.state.cut_links and self.cross_cut():
            pass
        elif self._all_run():
            self._run()
        if self.state.stage in (Stage.RUNNING, Stage.WAITING):
            self.replenish()

    def _all_run(self) -> bool:
        return set(self.state.table) <= self.state.executing.keys()

    def _all_hold(self) -> bool:
        wanted = self.state.relayout
        if wanted is None or not wanted.saving or self.state.stop_asked:
            return False
        return set(self.state.table) <= wanted.held

    def _form(self) -> None:
        state = self.state
        if state.stop_asked:
            if not state.living():
                self.put(stage=Stage.OVER)
            return
        vacant = self.vacant()
        filled = self.chosen(vacant)
        if filled is None:
            self._start_again(vacant)
            return
        table = [filled.get(rank, number) for rank, number in enumerate(state.table)]
        self.put(table=tuple(table))
        if all(self.state.members[number].up for number in table):
            self.send(tuple(table), first=True)

    def _start_again(self, vacant: list[int]) -> None:
        """Start members for ranks that lost theirs before there was any state.

        One that failed by itself would fail again.
        """
        state = self.state
        if any(death.signal is None for death in state.deaths):
            self.fail(None)
            return
        missing = len(vacant) - len(self.free()) - len(self.coming())
        if missing > 0 and len(state.launches) >= state.rules.max_takeovers:
            member = state.members[state.table[vacant[0]]]
            self.fail(None if state.deaths else f"rank {vacant[0]} did not start: {member.doom}")
            return
        for _ in range(missing):
            if (node := self.room()) is not None:
                self.launch(node)

    def _fill(self, vacant: list[int]) -> None:
        state = self.state
        living = set(state.living())
        if not any(state.members[n].holds for n in living) and not (
            living & set(state.shadows.values())
        ):
            self.fail("nobody is left who holds the state" if not state.deaths else None)
            return
        if state.stop_asked and not self.free():
            self.fail(None)
            return
        if cause := self._over_budget():
            self.fail(cause)
            return
        filled = self.chosen(vacant)
        if filled is not None:
            table = tuple(filled.get(rank, number) for rank, number in enumerate(state.table))
            self.send(table)
        elif self.coming() or not self._shrink():
            self._wait(vacant)

    def _over_budget(self) -> str | None:
        state = self.state
        same = Counter((rank, step) for _, rank, step in state.history)
        for (rank, step), times in same.items():
            if times >= state.rules.same_loss:
                return f"rank {rank} was lost {times} times at step {step}"
        recent = sum(self.now_s - then < HOUR_S for then in state.takeovers)
        if recent >= state.rules.max_takeovers:
            most = state.rules.max_takeovers
            return f"{recent} takeovers in an hour (resilience.max_takeovers = {most})"
        return None

    def _shrink(self) -> bool:
        """Go on with fewer replicas, if that is wanted and possible."""
        state = self.state
        if state.rules.on_no_spare != "shrink":
            return False
        members = state.members
        holding = {n for n in state.living() if members[n].holds and members[n].doom is None}
        linked = {n for n in holding if state.nodes[members[n].node].linked}
        found = shrunk(state.table, linked, state.rules.shapes) or shrunk(
            state.table, holding, state.rules.shapes
        )
        if found is None:
            return False
        if state.goal is None:
            self.put(goal=state.rules.shapes.replicas(len(state.table)))
        self._resize(*found)
        return True

    def _resize(self, replicas: int, table: tuple[int, ...]) -> None:
        before = self.state.rules.shapes.replicas(len(self.state.table))
        first = self.state.resized_from
        self.put(resized_from=before if first is None else first, wanted=None, relayout=None)
        self.put(resize_s=self.state.resize_s or self.now_s)
        self.send(table, replicas=replicas)

    def _wait(self, vacant: list[int]) -> None:
        state = self.state
        if state.stage is Stage.WAITING:
            return
        if state.rules.on_no_spare == "shrink" and not self.coming() and self.room() is None:
            self.fail(f"no spare for ranks {vacant}, and no smaller layout holds the state")
            return
        self.put(stage=Stage.WAITING, deadline_s=None)
        if not self.coming() and self.room() is None:
            self.record(Kind.ALERT, what=f"ranks {vacant} wait for a free chip", node=None)

    def _run(self) -> None:
        """Every rank of the table runs."""
        state = self.state
        if state.stage is not Stage.RUNNING:
            deadline_s = state.deadline_s if state.stop_asked else None
            self.put(stage=Stage.RUNNING, deadline_s=deadline_s)
            if state.losses:
                self.record(Kind.TAKEOVER_DONE, **self._account(state))
            if state.resized_from is not None or state.relaid is not None:
                self.record(Kind.RESIZED, **self._resize_account(state))
            self.put(losses=(), deaths=(), resized_from=None, relaid=None, resize_s=0.0)
        if state.stop_asked:
            return
        if self.state.rules.shadow and self.enlist():
            return
        if self.state.wanted is not None:
            self._seek_size(self.state.wanted)
        elif self.state.relayout is not None:
            self._seek_layout(self.state.relayout)
        elif self.is_calm() and not (self._regrow() or (state.slow_links and self.leave_slow())):
            self._spread()

    def _spread(self) -> None:
        """Move ranks away from nodes whose loss would take all who hold their state."""
        state, node_of = self.state, self.nodes_of_members()
        ready = [number for number in self.ready() if not self.is_behind(number)]
        table, moved = list(state.table), []
        for rank in crowded(table, node_of, state.rules.shapes) if ready else ():
            here = node_of[table[rank]]
            found = next((number for number in ready if node_of[number] != here), None)
            if found is not None:
                ready.remove(found)
                table[rank] = found
                moved.append(rank)
        if moved:
            self.send(tuple(table), moved=tuple(moved))
            what = f"ranks {moved} move: one node held all copies of their state"
            self.record(Kind.ADVICE, advice=what)

    def _account(self, state: State) -> dict[str, Any]:
        first_s = min(loss.fault_s for loss in state.losses)
        in_flight = max(loss.step for loss in state.losses)
        kept = [loss.rank for loss in state.losses if loss.rank < len(state.table)]
        return {
            "epoch": state.epoch,
            "ranks": [loss.rank for loss in state.losses],
            "members": {str(rank): state.table[rank] for rank in kept},
            "cause": state.losses[0].cause,
            "detected_s": max(loss.seen_s - loss.fault_s for loss in state.losses),
            "takeover_s": self.now_s - first_s,
            "step": in_flight,
            "lost_steps": max(0, in_flight - 1 - min(state.executing.values())),
        }

    def _resize_account(self, state: State) -> dict[str, Any]:
        before: int | str | None = state.resized_from
        after: int | str = state.rules.shapes.replicas(len(state.table))
        if state.relaid is not None:
            before, after = state.relaid.before, state.relaid.after
        return {
            "epoch": state.epoch,
            "step": state.step,
            "before": before,
            "after": after,
            "resize_s": self.now_s - state.resize_s,
        }

    def _seek_size(self, replicas: int) -> None:
        """Towards the number of replicas that was asked for; new members start meanwhile."""
        state = self.state
        if replicas == state.rules.shapes.replicas(len(state.table)):
            self.put(wanted=None, resize_s=0.0)
            return
        # Only who could run at once: all others would wait for the rest.
        table = grown(state.table, replicas, self.ready(), state.rules.shapes)
        if table is not None:
            self._resize(replicas, table)
            return
        self._launch_for(state.rules.shapes.world(replicas))

    def _regrow(self) -> bool:
        """Towards the size that the run had before it shrank, as far as there are chips again;
        whether this is under way."""
        state, shapes = self.state, self.state.rules.shapes
        if state.goal is None:
            return False
        chips = len(state.table) + len(self.idle()) + sum(self.rooms().values())
        sizes = [n for n in shapes.sizes if n <= state.goal and shapes.world(n) <= chips]
        if not sizes or sizes[-1] <= shapes.replicas(len(state.table)):
            return False
        table = grown(state.table, sizes[-1], self.ready(), shapes)
        if table is None:
            self._launch_for(shapes.world(sizes[-1]))
            return self.getting_ready()
        self.put(goal=state.goal if sizes[-1] < state.goal else None)
        self._resize(sizes[-1], table)
        return True

    def _launch_for(self, world: int) -> None:
        """Start what is missing to so many ranks, where there is room; not for ever, if they do not
        live."""
        missing = world - len(self.state.table) - len(self.idle())
        for _ in range(min(missing, self.state.rules.max_takeovers + world - self.launched())):
            if (node := self.room()) is not None:
                self.launch(node)

    def _seek_layout(self, wanted: Relayout) -> None:
        """Towards another layout: once there are enough who could begin, all save."""
        if len(self.state.table) + len(self.ready()) < wanted.world:
            self._launch_for(wanted.world)
            return
        self.put(relayout=replace(wanted, saving=True))
        self.send(self.state.table)

    def _change_layout(self) -> None:
        """All have saved: begin anew in the layout that was asked for."""
        state, wanted = self.state, self.state.relayout
        assert wanted is not None
        members = [*state.table, *self.ready()][: wanted.world]
        self.put(relayout=None)
        if len(members) < wanted.world:  # a spare has died meanwhile
            self.send(state.table)
            self.record(Kind.ALERT, what=f"too few chips for {wanted.after}", node=None)
            return
        rules = replace(state.rules, shapes=wanted.shapes, keeping=wanted.keeping)
        self.put(relaid=wanted, rules=rules)
        self.send(tuple(members), load=True)

    def _wind_up(self) -> None:
        """Somebody has done all its work, so all of it is done: nobody is replaced any more."""
        state = self.state
        if set(state.table) <= state.returned:
            idle = tuple(number for number in state.living() if number not in state.table)
            self.put(stage=Stage.ENDING, deadline_s=self.now_s + state.rules.kill_s)
            self.actions.append(StopMembers(idle))
        elif state.stage is Stage.TAKING_OVER:  # the others would wait for it
            self.put(stage=Stage.ENDING, deadline_s=self.now_s + state.limits.stop_s)
            self.actions.append(StopMembers(tuple(state.living())))
        elif self._vacant_failed():
            self.put(stage=Stage.ENDING, deadline_s=self.now_s + state.limits.stop_s)
        if not self.state.living():
            self.put(stage=Stage.OVER)

    def _vacant_failed(self) -> bool:
        return any(self.state.table[rank] not in self.state.returned for rank in self.vacant())
