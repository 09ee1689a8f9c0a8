"""What the conductor of a run that survives knows and hears, the words of `takeover.decide`; what
follows from it is in `actions.py`.

A member is one worker process, numbered once and for ever. A rank is a place in the layout. The
table says which member holds which rank; each new table has a higher epoch, and what belongs to an
older one is refused by everybody.

```
FORMING --all are up--> TAKING_OVER --all run--> RUNNING --a rank is lost--> TAKING_OVER
                             ^                      +--and nobody is free--> WAITING --+
                             +---------------------------------------------------------+
any of them --all returned, or no way on--> ENDING --time is over--> KILLING --> OVER
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from meshwright.conduct.limits import Limits
from meshwright.conduct.links import SlowLink
from meshwright.conduct.places import Shapes
from meshwright.conduct.protocol import Exit
from meshwright.conduct.reach import Reached
from meshwright.plan.resilience import Keeping


class Stage(Enum):
    """Where a run stands."""

    FORMING = auto()  # the members of the first table are starting
    TAKING_OVER = auto()  # a table is out, and not all have said that they run
    RUNNING = auto()
    WAITING = auto()  # a rank has no member, and none is free
    ENDING = auto()  # no way on, or nothing left to do: members may end by themselves
    KILLING = auto()
    OVER = auto()


@dataclass(frozen=True)
class Member:
    """One worker process. `holds` is true once it has had the state of a rank; `up` once others
    can reach it at `addresses`; `fenced_s` is when one that was told to die is taken for dead. One
    that is `dying` runs no code any more, and has not been buried; `lost_rank` is what it had."""

    node: int
    started_s: float = 0.0
    addresses: tuple[str, ...] = ()
    ready: bool = False
    holds: bool = False
    dying: bool = False
    lost_rank: int | None = None
    ended: bool = False
    doom: str | None = None
    doom_ago_s: float = 0.0
    fenced_s: float | None = None

    @property
    def up(self) -> bool:
        """Whether it can be given a rank."""
        return bool(self.addresses) and not (self.ended or self.dying) and self.doom is None


@dataclass(frozen=True)
class Node:
    """One agent. `slots` is how many members it has room for; times are of the conductor's clock:
    when it was last heard, and when any of its members last got on."""

    slots: int
    alive: bool = True
    linked: bool = True
    heard_s: float = 0.0
    progress_s: float = 0.0
    told: bool = False  # whether an alert tells of this silence
    revivals: int = 0
    revived_s: float = 0.0
    gone_s: tuple[float, ...] = ()  # when its agents died or were given up, in the last hour
    banned: bool = False  # not used again


@dataclass(frozen=True)
class Loss:
    """A rank without a member. `fault_s` is when it went wrong and `seen_s` when that was known,
    both of the conductor's clock."""

    rank: int
    member: int
    cause: str
    step: int
    fault_s: float
    seen_s: float


@dataclass(frozen=True)
class Rules:
    """What stays as it is all through a run."""

    spares: int
    on_no_spare: Literal["shrink", "wait"]
    max_takeovers: int  # in an hour
    shapes: Shapes
    keeping: Callable[[Sequence[int]], Keeping]  # who keeps whose state, by the node of each rank
    shadow: bool = False  # spares hold the state of ranks
    mirrored: bool = False  # other ranks do, wherever they are
    same_loss: int = 3  # so many losses of one rank at one step end the run
    max_flaps: int = 5  # so many losses of one node in an hour have it used no more
    settle_s: float = 0.5  # to write logs when a run has failed
    kill_s: float = 1.0  # to be gone after SIGKILL


@dataclass(frozen=True)
class Relayout:
    """Another layout, of `world` ranks, `shapes` and `keeping` (see `Rules`); `before` and `after`
    are what people call the old and the new one.

    All save their state in memory (`saving`), and those that have (`held`) wait; then all begin
    anew from it.
    """

    world: int
    shapes: Shapes
    keeping: Callable[[Sequence[int]], Keeping]
    before: str
    after: str
    saving: bool = False
    held: frozenset[int] = frozenset()


@dataclass(frozen=True)
class State:
    """A run as its conductor sees it. `table` is the member of each rank."""

    rules: Rules
    limits: Limits
    table: tuple[int, ...]
    members: Mapping[int, Member]
    nodes: Mapping[int, Node]
    stage: Stage = Stage.FORMING
    epoch: int = 0
    shadows: Mapping[int, int] = field(
        default_factory=dict
    )  # the spare of each rank, if it has one
    epoch_floor: int = 0  # no conductor gives an epoch that an earlier one has given
    member_floor: int = 0  # nor a number of a member
    executing: Mapping[int, int] = field(default_factory=dict)  # last step done, by member
    returned: frozenset[int] = frozenset()
    losses: tuple[Loss, ...] = ()  # not yet made good
    history: tuple[tuple[float, int, int], ...] = ()  # time, rank and step of all losses
    takeovers: tuple[float, ...] = ()  # when they began
    launches: tuple[float, ...] = ()
    deadline_s: float | None = None
    step: int = 0  # the highest that any rank has begun
    wanted: int | None = None  # replicas that were asked for
    resized_from: int | None = None  # replicas before the table that is out
    resize_s: float = 0.0  # when that was decided
    goal: int | None = None  # replicas before the run shrank for want of chips
    relayout: Relayout | None = None  # that was asked for
    relaid: Relayout | None = None  # that the table which is out begins
    table_void: bool = False  # the table that is out leads nowhere: it is given out anew
    slow_links: frozenset[tuple[int, int]] = frozenset()  # by their two nodes
    cut_links: Mapping[tuple[int, int], float] = field(default_factory=dict)  # and since when
    asked_s: float = float("-inf")  # when agents were asked which nodes they reach
    reached: Mapping[int, frozenset[int]] = field(default_factory=dict)  # by node, whom it does not
    told_links: frozenset[tuple[int, int]] = frozenset()  # that an alert has told of
    advised: frozenset[tuple[int, int]] = frozenset()  # that nothing can be done about
    moved_step: int = -2  # when a rank left a slow link
    stop_asked: bool = False
    deaths: tuple[Exit, ...] = ()
    quarantined: frozenset[int] = frozenset()  # members whose chips are not used again
    disputed: bool = False  # the step under way has to be done again by the same members
    failure: str | None = None

    @property
    def next_member(self) -> int:
        """The number of the next member to be launched."""
        return max(max(self.members, default=-1) + 1, self.member_floor)

    @property
    def chips(self) -> int:
        """How many members could run at once, if all nodes were there."""
        slots = sum(node.slots for node in self.nodes.values() if not node.banned)
        return slots - sum(
            not self.nodes[self.members[number].node].banned for number in self.quarantined
        )

    def living(self) -> list[int]:
        """Members that are not known to be dead."""
        return [number for number, member in self.members.items() if not member.ended]


@dataclass(frozen=True)
class Up:
    """A member can be reached."""

    member: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Ready:
    """A spare could take over now."""

    member: int


@dataclass(frozen=True)
class Executing:
    """A member has joined the table of `epoch` and runs again; `step` is the last one done."""

    member: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Begun:
    """Some rank begins `step`."""

    step: int


@dataclass(frozen=True)
class Ended:
    """A member is dead; `ago_s` is how long, and `cause` says why in a few words."""

    member: int
    exit: Exit
    cause: str
    ago_s: float = 0.0


@dataclass(frozen=True)
class Dying:
    """The kernel has begun to end a member: it will run no code any more. `Ended` follows."""

    member: int
    ago_s: float = 0.0


@dataclass(frozen=True)
class Condemned:
    """There is evidence that a member will do nothing more, since `ago_s`."""

    member: int
    cause: str
    ago_s: float


@dataclass(frozen=True)
class Corrupt:
    """A member holds or computes other numbers than it should: `cause` says how that is known."""

    member: int
    cause: str


@dataclass(frozen=True)
class Disputed:
    """Members of `epoch` found other numbers than each other, and it is not known whose are right;
    `redo`: doing the step again may tell, else nothing can. `what` says so to the user."""

    epoch: int
    what: str
    redo: bool


@dataclass(frozen=True)
class NodeUp:
    """An agent has come, or come back; `living` are its members.

    `fresh`: another process than the last agent of that node, whose members died with it.
    """

    node: int
    slots: int
    living: frozenset[int]
    fresh: bool = False


@dataclass(frozen=True)
class NodeGone:
    """An agent is dead, and its members with it."""

    node: int
    cause: str
    ago_s: float = 0.0


@dataclass(frozen=True)
class Unlinked:
    """The connection to an agent has ended, which says nothing about the agent."""

    node: int


@dataclass(frozen=True)
class Heard:
    """An agent was heard; `progressed`: some member of it got on since the last time."""

    node: int
    progressed: bool


@dataclass(frozen=True)
class ResizeAsked:
    """The user wants so many replicas."""

    dp_replicate: int


@dataclass(frozen=True)
class RelayoutAsked:
    """The user wants another layout."""

    relayout: Relayout


@dataclass(frozen=True)
class Held:
    """A member has saved its part of the state, under the table of `epoch`, and waits; or could
    not, for `error`."""

    member: int
    epoch: int
    error: str | None = None


@dataclass(frozen=True)
class TableLost:
    """Of what the table that is out begins nobody knows any more: it is given out anew."""


@dataclass(frozen=True)
class StopAsked:
    """The user asked for the run to stop, once more."""


@dataclass(frozen=True)
class LinksSeen:
    """What members measure: the links that are slow, and those that no path leads over, now."""

    slow: tuple[SlowLink, ...]
    cut: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Tick:
    """Time has passed. All that came before `heard_until_s` has been heard; None: all that came. A
    conductor that was kept from running has heard nobody, which says nothing about them."""

    heard_until_s: float | None = None


Event = (
    Up
    | Ready
    | Executing
    | Begun
    | Ended
    | Dying
    | Condemned
    | Corrupt
    | Disputed
    | NodeUp
    | NodeGone
    | Unlinked
    | Heard
    | ResizeAsked
    | RelayoutAsked
    | Held
    | TableLost
    | StopAsked
    | LinksSeen
    | Reached
    | Limits
    | Tick
)
