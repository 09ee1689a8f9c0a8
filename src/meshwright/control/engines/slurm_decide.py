"""What is to be done about an attempt at a job, from what can be seen of it. Pure.

Whatever cannot be seen is no evidence. A process is known to have ended when the lock that it holds
for all its life is free; a node is known to be lost when besides its machine refuses connections to
the daemon that Slurm runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshwright.control.engines.slurm_words import SlurmJob
from meshwright.control.words import RunState

MOST_SUBMITS = 5


class Answer(Enum):
    """Of a machine that was asked whether Slurm's daemon runs there."""

    YES = auto()
    REFUSED = auto()  # it is there, and the daemon is not
    SILENT = auto()  # nobody can tell
    UNASKED = auto()


class End(Enum):
    """The last word of a run about itself."""

    NONE = auto()
    FINISHED = auto()
    INTERRUPTED = auto()
    FAILED = auto()


class Act(Enum):
    """What the engine does now, once and again until it is no more asked for."""

    NOTHING = auto()
    SUBMIT = auto()  # Slurm does not know the job, and nothing of it has begun
    CONDUCT = auto()  # start who leads a run that has agents
    RELEASE = auto()  # clear what holds the job back
    SET_ASIDE = auto()  # end what is left, keep the job for another attempt
    CLEAR = auto()  # the job has ended, and with it its allocation


@dataclass(frozen=True)
class NodeEvidence:
    """What can be seen of one node of an attempt."""

    name: str
    begun: bool  # its part of this attempt has begun
    held: bool  # something of the run lives there
    answer: Answer
    chips: int

    @property
    def dead(self) -> bool:
        """Known to be lost."""
        return self.begun and not self.held and self.answer is Answer.REFUSED


@dataclass(frozen=True)
class Evidence:
    """What can be seen of an attempt."""

    survives: bool  # it has agents, and goes on without some
    waits: bool  # it waits for chips rather than going on with less
    ranks: int
    heard: bool  # Slurm's controller has answered since the job was submitted
    submits: int  # how often it was
    slurm: SlurmJob | None  # as the controller knows it
    begun: bool  # its leader has begun
    held: bool  # its leader lives
    ended: bool  # its leader has left its last word
    stop: bool  # it was asked to end
    ready: bool  # all ranks have been ready
    end: End
    error: str
    nodes: Sequence[NodeEvidence]


@dataclass(frozen=True)
class Judged:
    """What an attempt is in, and what follows."""

    state: RunState
    message: str = ""
    act: Act = Act.NOTHING
    dead: tuple[str, ...] = ()  # nodes to take out of service


def judge(seen: Evidence) -> Judged:
    """The state of an attempt and the one thing to do."""
    dead = tuple(node.name for node in seen.nodes if node.dead)
    if seen.ended and not seen.held:
        return _after_its_end(seen, dead)
    if seen.held:
        return _while_it_lives(seen, dead)
    if seen.begun:
        return _without_leader(seen, dead)
    return _before_it_begins(seen)


def _after_its_end(seen: Evidence, dead: tuple[str, ...]) -> Judged:
    silent = _silent(seen)
    if seen.end is End.FINISHED:
        return Judged(RunState.FINISHED, act=Act.CLEAR, dead=dead)
    if seen.stop:
        words = "" if seen.end is End.INTERRUPTED else "ended on request, nothing saved"
        return Judged(RunState.STOPPED, words, Act.CLEAR, dead)
    if dead:  # that is why
        return Judged(RunState.LOST, _lost(dead), Act.SET_ASIDE, dead)
    if silent:
        return Judged(RunState.LOST, f"{silent} cannot be seen", Act.SET_ASIDE)
    if seen.end is End.INTERRUPTED:  # nobody here has asked for it
        return Judged(RunState.LOST, "Slurm has ended it: preempted or cancelled", Act.SET_ASIDE)
    return Judged(RunState.FAILED, seen.error or "it ended and did not say why", Act.CLEAR)


def _while_it_lives(seen: Evidence, dead: tuple[str, ...]) -> Judged:
    left = sum(node.chips for node in seen.nodes if not node.dead)
    if dead and seen.waits and left < seen.ranks:  # it would wait for ever
        return Judged(RunState.LOST, _lost(dead), Act.SET_ASIDE, dead)
    if seen.survives and not any(node.begun for node in seen.nodes):
        return _before_it_begins(seen)  # its leader waits for nodes
    gone = seen.heard and not (seen.slurm and seen.slurm.active)
    if seen.survives and gone and not any(node.held for node in seen.nodes):
        return Judged(RunState.LOST, "none of its agents is left", Act.SET_ASIDE, dead)
    silent = _silent(seen)
    words = f"{silent} cannot be seen" if silent else ""
    if silent and not seen.survives:
        return Judged(RunState.UNKNOWN, words)
    words = _lost(dead) if dead else words
    return Judged(RunState.RUNNING if seen.ready else RunState.STARTING, words, dead=dead)


def _without_leader(seen: Evidence, dead: tuple[str, ...]) -> Judged:
    """It died without a word. Agents that live have the state, and need another."""
    if seen.survives and any(node.held for node in seen.nodes):
        return Judged(RunState.RUNNING, "nobody conducts it", Act.CONDUCT, dead)
    if seen.stop:
        return Judged(RunState.STOPPED, "ended on request, nothing saved", Act.CLEAR, dead)
    why = _lost(dead) if dead else "its processes are gone"
    return Judged(RunState.LOST, why, Act.SET_ASIDE, dead)


def _before_it_begins(seen: Evidence) -> Judged:
    if seen.stop and not seen.held and not (seen.slurm and seen.slurm.active):
        return Judged(RunState.STOPPED, "ended before it began")
    if seen.stop:
        return Judged(RunState.STARTING, "is being cancelled", Act.CLEAR)
    if not seen.heard:
        return Judged(RunState.STARTING, "Slurm's controller does not answer")
    job = seen.slurm
    if job is None or not job.active:
        if seen.submits >= MOST_SUBMITS:
            why = f"Slurm has ended the job {seen.submits} times before anything of it began"
            return Judged(RunState.FAILED, why, Act.CLEAR)
        return Judged(RunState.STARTING, "Slurm has lost the job", Act.SUBMIT)
    if job.waiting:
        held = "held" in job.reason.lower() or job.reason == "BeginTime"
        act = Act.RELEASE if held else Act.NOTHING
        return Judged(RunState.STARTING, f"waits in Slurm: {job.reason}", act)
    lacks = seen.survives and not seen.held
    return Judged(RunState.STARTING, act=Act.CONDUCT if lacks else Act.NOTHING)


def _silent(seen: Evidence) -> str:
    return ", ".join(node.name for node in seen.nodes if node.answer is Answer.SILENT)


def _lost(dead: Sequence[str]) -> str:
    return f"{', '.join(dead)} {'is' if len(dead) == 1 else 'are'} lost"


class Begin(Enum):
    """How `start` begins."""

    FOUND = auto()  # the job of this attempt is there
    AGAIN = auto()  # that of an earlier one is there, and is used again
    SUBMIT = auto()


@dataclass(frozen=True)
class Beginning:
    """The job that it is about, and jobs of the same name that are too many."""

    how: Begin
    job: SlurmJob | None = None
    surplus: tuple[int, ...] = ()


def begin(jobs: Sequence[SlurmJob], attempt: int) -> Beginning:
    """How to begin `attempt`, with the jobs of its name that Slurm knows. One that runs comes
    before one that waits: Slurm lets no two of a name run."""
    active = [job for job in jobs if job.active]
    active.sort(key=lambda job: (-job.attempt, job.waiting, job.id))
    if not active:
        return Beginning(Begin.SUBMIT)
    job, surplus = active[0], tuple(other.id for other in active[1:])
    how = Begin.FOUND if job.attempt >= attempt else Begin.AGAIN
    return Beginning(how, job, surplus)
