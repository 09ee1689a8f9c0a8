"""What the supervisor of a foreign script does next: pure, so that every order of events is tried.

```
RUNNING --a rank failed, or is stuck--> ENDING --grace over--> KILLING
   |                                       \\------- the last one ended ------+
   |<--Start-- WAITING <-- restarts left, and some use in it -----------------+--> OVER
```

One incident is one decision: all ranks are asked to end, at once, and whatever else happens until
the last has gone belongs to it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_NO_USE = 3  # failures in a row without progress


class Stage(Enum):
    """Where the job stands."""

    RUNNING = auto()
    ENDING = auto()  # ranks were asked to end
    KILLING = auto()
    WAITING = auto()  # before the next start
    OVER = auto()


class Result(StrEnum):
    """How the job ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Trouble(StrEnum):
    """What an incident began with."""

    EXIT = "exit"
    SIGNAL = "signal"
    FROZEN = "frozen"
    HANG = "hang"


@dataclass(frozen=True)
class Cause:
    """An incident in short; equal ones are counted together. `rank` is None if nobody is named."""

    trouble: Trouble
    rank: int | None
    what: str  # "SIGKILL", "exit code 1", "state T", "no progress"


@dataclass(frozen=True)
class Rules:
    """What the user allows; times in seconds."""

    world: int
    max_restarts: int = 10
    grace_s: float = 1.0  # between SIGTERM and SIGKILL after an incident
    stop_s: float = 60.0  # the same when the user asked to stop
    kill_s: float = 10.0  # to be gone after SIGKILL
    long_life_s: float = 3000.0  # an incarnation this old was of use, if nothing tells of steps


@dataclass(frozen=True)
class Job:
    """A job as its supervisor sees it. `alive` and `returned` are ranks of this incarnation."""

    rules: Rules
    stage: Stage = Stage.RUNNING
    alive: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    begun_s: float = 0.0
    deadline_s: float | None = None
    stop_asked: bool = False
    cause: Cause | None = None
    restarts: int = 0
    useless: int = 0  # failures since the last progress, the one that ended it included
    causes: tuple[Cause, ...] = ()  # of all incidents
    best_step: int | None = None  # of earlier incarnations
    step: int | None = None  # of this one
    result: Result | None = None
    reason: str = ""  # why it is over, beside its cause


@dataclass(frozen=True)
class Ended:
    """A rank's process has ended; one of the two is set."""

    rank: int
    code: int | None
    signal: int | None


@dataclass(frozen=True)
class Stuck:
    """The watch has a verdict."""

    cause: Cause


@dataclass(frozen=True)
class Reached:
    """Some rank has said that it is at this step."""

    step: int


@dataclass(frozen=True)
class StopAsked:
    """The user asked for the job to stop, once more."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Ended | Stuck | Reached | StopAsked | Tick


@dataclass(frozen=True)
class Send:
    """A signal for these ranks."""

    number: signal.Signals
    ranks: frozenset[int]


@dataclass(frozen=True)
class Start:
    """Start every rank anew."""


Action = Send | Start
Decision = tuple[Job, tuple[Action, ...]]


def begin(rules: Rules, now_s: float) -> Decision:
    """The first start."""
    return _start(Job(rules), now_s)


def decide(job: Job, event: Event, now_s: float) -> Decision:
    """The job after `event`, and what to do; `now_s` is of a clock that only goes forward."""
    if job.stage is Stage.OVER:
        return job, ()
    match event:
        case Ended():
            return _ended(job, event, now_s)
        case Stuck():
            return _incident(job, event.cause, now_s) if job.stage is Stage.RUNNING else (job, ())
        case Reached():
            return replace(job, step=max(event.step, job.step or 0)), ()
        case StopAsked():
            return _asked(job, now_s)
        case Tick():
            return _passed(job, now_s)


def _start(job: Job, now_s: float) -> Decision:
    everyone = frozenset(range(job.rules.world))
    fresh = replace(job, stage=Stage.RUNNING, alive=everyone, returned=frozenset(), cause=None)
    return replace(fresh, begun_s=now_s, deadline_s=None, step=None), (Start(),)


def _ended(job: Job, end: Ended, now_s: float) -> Decision:
    job = replace(job, alive=job.alive - {end.rank})
    actions: tuple[Action, ...] = ()
    if end.code == 0:
        job = replace(job, returned=job.returned | {end.rank})
    elif job.stage is Stage.RUNNING:
        job, actions = _incident(job, _cause(end), now_s)
    elif job.stage is Stage.ENDING:
        job = replace(job, cause=_nearer(job.cause, end))
    return (job, actions) if job.alive else _all_ended(job, now_s)


def _cause(end: Ended) -> Cause:
    if end.signal is None:
        return Cause(Trouble.EXIT, end.rank, f"exit code {end.code}")
    return Cause(Trouble.SIGNAL, end.rank, _name(end.signal))


def _nearer(cause: Cause | None, end: Ended) -> Cause | None:
    """A rank that a signal killed ends after its peers have noticed, if it had much to tidy up:
    then the signal, which comes from outside, is the cause, and not their exceptions. SIGABRT is
    an exception that nothing caught, and SIGTERM is ours."""
    outside = end.signal not in (None, signal.SIGABRT, signal.SIGTERM)
    noticed = cause is not None and (cause.trouble is Trouble.EXIT or cause.what == "SIGABRT")
    return _cause(end) if outside and noticed else cause


def _incident(job: Job, cause: Cause, now_s: float) -> Decision:
    job = replace(job, stage=Stage.ENDING, deadline_s=now_s + job.rules.grace_s, cause=cause)
    guilty = job.alive if cause.rank is None else job.alive & {cause.rank}
    # A hung rank writes its stack on SIGABRT (PYTHONFAULTHANDLER), and may not come to SIGTERM. A
    # stopped one takes nothing but SIGKILL.
    number = signal.SIGKILL if cause.trouble is Trouble.FROZEN else signal.SIGABRT
    sent = (Send(number, guilty), Send(signal.SIGTERM, job.alive - guilty))
    return job, tuple(send for send in sent if send.ranks)


def _asked(job: Job, now_s: float) -> Decision:
    again, job = job.stop_asked, replace(job, stop_asked=True)
    if job.stage is Stage.WAITING:
        return _over(job, Result.INTERRUPTED, ""), ()
    if job.stage is Stage.RUNNING:
        deadline_s = now_s + job.rules.stop_s
        job = replace(job, stage=Stage.ENDING, deadline_s=deadline_s)
        return job, (Send(signal.SIGTERM, job.alive),)
    return _kill(job, now_s) if again and job.stage is Stage.ENDING else (job, ())


def _passed(job: Job, now_s: float) -> Decision:
    if job.deadline_s is None or now_s < job.deadline_s:
        return job, ()
    if job.stage is Stage.WAITING:
        return _start(replace(job, restarts=job.restarts + 1), now_s)
    if job.stage is Stage.ENDING:
        return _kill(job, now_s)
    ranks = ", ".join(map(str, sorted(job.alive)))
    return _over(job, Result.FAILED, f"the kernel does not let go of rank {ranks}"), ()


def _kill(job: Job, now_s: float) -> Decision:
    job = replace(job, stage=Stage.KILLING, deadline_s=now_s + job.rules.kill_s)
    return job, (Send(signal.SIGKILL, job.alive),)


def _all_ended(job: Job, now_s: float) -> Decision:
    """Nobody of this incarnation is left: finish, or judge whether another is of use."""
    if len(job.returned) == job.rules.world:
        return _over(job, Result.FINISHED, ""), ()
    if job.stop_asked or job.cause is None:
        return _over(job, Result.INTERRUPTED, ""), ()
    cause = job.cause
    job = _account(job, cause, now_s)
    if job.useless >= _NO_USE:
        return _over(job, Result.FAILED, f"{job.useless} failures in a row without progress"), ()
    if job.restarts >= job.rules.max_restarts:
        return _over(job, Result.FAILED, f"all {job.restarts} restarts are used up"), ()
    job = replace(job, stage=Stage.WAITING, deadline_s=now_s + wait_s(job.causes.count(cause)))
    return _passed(job, now_s)


def _account(job: Job, cause: Cause, now_s: float) -> Job:
    if job.step is None:
        of_use = now_s - job.begun_s >= job.rules.long_life_s
    else:
        of_use = job.best_step is None or job.step > job.best_step
        job = replace(job, best_step=max(job.step, job.best_step or 0))
    useless = 1 if of_use else job.useless + 1
    return replace(job, useless=useless, causes=(*job.causes, cause))


def wait_s(times: int) -> float:
    """How long to wait before a restart after a cause that has come `times` times: not at all at
    first, then twice as long each time."""
    return 0.0 if times <= 1 else min(_FIRST_WAIT_S * 2.0 ** (times - 2), _LONGEST_WAIT_S)


def _over(job: Job, result: Result, reason: str) -> Job:
    return replace(job, stage=Stage.OVER, deadline_s=None, result=result, reason=reason)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
