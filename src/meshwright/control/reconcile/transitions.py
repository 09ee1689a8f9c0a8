"""What becomes of a job by what is seen of its run: one function, no effects."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.control.words import JobStatus, RunState

HARD_STOP_S = 120.0  # a run that was asked to stop may save for so long
VANISHED_S = 60.0  # an attempt of which nothing is to be seen for so long is lost


@dataclass(frozen=True)
class Known:
    """Of a job that holds chips."""

    status: JobStatus
    attempt_s: float  # when the attempt was decided
    begun: bool  # its engine has taken it on
    stop_asked_s: float | None
    moving: bool  # it shall go to other chips
    restarts: int
    max_restarts: int
    unknown_since_s: float | None


@dataclass(frozen=True)
class Seen:
    """Of its run. `blameless`: why an end says nothing against the job, if it does not."""

    state: RunState
    message: str = ""
    blameless: str = ""


@dataclass(frozen=True)
class Change:
    """What the job is from now on. `again`: it waits for chips once more."""

    status: JobStatus
    message: str | None = None  # None: as it was
    unknown_since_s: float | None = None
    again: bool = False
    counts: bool = False  # as one of its restarts
    hard_stop: bool = False


def decide(known: Known, seen: Seen, now_s: float) -> Change:
    """What cannot be seen has not failed: nothing changes but that it is said."""
    if known.status.final:
        return Change(known.status)
    if seen.state is RunState.UNKNOWN:
        since_s = known.unknown_since_s or now_s
        return Change(known.status, seen.message or "cannot be seen", since_s)
    if seen.state.ended:
        return _after_end(known, seen)
    if seen.state is RunState.ABSENT and not known.begun:
        return _before_it_began(known)
    if seen.state is RunState.ABSENT and now_s - known.attempt_s > VANISHED_S:
        return _after_end(known, Seen(RunState.LOST, "nothing of it is to be seen"))
    if known.stop_asked_s is not None:
        hard = now_s - known.stop_asked_s > HARD_STOP_S
        return Change(JobStatus.STOPPING, hard_stop=hard)
    if seen.state is RunState.RUNNING and known.status is JobStatus.STARTING:
        return Change(JobStatus.RUNNING, "")
    return Change(known.status, "" if known.unknown_since_s else None)


def _before_it_began(known: Known) -> Change:
    """Its engine may be away for long: that says nothing about the job."""
    if known.stop_asked_s is not None:
        return Change(JobStatus.STOPPED, "stopped before it began")
    return Change(known.status)


def _after_end(known: Known, seen: Seen) -> Change:
    if seen.state is RunState.FINISHED:
        return Change(JobStatus.SUCCEEDED, "")
    if known.stop_asked_s is not None:
        words = {RunState.STOPPED: "", RunState.LOST: "ended before it could save"}
        return Change(JobStatus.STOPPED, words.get(seen.state, seen.message))
    if known.moving:
        return Change(JobStatus.QUEUED, "leaves a drained node", again=True)
    if seen.state is RunState.STOPPED:
        return Change(JobStatus.STOPPED, "was stopped on its machine, not through the service")
    why = seen.blameless or (seen.message or "lost" if seen.state is RunState.LOST else "")
    if not why:
        return Change(JobStatus.FAILED, seen.message or "its run failed")
    if known.restarts >= known.max_restarts:
        return Change(JobStatus.FAILED, f"{why}; it was started again {known.restarts} times")
    return Change(JobStatus.QUEUED, f"starts again: {why}", again=True, counts=True)
