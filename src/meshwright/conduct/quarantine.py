"""What is not used again, as a run's own record tells a later conductor: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.members import Member, State


@dataclass(frozen=True)
class GivenUp:
    """The chips of these members, each with its node, and these whole nodes; `gone_ts` is when
    other nodes were lost and came back, in seconds of the wall clock."""

    chips: Mapping[int, int]
    nodes: frozenset[int]
    gone_ts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


def given_up(events: Iterable[Mapping[str, Any]]) -> GivenUp:
    """What was given up in the incarnation that is under way."""
    chips: dict[int, int] = {}
    nodes: set[int] = set()
    gone_ts: dict[int, tuple[float, ...]] = {}
    for event in events:
        if event["kind"] == Kind.RUN_STARTED and not event.get("adopted"):
            chips.clear()  # members are numbered anew, and nodes may have been repaired
            nodes.clear()
            gone_ts.clear()
        elif event["kind"] == Kind.NODE_BACK:  # one that is not back is lost anew, and counted then
            gone_ts[event["node"]] = (*gone_ts.get(event["node"], ()), event["ts"])
        elif event["kind"] != Kind.QUARANTINED:
            continue
        elif event["member"] is None:
            nodes.add(event["node"])
        else:
            chips[event["member"]] = event["node"]
    return GivenUp(chips, frozenset(nodes), gone_ts)


def keep_out(state: State, found: GivenUp, epoch_s: float) -> State:
    """`state` with all that was given up known; `epoch_s` is what the conductor's clock showed at
    the time from which `gone_ts` counts."""
    chips = {number: Member(node, ended=True) for number, node in found.chips.items()}
    nodes = {
        number: replace(
            node,
            banned=node.banned or number in found.nodes,
            alive=node.alive and number not in found.nodes,
            gone_s=tuple(epoch_s + ts for ts in found.gone_ts.get(number, ())),
        )
        for number, node in state.nodes.items()
    }
    members = {**chips, **state.members}
    return replace(state, members=members, quarantined=frozenset(chips), nodes=nodes)
