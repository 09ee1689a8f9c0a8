"""Random schedules of losses: whatever dies and whenever, the run ends with the bits of one without
faults. A few here; `make chaos` plays hundreds."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from chaos_orchestra import Orchestra, Said
from test_chaos_members import LAYOUTS, STEPS, stage, tokens  # noqa: F401 (fixtures)

from meshwright.base.events import Kind
from meshwright.plan.job import Job
from meshwright.plan.resilience import Redundancy, keeping

SCHEDULES = 240 if os.environ.get("CHAOS") == "all" else 4
PHASES = ("data", "forward", "backward", "reduce", "vote", "optimizer", "mirror", "checkpoint")
_KINDS: tuple[Redundancy, ...] = ("auto", "mirror", "shadow", "parity")
SURVIVORS = [name for name in LAYOUTS if name not in ("alone", "machines")]


def _victims(job: dict[str, Any], kind: Redundancy, dice: random.Random) -> list[int]:
    """Up to three ranks of which none is the only one that keeps another's state."""
    layout = Job.model_validate(job).layout
    kept = keeping(layout, kind, bool(job["model"]["n_experts"]), shadowed=True)
    chosen: list[int] = []
    for rank in dice.sample(range(layout.world), min(layout.world, dice.randrange(1, 4))):
        near = {*kept.twins[rank], *kept.group_of(rank), kept.keepers.get(rank, rank)}
        near |= set(kept.wards(rank))
        if not near.intersection(chosen):
            chosen.append(rank)
    return chosen


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_losses_change_no_bit(stage: Any, seed: int) -> None:  # noqa: F811
    dice = random.Random(seed)
    name = dice.choice(SURVIVORS)
    here, plain = stage(name)
    kind: Redundancy = dice.choice(_KINDS)
    job = {**here.args["job"], "resilience": {**here.args["job"]["resilience"], "redundancy": kind}}
    here = replace(here, args={**here.args, "job": job})
    victims = _victims(job, kind, dice)
    armed, timed = victims[: dice.randrange(len(victims) + 1)], []
    faults = [
        {
            "member": member,
            "step": 2 + 2 * i + dice.randrange(2),
            "phase": dice.choice(PHASES),
            "times": dice.choice((1, 1, 1, 2)),
            "kind": dice.choice(("kill", "segfault")),
        }
        for i, member in enumerate(armed)
    ]
    for member in victims[len(armed) :]:
        timed.append((3 + dice.randrange(STEPS - 4), dice.random() * 0.2, member))

    def strike(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] != Kind.PROGRESS or any(t.done_s == 0 for t in orchestra.takeovers):
            return
        for moment in [m for m in timed if m[0] <= said["step"]]:
            timed.remove(moment)
            time.sleep(moment[1])
            if orchestra.players[moment[2]].alive:
                orchestra.kill(moment[2])

    ended, _ = here.play(faults, spares=len(victims), on_said=strike)
    assert ended == plain, f"{name}, {kind}, {faults}, {victims}"
