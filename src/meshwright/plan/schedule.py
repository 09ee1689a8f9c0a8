"""Pipeline schedules as data: what each rank does, in which order.

The trainer executes these lists; `plan/timeline.py` times the very same ones.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from meshwright.base.errors import ConfigError
from meshwright.plan.layout import V_SCHEDULES, Schedule

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Orders = list[list["Action"]]


@dataclass(frozen=True)
class Action:
    """One micro-batch on one virtual stage. `backward` is `backward_input` (whose result the stage
    before waits for) and `backward_weight` (for which nobody waits) in one."""

    kind: Kind
    stage: int
    micro_batch: int


class _Step(NamedTuple):
    """An action whose micro-batch follows from what came before."""

    kind: Kind
    stage: int


def rank_of(stage: int, schedule: Schedule, pp: int) -> int:
    """Pipeline rank of a virtual stage: round and round, or for V schedules there and back."""
    if schedule in V_SCHEDULES and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def stages_of(rank: int, schedule: Schedule, pp: int, chunks: int) -> list[int]:
    """Virtual stages of a rank, ascending: its chunk 0, 1, ..."""
    return [stage for stage in range(pp * chunks) if rank_of(stage, schedule, pp) == rank]


def needs(action: Action, stages: int) -> list[Action]:
    """What must have ended, as `result` names it, before `action` can begin."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    if action.kind == "backward_weight":
        return [Action("backward_input", stage, micro_batch)]
    own = Action("forward", stage, micro_batch)
    return [own, Action("backward_input", stage + 1, micro_batch)][: 1 + (stage + 1 < stages)]


def result(action: Action) -> Action:
    """A whole backward gives the stage before what its input part gives."""
    return replace(action, kind="backward_input") if action.kind == "backward" else action


def build(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> Orders:
    """What each of `pp` ranks does in a training step. Any number of micro-batches >= 1 works.

    An order is free of deadlock where sends do not block and receives are posted in the order of
    the sender. Raises ConfigError where `chunks` is not 1 for gpipe and 1f1b, 2 for a V.
    """
    wanted = {"interleaved": chunks, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    if chunks != wanted:
        raise ConfigError(
            "layout.vpp", chunks, f"a rank of {schedule} has {wanted}; use interleaved"
        )
    match schedule:
        case "gpipe":
            return [_gpipe(rank, micro_batches) for rank in range(pp)]
        case "1f1b":
            return [_one_f_one_b(rank, pp, micro_batches) for rank in range(pp)]
        case "interleaved":
            return [_interleaved(rank, pp, chunks, micro_batches) for rank in range(pp)]
        case "zbv":
            return _zero_bubble_v(pp, micro_batches)
        case "dualpipev":
            return [_dual_pipe_v(rank, pp, micro_batches) for rank in range(pp)]


def forwards_only(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> Orders:
    """What each rank does in an evaluation, on the same placement of stages."""
    if schedule in V_SCHEDULES:
        return [_there_and_back(rank, pp, micro_batches) for rank in range(pp)]
    return [
        [Action("forward", chunk * pp + rank, m) for chunk, m in _rounds(pp, chunks, micro_batches)]
        for rank in range(pp)
    ]


def _gpipe(rank: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards. Source: arXiv 1811.06965."""
    kinds: tuple[Kind, ...] = ("forward", "backward")
    return [Action(kind, rank, m) for kind in kinds for m in range(micro_batches)]


def _one_f_one_b(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """1F1B: a rank runs ahead by the ranks after it, then alternates.

    At most `pp - rank` micro-batches are in flight. With one rank this is plain gradient
    accumulation. Source: PipeDream-Flush, arXiv 2006.09503.
    """
    forwards = [Action("forward", rank, m) for m in range(micro_batches)]
    backwards = [Action("backward", rank, m) for m in range(micro_batches)]
    return _alternate(forwards, backwards, ahead=pp - rank - 1)


def _alternate(first: list[Action], then: list[Action], ahead: int) -> list[Action]:
    """`ahead` of the first kind, then one of each in turn, then what is left of the second."""
    order = first[:ahead]
    for pair in zip(first[ahead:], then, strict=False):
        order += pair
    return order + then[max(0, len(first) - ahead) :]


def _rounds(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch): `pp` micro-batches go through every chunk before the next `pp` do."""
    return [
        (chunk, micro_batch)
        for begin in range(0, micro_batches, pp)
        for chunk in range(chunks)
        for micro_batch in range(begin, min(begin + pp, micro_batches))
    ]


def _interleaved(rank: int, pp: int, chunks: int, micro_batches: int) -> list[Action]:
    """1F1B over several chunks a rank: the bubble shrinks by `chunks`. Source: arXiv 2104.04473.

    It needs whole rounds of `pp` micro-batches: what lacks to the last round is left out of it.
    """
    if chunks == 1:
        return _one_f_one_b(rank, pp, micro_batches)
    rounds = _rounds(pp, chunks, -(-micro_batches // pp) * pp)
    forwards = [Action("forward", chunk * pp + rank, m) for chunk, m in rounds]
    backwards = [Action("backward", (chunks - 1 - chunk) * pp + rank, m) for chunk, m in rounds]
    ahead = 2 * (pp - rank - 1) + (chunks - 1) * pp
    return _existing(_alternate(forwards, backwards, ahead), micro_batches)


def _existing(order: list[Action], micro_batches: int) -> list[Action]:
    """Without the micro-batches that do not exist; leaving out keeps an order valid."""
    return [action for action in order if action.micro_batch < micro_batches]


def _there_and_back(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Forwards of a V: the way there runs ahead until the first micro-batch is back."""
    there = [Action("forward", rank, m) for m in range(micro_batches)]
    back = [Action("forward", 2 * pp - 1 - rank, m) for m in range(micro_batches)]
    return _alternate(there, back, ahead=2 * (pp - rank) - 1)


def _zero_bubble_v(pp: int, micro_batches: int) -> Orders:
    """ZB-V (arXiv 2401.10241), found by a list scheduler in which every action takes one tick.

    In each tick a rank does the most urgent thing that is ready. At most 2 x pp activations of half
    a rank are in flight, as many bytes as on the first rank of 1F1B.
    """
    orders: Orders = [[] for _ in range(pp)]
    done: Counter[tuple[Kind, int]] = Counter()
    while done.total() < 6 * micro_batches * pp:
        chosen = [_most_urgent(rank, pp, micro_batches, done) for rank in range(pp)]
        for order, action in zip(orders, chosen, strict=True):
            if action is not None:
                order.append(action)
                done[action.kind, action.stage] += 1
    return orders


def _most_urgent(
    rank: int, pp: int, micro_batches: int, done: Counter[tuple[Kind, int]]
) -> Action | None:
    """The next action of `rank` where so many of each kind are `done`; None: it must wait.

    The way there runs ahead until the first micro-batch is back, and leaves a place free, so that
    the oldest micro-batch can always come back. Forwards go first: of all orders of urgency this
    one loses least where the three parts are not of the same length.
    """
    there, back = rank, 2 * pp - 1 - rank
    ahead = done["forward", there] - done["forward", back]
    held = sum(done["forward", s] - done["backward_weight", s] for s in (there, back))
    urgent: list[tuple[Kind, int, bool]] = [
        ("forward", there, held + 1 < 2 * pp and ahead + 1 < 2 * (pp - rank)),
        ("forward", back, held < 2 * pp),
        ("backward_input", there, True),
        ("backward_input", back, True),
        ("backward_weight", there, True),
        ("backward_weight", back, True),
    ]
    for kind, stage, fits in urgent:
        action = Action(kind, stage, done[kind, stage])
        before = needs(action, 2 * pp)
        if (
            fits
            and action.micro_batch < micro_batches
            and all(done[need.kind, need.stage] > need.micro_batch for need in before)
        ):
            return action
    return None


def _dual_pipe_v(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """DualPipe cut in half (arXiv 2412.19437 and the notes that DeepSeek published with it).

    Eight phases, made for 2 x pp micro-batches or more; what lacks to these is left out. A backward
    is split only where ranks wait for its input part: in phase 3, while the pipeline still fills,
    and from the middle of phase 6, while it drains.
    """
    there, back, after = rank, 2 * pp - 1 - rank, pp - rank - 1
    steady = max(micro_batches - 2 * pp, 0) + rank + 1
    forward_there, forward_back = _Step("forward", there), _Step("forward", back)
    whole_there, whole_back = _Step("backward", there), _Step("backward", back)
    input_there, input_back = _Step("backward_input", there), _Step("backward_input", back)
    owed = _Step("backward_weight", there)
    steps = 2 * after * [forward_there]
    steps += (rank + 1) * [forward_there, forward_back]
    steps += after * [input_back, owed, forward_back]
    steps += steady * [forward_there, whole_back, forward_back, whole_there]
    steps += after * [whole_back, forward_back, whole_there]
    steps += ((rank + 1) * [whole_back, whole_there])[: rank + 1]
    steps += ((rank + 1) * [input_back, input_there])[rank + 1 :]
    steps += after * [owed, input_there]
    steps += (rank + 1) * [owed]
    return _existing(_numbered(steps), micro_batches)


def _numbered(steps: list[_Step]) -> list[Action]:
    """Each pass of a stage takes its micro-batches in turn; a `backward_weight` takes the oldest
    `backward_input` whose weights are owed, on either stage."""
    passed: Counter[tuple[bool, int]] = Counter()
    owed: deque[Action] = deque()
    actions = []
    for kind, stage in steps:
        if kind == "backward_weight":
            actions.append(replace(owed.popleft(), kind=kind))
            continue
        direction = kind == "forward", stage
        actions.append(Action(kind, stage, passed[direction]))
        passed[direction] += 1
        if kind == "backward_input":
            owed.append(actions[-1])
    return actions
