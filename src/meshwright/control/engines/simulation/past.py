"""What happens to a simulated cluster from outside, in order, in simulated seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from meshwright.control.engines.engine import ClusterOrder, Fault
from meshwright.control.engines.simulation.harm import REBOOT_CLEARS, Span
from meshwright.control.engines.simulation.work import Work
from meshwright.control.words import FaultKind

SAME_S = 30.0  # a replacement that the order and the deeds both tell of, that far apart, is one


@dataclass(frozen=True)
class Begun:
    """An attempt that was started; `chips` by number, those of ranks first. `resumed`: the step it
    goes on from."""

    job: str
    attempt: int
    chips: tuple[int, ...]
    ranks: int
    work: Work
    resumed: int
    since_s: float

    @property
    def key(self) -> tuple[str, int]:
        """Of one attempt."""
        return self.job, self.attempt


@dataclass(frozen=True)
class Reset:
    """A node begins anew, as another machine if `replaced` is the number of that."""

    node: int
    replaced: int | None


@dataclass(frozen=True)
class Stop:
    """An attempt shall end."""

    job: str
    attempt: int
    hard: bool


@dataclass(frozen=True)
class Change:
    """Something that happens at `at_s`. A None is the begin or the end of a fault."""

    at_s: float
    what: Begun | Reset | Stop | None
    span: Span | None = None


@dataclass(frozen=True)
class Past:
    """All of it, by time, and the stretches of faults."""

    changes: tuple[Change, ...]
    spans: tuple[Span, ...]


def past(order: ClusterOrder, deeds: Sequence[Mapping[str, Any]]) -> Past:
    """What `order` and `deeds` tell together."""

    def simulated(at_s: float) -> float:
        return max(0.0, (at_s - order.created_s) * order.spec.speed)

    resets = _resets(order, deeds)
    spans = [_span(order, fault, simulated) for fault in _faults(order, deeds)]
    changes: list[Change] = []
    for reset_s, ready_s, reset in resets:
        begun_s = simulated(reset_s)
        spans = [_cleared(span, order, reset, begun_s) for span in spans]
        outage = Fault("", FaultKind.NODE_DOWN, reset.node, None, 1.0, reset_s, ready_s)
        spans.append(_span(order, outage, simulated))
        changes.append(Change(begun_s, reset))
    spans = [span for span in spans if span.since_s < span.until_s]
    for span in spans:
        # Whatever its end turns out to be, how it began stays the same change.
        changes.append(Change(span.since_s, None, replace(span, until_s=inf)))
        if span.until_s < inf:
            changes.append(Change(span.until_s, None, span))
    changes += [one for one in _runs(deeds, simulated) if not _beyond(one, order)]
    return Past(tuple(sorted(changes, key=lambda one: one.at_s)), tuple(spans))


def _beyond(change: Change, order: ClusterOrder) -> bool:
    """Whether a run had chips that the cluster, made smaller, has no more."""
    return isinstance(change.what, Begun) and max(change.what.chips) >= order.chips


def chips_of(order: ClusterOrder, node: int) -> int:
    """How many chips are on a node: the last one may have fewer."""
    return max(0, min(order.chips_per_node, order.chips - node * order.chips_per_node))


def _faults(order: ClusterOrder, deeds: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """All there have been. An end that anybody knows of counts."""
    found: dict[str, Fault] = {}
    for deed in deeds:
        if deed["deed"] == "fault":
            fields = {key: value for key, value in deed.items() if key != "deed"}
            found[deed["id"]] = Fault(**{**fields, "kind": FaultKind(deed["kind"])})
    for fault in order.faults:
        found[fault.id] = fault
    for deed in deeds:
        if deed["deed"] == "clear" and deed["id"] in found:
            fault = found[deed["id"]]
            until_s = inf if fault.until_s is None else fault.until_s
            found[fault.id] = replace(fault, until_s=min(until_s, deed["at_s"]))
    return list(found.values())


def _span(order: ClusterOrder, fault: Fault, simulated: Any) -> Span:
    first = fault.node * order.chips_per_node
    last = first + chips_of(order, fault.node)
    if fault.chip is not None and fault.kind not in (
        FaultKind.NODE_DOWN,
        FaultKind.NODE_UNREACHABLE,
    ):
        one = first + fault.chip  # none at all of a chip that is not there
        first, last = min(one, last), min(one + 1, last)
    until_s = inf if fault.until_s is None else simulated(fault.until_s)
    since_s = simulated(fault.since_s)
    return Span(fault.id, fault.kind, first, last, fault.severity, since_s, until_s)


def _cleared(span: Span, order: ClusterOrder, reset: Reset, at_s: float) -> Span:
    here = span.first // order.chips_per_node == reset.node
    clears = reset.replaced is not None or span.kind in REBOOT_CLEARS
    if here and clears and span.id and span.since_s <= at_s < span.until_s:
        return replace(span, until_s=at_s)
    return span


def _resets(
    order: ClusterOrder, deeds: Iterable[Mapping[str, Any]]
) -> list[tuple[float, float, Reset]]:
    """When each node began anew, and when it was there again; by time."""
    told = [(d["node"], d["at_s"], d["ready_s"], d["replaced"]) for d in deeds if "ready_s" in d]
    for node, since_s in order.replaced_s.items():
        known = [at_s for number, at_s, _, fresh in told if number == node and fresh]
        if since_s > order.created_s and not any(abs(at - since_s) < SAME_S for at in known):
            told.append((node, since_s, since_s, True))
    count: dict[int, int] = {}
    found = []
    for node, at_s, ready_s, fresh in sorted(told, key=lambda one: one[1]):
        count[node] = count.get(node, 0) + bool(fresh)
        found.append((at_s, ready_s, Reset(node, count[node] if fresh else None)))
    return found


def _runs(deeds: Iterable[Mapping[str, Any]], simulated: Any) -> list[Change]:
    """Starts and stops; a later attempt ends an earlier one, and so does the end of all."""
    found: list[Change] = []
    begun: list[Begun] = []
    for deed in deeds:
        if deed["deed"] == "run":
            one = Begun(
                job=deed["job"],
                attempt=deed["attempt"],
                chips=tuple(deed["chips"]),
                ranks=deed["ranks"],
                work=Work.read(deed["work"]),
                resumed=deed["resumed"],
                since_s=simulated(deed["started_s"]),
            )
            before = [other for other in begun if other.job == one.job]
            found += [Change(one.since_s, Stop(*other.key, hard=True)) for other in before]
            begun.append(one)
            found.append(Change(one.since_s, one))
        elif deed["deed"] == "stop":
            stop = Stop(deed["job"], deed["attempt"], deed["hard"])
            found.append(Change(simulated(deed["at_s"]), stop))
        elif deed["deed"] == "end":
            at_s = simulated(deed["at_s"])
            found += [Change(at_s, Stop(*other.key, hard=True)) for other in begun]
    return found
