"""Ranks that leave a node because of its links; `takeover.py` decides when."""

from __future__ import annotations

from meshwright.base.events import Kind
from meshwright.conduct.around import around, beside
from meshwright.conduct.members import Stage
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
        if found is not None and all(self._has_copy(rank, found) for rank in found):
            self._move(found)
            self.put(takeovers=(*state.takeovers, self.now_s))
            return True
        node = beside(state.table, node_of, cut_s)[0]
        since_s = min(s for ends, s in cut_s.items() if node in ends)
        if self.now_s - since_s > state.limits.longest_stall_s:
            for number in state.table:
                if node_of[number] == node:
                    self.doom(number, f"node {node} is cut off", self.now_s - since_s)
        return False

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
            other: kept.wards(other) for other in range(len(state.table)) if other not in moving
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
