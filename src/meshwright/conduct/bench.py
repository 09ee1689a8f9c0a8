"""What the conductor sees of members through the heartbeats of their agents, and judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.base.pulse import Phase
from meshwright.conduct.beats import at_work, decode_sample, progress_key
from meshwright.conduct.links import LinkLog, LostPath
from meshwright.conduct.members import LinksSeen, State
from meshwright.conduct.muster import Muster
from meshwright.conduct.protocol import Message
from meshwright.conduct.stragglers import StepLog, Straggler
from meshwright.conduct.verdicts import Frozen, Hang, Sample, Verdict, judge

_PATH_S = 2.0  # for members to find that a path is lost, and to go by another


@dataclass
class Bench:
    """The newest sample of every member, and the times of the last steps."""

    muster: Muster
    samples: dict[int, Sample] = field(default_factory=dict)
    step_log: StepLog = field(default_factory=StepLog)
    links: LinkLog = field(default_factory=LinkLog)
    evaluate_quiet_s: float = 0.0  # the longest silence in an evaluation that ended
    _epochs: dict[int, int] = field(default_factory=dict)  # of the table each node goes by
    _path_lost_s: float = float("-inf")
    _progress: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)
    _condemned: dict[int, Sample] = field(default_factory=dict)
    _roles: dict[int, str] = field(default_factory=dict)

    def take(
        self, node: int, beat: Sequence[Sequence[Any]], epoch: int, state: State
    ) -> tuple[bool, bool]:
        """Take in what an agent says of its members, which it has given the table of `epoch`:
        whether any has got on since the last time, and whether any has completed a step."""
        self._epochs[node] = epoch
        roles, stepped = self._roles_of(state), False
        rank_of = {member: rank for rank, member in enumerate(state.table)}
        seen: dict[int, tuple[int, ...]] = {}
        for fields in beat:
            sample = decode_sample(fields, "")
            rank = rank_of.get(sample.member)
            role = "spare" if rank is None else roles[rank]
            self._hear_of_evaluations(sample)
            self.samples[sample.member] = replace(sample, rank=rank, role=role)
            seen[sample.member] = progress_key(sample.pulse)
            if rank is not None:
                stepped |= self.step_log.see(rank, sample.member, sample.pulse)
        works = any(at_work(self.samples[member]) for member in seen)
        progressed = works or seen != self._progress.get(node)
        self._progress[node] = seen
        return progressed, stepped

    def _hear_of_evaluations(self, now: Sample) -> None:
        """How long a member may be silent in an evaluation: a silence counts once it has ended."""
        before = self.samples.get(now.member)
        if before is None or before.pulse.phase is not Phase.EVALUATE:
            return
        if progress_key(before.pulse) != progress_key(now.pulse):
            self.evaluate_quiet_s = max(self.evaluate_quiet_s, before.quiet_s)

    def _roles_of(self, state: State) -> Mapping[int, str]:
        """Ranks of one role do the same work."""
        world = len(state.table)
        if self._roles.keys() != set(range(world)):
            replicas = state.rules.shapes.replicas(world)
            self._roles = {rank: self.muster.role(rank, replicas) for rank in range(world)}
        return self._roles

    def take_layout(self, muster: Muster) -> None:
        """The job goes on in another layout."""
        self.muster, self._roles, self.step_log = muster, {}, StepLog()

    def slow(self) -> list[Straggler]:
        """Members that are slow, each named once."""
        found = [s for s in self.step_log.stragglers(self._roles) if s.member not in self._named]
        self._named |= {straggler.member for straggler in found}
        return found

    def condemn(self, member: int) -> Sample:
        """Remember how far a member had come when it was given up; that."""
        self._condemned[member] = self.samples[member]
        return self.samples[member]

    def proved_alive(self, member: int, progress: Sequence[int]) -> Sample | None:
        """Of one that has ended after it had come so far: how it was when it was given up, if it
        was and has got on after that."""
        before = self._condemned.pop(member, None)
        wrong = before is not None and tuple(progress) != progress_key(before.pulse)
        return before if wrong and progress else None

    def see_links(
        self, message: Message, state: State, now_s: float
    ) -> tuple[LinksSeen, list[LostPath]]:
        """Take in a LINK event: what is known of links now, and paths that are newly lost."""
        node_of = {number: member.node for number, member in state.members.items()}
        member, peers = message["member"], message["peers"]
        self.links.see(member, peers, node_of)
        if any(told["lost"] or told["cut"] for told in peers):
            self._path_lost_s = now_s
        lost = self.links.lost_paths(member, peers, node_of)
        return LinksSeen(self.links.slow(), self.links.cut(state.living())), lost

    def verdicts(self, state: State, now_s: float) -> list[Verdict]:
        """Who holds the run up. Where not everybody can be seen, or was told of the table that is
        out, only who is frozen: before that they waited for one who has been lost."""
        seen = [self.samples[number] for number in state.living() if self._is_seen(number, state)]
        told = [s.member for s in seen if self._epochs[state.members[s.member].node] == state.epoch]
        everybody = set(told) >= set(state.table)
        return [
            verdict
            for verdict in judge(seen, state.limits)
            if isinstance(verdict, Frozen)
            or (everybody and not self._may_be_a_link(verdict, state, now_s))
        ]

    def _may_be_a_link(self, hang: Hang, state: State, now_s: float) -> bool:
        """Whether those who wait for each other may do so because of a path that is being left."""
        if hang.certain or not self.links.known:
            return False
        fresh = min(hang.stalled_s, now_s - self._path_lost_s) < _PATH_S
        return fresh or bool(state.cut_links)

    def _is_seen(self, number: int, state: State) -> bool:
        member = state.members[number]
        node = state.nodes.get(member.node)
        linked = node is not None and node.linked
        return linked and member.doom is None and not member.dying and number in self.samples
