"""Which faults a drill brings about, and what they came to: pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.base.events import Kind
from meshwright.conduct.limits import quantile

PHASES = ("forward", "backward", "reduce", "vote", "optimizer", "mirror", "checkpoint")
_HARMS = ("kill", "segfault", "freeze")
_CUTS = ("cut data", "cut both")  # of a node from all others; "both": from the conductor as well
_PLACES = ("cut link", "kill agent", "kill conductor", *_CUTS)
_TAKE_TWO_NODES = ("kill agent", *_CUTS)
KINDS = (*_HARMS, "slow", "corrupt", *_PLACES)
GAP_STEPS = 10  # between two faults: the next spare gets warm meanwhile
_FIRST_STEP = 4
_EACH_PLACE = 5  # one fault in so many is not of a member
_EXPECT_TAKEOVER = (*_HARMS, "corrupt", "kill agent", *_CUTS)


@dataclass(frozen=True)
class DrillFault:
    """One fault, as `step` is at `phase` (None: at any moment of it). `member` is the victim, or
    None where another is meant: the `node`, or the conductor."""

    kind: str
    step: int
    phase: str | None = None
    member: int | None = None
    node: int | None = None

    @property
    def armed(self) -> dict[str, Any] | None:
        """As a member takes it; None where it comes from outside."""
        if self.member is None or self.phase is None:
            return None
        fields = {"member": self.member, "step": self.step, "phase": self.phase, "kind": self.kind}
        return {**fields, "share": 0.2} if self.kind == "slow" else fields


def plan_faults(
    count: int,
    seed: int,
    world: int,
    nodes: int,
    checkpoint_every: int,
    mirrors: bool,
    kinds: Sequence[str] = KINDS,
) -> list[DrillFault]:
    """`count` faults, `GAP_STEPS` apart. Kinds, phases and victims are drawn so that each comes
    about as often; a member is a victim once, since what took its rank has another number."""
    dice = random.Random(seed)
    harms = [kind for kind in kinds if kind not in _PLACES]
    if nodes == 1 and set(kinds) <= set(_TAKE_TWO_NODES):
        raise ConfigError("--kinds", kinds[0], "takes two nodes; set cluster.nodes = 2")
    places = [
        kind for kind in kinds if kind in _PLACES and (nodes > 1 or kind not in _TAKE_TWO_NODES)
    ]
    phases = [phase for phase in PHASES if mirrors or phase != "mirror"]
    victims = dice.sample(range(world), world)
    moments = [(kind, phase) for phase in phases for kind in harms]
    dice.shuffle(moments)
    dice.shuffle(places)
    places.sort(key=lambda kind: kind in _CUTS)  # after them ranks are elsewhere
    faults: list[DrillFault] = []
    for index in range(count):
        step = _FIRST_STEP + index * GAP_STEPS + dice.randrange(3)
        if places and (not harms or index % _EACH_PLACE == _EACH_PLACE - 1):
            places.append(kind := places.pop(0))
            node = None if kind == "kill conductor" else dice.randrange(nodes)
            faults.append(DrillFault(kind, step, node=node))
            if kind in _CUTS:
                victims.clear()
            continue
        kind, phase = moments[index % len(moments)]
        if phase == "checkpoint":
            step = -(-step // checkpoint_every) * checkpoint_every
        if victims:
            faults.append(DrillFault(kind, step, phase, victims.pop()))
        else:  # who holds the rank by then is hurt from outside
            outside = [harm for harm in harms if harm in _HARMS] or ["kill"]
            faults.append(DrillFault(outside[index % len(outside)], step))
    return sorted(faults, key=lambda fault: fault.step)


def steps_for(count: int) -> int:
    """How many steps a run needs to take so many faults."""
    return _FIRST_STEP + count * GAP_STEPS + GAP_STEPS


@dataclass(frozen=True)
class Found:
    """What came of one fault. Seconds from the fault on: until it was known, until all ranks ran
    again, and until the step in flight was done; None where nothing had to be taken over. `done`
    says what was."""

    kind: str
    step: int
    phase: str | None
    rank: int | None
    detected_s: float | None
    takeover_s: float | None
    next_commit_s: float | None
    lost_steps: int
    survived: bool
    done: str = ""


def account(
    faults: Sequence[DrillFault],
    events: Sequence[Mapping[str, Any]],
    metrics_ts: Mapping[int, float],
) -> list[Found]:
    """What came of each fault, by the events of the run; `metrics_ts` says when a step was done."""
    takeovers = [event for event in events if event["kind"] == Kind.TAKEOVER_DONE]
    lost = [event for event in events if event["kind"] == Kind.RANK_LOST]
    last = max(metrics_ts, default=0)
    found: list[Found] = []
    for index, fault in enumerate(faults):
        # Another rank may say first that it begins the step; none is two steps ahead.
        if fault.kind == "slow":
            found.append(_account_slow(fault, events, metrics_ts))
            continue
        since = fault.step - 1
        until = faults[index + 1].step - 1 if index + 1 < len(faults) else last + 1
        mine = [event for event in takeovers if since <= event["step"] < until]
        ranks = [event["rank"] for event in lost if since <= event["step"] < until]
        done = mine[0] if mine else None
        expected = fault.kind in _EXPECT_TAKEOVER
        found.append(
            Found(
                kind=fault.kind,
                step=fault.step,
                phase=fault.phase,
                rank=ranks[0] if ranks else None,
                detected_s=_detected_s(fault, done, metrics_ts) if done else None,
                takeover_s=done["takeover_s"] if done else None,
                next_commit_s=_next_commit_s(done, metrics_ts) if done else None,
                lost_steps=sum(event["lost_steps"] for event in mine),
                survived=last > fault.step
                and (done is not None or not expected)
                and not (fault.kind in _CUTS and len(mine) > 1),
                done=_what_was_done(fault, done, events),
            )
        )
    return found


def _detected_s(
    fault: DrillFault, done: Mapping[str, Any], metrics_ts: Mapping[int, float]
) -> float:
    """That of a takeover. Of an error of a chip nothing tells when it happened: at most so long
    after the end of the step before."""
    before = metrics_ts.get(fault.step if fault.phase == "checkpoint" else fault.step - 1)
    if fault.kind != "corrupt" or before is None:
        return float(done["detected_s"])
    return max(0.0, float(done["ts"] - done["takeover_s"] - before))


def _account_slow(
    fault: DrillFault, events: Sequence[Mapping[str, Any]], metrics_ts: Mapping[int, float]
) -> Found:
    """A slow rank is named, and keeps its place: the run goes on as fast as it lets it."""
    named = [e for e in events if e["kind"] == Kind.STRAGGLER and e["member"] == fault.member]
    ts = named[0]["ts"] if named else None
    slow_ts = metrics_ts.get(fault.step - 1)
    steps = sum(ts is not None and fault.step <= n and at < ts for n, at in metrics_ts.items())
    return Found(
        kind=fault.kind,
        step=fault.step,
        phase=fault.phase,
        rank=named[0]["rank"] if named else None,
        detected_s=ts - slow_ts if ts is not None and slow_ts is not None else None,
        takeover_s=None,
        next_commit_s=None,
        lost_steps=0,
        survived=bool(named),
        done=f"named a straggler after {steps} steps" if named else "",
    )


def _what_was_done(
    fault: DrillFault,
    takeover: Mapping[str, Any] | None,
    events: Sequence[Mapping[str, Any]],
) -> str:
    if takeover is None:
        return ""
    given_up = {event["member"] for event in events if event["kind"] == Kind.QUARANTINED}
    kept = "its chip is not used again" if fault.member in given_up else ""
    return "; ".join(filter(None, (str(takeover.get("cause") or ""), kept)))


def _next_commit_s(done: Mapping[str, Any], metrics_ts: Mapping[int, float]) -> float | None:
    fault_ts = done["ts"] - done["takeover_s"]
    after = [ts for step, ts in metrics_ts.items() if step >= done["step"] and ts >= fault_ts]
    return min(after) - fault_ts if after else None


def summary(found: Sequence[Found], bit_identical: bool) -> dict[str, Any]:
    """The document of `drill --json`."""
    takeovers = [each.takeover_s for each in found if each.takeover_s is not None]
    commits = [each.next_commit_s for each in found if each.next_commit_s is not None]
    return {
        "faults": [asdict(each) for each in found],
        "takeover_p50_s": median(takeovers) if takeovers else None,
        "takeover_p95_s": quantile(takeovers, 0.95) if takeovers else None,
        "next_commit_p95_s": quantile(commits, 0.95) if commits else None,
        "lost_steps": sum(each.lost_steps for each in found),
        "bit_identical": bit_identical,
    }
