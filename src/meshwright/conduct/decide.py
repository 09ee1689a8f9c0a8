"""What the conductor of a run does next: pure, so that every order of events can be tried.

```
RUNNING --asked to stop--> STOPPING --asked again, or grace over--> KILLING
   |                          |                                        |
   +------a worker fails------+--> FAILING --its peers had time to--> KILLING
                                             end by themselves
any of them --the last worker ended--> OVER
```
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from meshwright.conduct.protocol import Exit


class Phase(Enum):
    """Where a run stands."""

    RUNNING = auto()
    STOPPING = auto()  # workers were asked to save and end
    FAILING = auto()  # one failed; its peers may still write why they end
    KILLING = auto()
    OVER = auto()


class Action(Enum):
    """A signal to send to every worker."""

    TERMINATE = signal.SIGTERM
    KILL = signal.SIGKILL


@dataclass(frozen=True)
class Patience:
    """How long workers are given, in seconds."""

    stop_s: float = 60.0  # to finish their step and save when asked to stop
    settle_s: float = 0.5  # to write their logs when a peer has failed
    kill_s: float = 1.0  # to be gone after SIGKILL; then the run ends without them


@dataclass(frozen=True)
class State:
    """A run as its conductor sees it.

    `alive` and `returned` are ranks: those that run, and those that have done all their work.
    `deaths` are the failures before anyone was killed by us.
    """

    alive: frozenset[int]
    returned: frozenset[int] = frozenset()
    patience: Patience = Patience()
    phase: Phase = Phase.RUNNING
    deadline_s: float | None = None
    stop_asked: bool = False
    deaths: tuple[Exit, ...] = ()


@dataclass(frozen=True)
class StopAsked:
    """The user asked for the run to stop, once more."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Exit | StopAsked | Tick
Decision = tuple[State, Action | None]


def decide(state: State, event: Event, now_s: float) -> Decision:
    """The state after `event`, and what to do; `now_s` is of a clock that only goes forward."""
    if state.phase is Phase.OVER:
        return state, None
    match event:
        case Exit():
            return _ended(state, event, now_s), None
        case StopAsked():
            return _asked(state, now_s)
        case Tick():
            return _passed(state, now_s)


def _ended(state: State, end: Exit, now_s: float) -> State:
    state = replace(state, alive=state.alive - {end.rank})
    if not end.failed:
        state = replace(state, returned=state.returned | {end.rank})
    elif state.phase is not Phase.KILLING:
        state = replace(state, deaths=(*state.deaths, end))
        if state.phase is not Phase.FAILING:
            deadline_s = now_s + state.patience.settle_s
            state = replace(state, phase=Phase.FAILING, deadline_s=deadline_s)
    return state if state.alive else replace(state, phase=Phase.OVER)


def _asked(state: State, now_s: float) -> Decision:
    state = replace(state, stop_asked=True)
    if state.phase is Phase.RUNNING:
        deadline_s = now_s + state.patience.stop_s
        return replace(state, phase=Phase.STOPPING, deadline_s=deadline_s), Action.TERMINATE
    return _kill(state, now_s) if state.phase is Phase.STOPPING else (state, None)


def _passed(state: State, now_s: float) -> Decision:
    if state.deadline_s is None or now_s < state.deadline_s:
        return state, None
    if state.phase is Phase.KILLING:
        return replace(state, phase=Phase.OVER), None
    return _kill(state, now_s)


def _kill(state: State, now_s: float) -> Decision:
    deadline_s = now_s + state.patience.kill_s
    return replace(state, phase=Phase.KILLING, deadline_s=deadline_s), Action.KILL


def first_cause(deaths: Sequence[Exit]) -> Exit | None:
    """The death that the others follow from.

    A signal comes from outside, so signals go first. Of exceptions, those that tell of the loss of
    a peer go last even where they are the earliest: a rank that closes its connections on its way
    out ends after its peers have noticed. Then time decides. SIGABRT counts as an exception: a
    process sends it to itself, as C++ does for an exception that nothing caught.
    """

    def order(death: Exit) -> tuple[bool, bool, float]:
        return death.signal in (None, signal.SIGABRT), death.peer_lost, death.ts

    return min(deaths, key=order, default=None)
