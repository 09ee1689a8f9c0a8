"""Ranks that leave a node because of its links; `takeover.py` decides when."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.base.events import Kind
from meshwright.conduct.around import Ends, around, beside
from meshwright.conduct.members import Stage
from meshwright.conduct.reach import ANSWER_S, Probe, unreached
from meshwright.conduct.staffing import Staffing

_STEPS_APART = 2  # moves of two ranks: by then all has a copy elsewhere again


class Rerouting(Staffing):
    """A turn that knows the way around links that are slow or cut."""

    def cross_cut(self) -> bool:
        """Ranks on both sides of a link that is cut do not get on: have those of one side taken
        over on the other, where all have a copy and a member that is ready. Whether they are.

        Where there is none, and the link stays cut, the smaller side is lost. A node that has not
        been heard since may be cut off altogether: its lease decides.
        """
        state, node_of = self.state, self.nodes_of_members()
        if state.stage not in (Stage.RUNNING, Stage.TAKING_OVER) or state.stop_asked:
            return False
        cut_s = {ends: s for ends, s in state.cut_links.items() if all(map(self._is_heard, ends))}
        ready = [number for number in self.ready() if self._is_heard(node_of[number])]
        found = around(state.table, node_of, cut_s, ready, state.shadows)
        if found == {}:
            return False
        if not self._has_asked(cut_s):
            return True
        far = {ends for ends in self.far() if all(map(self._is_heard, ends))}
        cut_s = {**dict.fromkeys(far, state.asked_s), **cut_s}
        found = around(state.table, node_of, cut_s, ready, state.shadows)
        if found and all(self._has_copy(rank, found) for rank in found):
            for rank in found:
                node = node_of[state.table[rank]]
                since_s = min(s for ends, s in cut_s.items() if node in ends)
                self.lose(state.table[rank], f"node {node} is cut off", since_s)
            self.put(history=state.history)  # not the fault of the rank or of its step
            self._move(found)
            return True
        self._give_up_a_side(cut_s)
        return False

    def _give_up_a_side(self, cut_s: Mapping[Ends, float]) -> None:
        """Give up the ranks of one node that is cut off, if all that they hold is elsewhere: one at
        a time, and none before the links have been cut for long since."""
        state, node_of = self.state, self.nodes_of_members()
        for node in beside(state.table, node_of, cut_s):
            ranks = [rank for rank, number in enumerate(state.table) if node_of[number] == node]
            near = {rank: spare for rank, spare in state.shadows.items() if node_of[spare] != node}
            if all(self._has_copy(rank, {r: near.get(r, -1) for r in ranks}) for rank in ranks):
                since_s = max(
                    min(s for ends, s in cut_s.items() if node in ends),
                    max(state.takeovers, default=0.0),
                )
                if self.now_s - since_s > state.limits.longest_stall_s:
                    for rank in ranks:
                        cause = f"node {node} is cut off"
                        self.doom(state.table[rank], cause, self.now_s - since_s)
                return

    def _has_asked(self, cut_s: Mapping[Ends, float]) -> bool:
        """Whether it is known which nodes reach each other, or will not be: else the agents are
        asked, anew for a link of which they did not know."""
        known = unreached(self.state.reached)
        newest_s = max((s for ends, s in cut_s.items() if ends not in known), default=0.0)
        if self.state.asked_s < newest_s:
            there = [n for n, node in self.state.nodes.items() if node.alive and node.linked]
            self.put(asked_s=self.now_s, reached={})
            self.actions.append(Probe(self.now_s, tuple(there)))
        state, since_s = self.state, max(self.state.asked_s, max(self.state.cut_links.values()))
        late = [
            number
            for number, node in state.nodes.items()
            if node.linked and not (number in state.reached and self._is_heard(number))
        ]
        return not late or self.now_s - since_s >= ANSWER_S

    def leave_slow(self) -> bool:
        """Have the ranks behind a slow link move, one at a time: what a rank holds has a copy on
        some other. Whether this is under way; where nobody can take them, that is told once."""
        state = self.state
        node_of, shadows = self.nodes_of_members(), state.shadows
        found = around(state.table, node_of, state.slow_links, self.ready(), shadows)
        if found == {}:
            return False
        if found is None:
            self._advise()
            return False
        if state.step >= state.moved_step + _STEPS_APART:
            rank = min(found)
            if not self._has_copy(rank, {rank: found[rank]}):
                self._advise()
                return False
            self._move({rank: found[rank]})
            self.put(moved_step=state.step)
        return True

    def _is_heard(self, node: int) -> bool:
        """Whether the agent of a node was heard since all that is cut is."""
        heard_s = self.state.nodes[node].heard_s
        return heard_s > max(self.state.cut_links.values(), default=0.0)

    def _has_copy(self, rank: int, moving: dict[int, int]) -> bool:
        """Whether what `rank` holds can be had without it: from a twin that stays, from who takes
        it and has shadowed it, or from its keeper, with all others of its parity, as
        `plan.resilience.keeping` has them."""
        state, node_of = self.state, self.nodes_of_members()
        if state.shadows.get(rank) == moving[rank]:
            return True
        kept = state.rules.keeping([node_of[number] for number in state.table])
        staying = {
            other: kept.wards(other)
            for other, number in enumerate(state.table)
            if other not in moving and state.members[number].holds
        }
        return kept.source(rank, staying) is not None

    def _move(self, found: dict[int, int]) -> None:
        state = self.state
        table = tuple(found.get(rank, number) for rank, number in enumerate(state.table))
        self.send(table, moved=tuple(found))
        nodes = sorted({state.members[number].node for number in found.values()})
        left = sorted({state.members[state.table[rank]].node for rank in found})
        what = f"ranks {sorted(found)} move from node {left[0]} to {nodes}: a link holds them up"
        self.record(Kind.ADVICE, advice=what)

    def _advise(self) -> None:
        state, node_of = self.state, self.nodes_of_members()
        nodes = {node_of[number] for number in state.table}
        new = {ends for ends in state.slow_links if set(ends) <= nodes} - state.advised
        for a, b in sorted(new):
            what = (
                f"look after the link of nodes {a} and {b}; no spare can take ranks out of its way"
            )
            self.record(Kind.ADVICE, advice=what)
        self.put(advised=state.advised | new)
