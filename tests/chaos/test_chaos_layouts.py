"""Through changes of the layout the loss is that of the run without any, but for rounding: within a
relative 1e-5 in fp32, for 50 steps and more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_machines import Conducted, Outpost, hired
from test_chaos_members import (  # noqa: F401 (fixtures)
    DENSE,
    LAYOUTS,
    MORE,
    Ended,
    Stage,
    kept_at,
    stage,
    tokens,
)
from test_chaos_nodes import (
    LEASE_S,
    events,
    last_words,
    losses_without_faults,
    steps,
    wait_for,
    without_spares,
)

from meshwright.base.events import Kind
from meshwright.conduct.asking import ask
from meshwright.conduct.rundir import read_lines

FIRST, LONG, CLOSE = 8, 50, 1e-5
# Usual rates for a model of this size, of a warm-up that lasts through all changes: so a step with
# the rate of another one is seen.
RATE = {"lr": 2e-3, "warmup_steps": 400, "min_lr": 1e-4}
for _name, _layout in (
    ("elastic", {"dp_replicate": 2, "micro_batch": 8}),
    ("elastic eight", {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 4}),
):
    LAYOUTS[_name] = DENSE, _layout
    MORE[_name] = {
        "job": {},
        "cluster": {"nodes": 2},
        "resilience": {"longest_stall_s": 3.0},
        "optimizer": RATE,
    }


class OneMachine:
    """Where all nodes are."""

    def enter(self, _machine: int) -> tuple[str, ...]:
        """See `chaos_machines.Cables`."""
        return ()


@pytest.mark.parametrize(
    ("name", "asked", "labels"),
    [
        ("elastic", {"dp_replicate": 1, "tp": 2}, ["dp2", "one process", "tp2"]),
        (
            "elastic eight",
            {"tp": 1, "dp_shard": 2},
            ["dp2xtp2xpp2", "tp2xpp2", "dp2xfsdp2xpp2"],
        ),
    ],
    ids=["two ranks", "eight ranks"],
)
def test_the_loss_is_that_of_the_plan_through_three_changes(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    name: str,
    asked: dict[str, int],
    labels: list[str],
    tmp_path: Path,
) -> None:
    """A node is lost and the run shrinks; the node comes back and it grows; then it is resized."""
    here = without_spares(stage(name)[0])
    run, words = tmp_path / "run", partial(last_words, tmp_path)
    args = {**here.args, **kept_at(tmp_path / "checkpoints"), "faults": []}

    def resized() -> list[dict[str, Any]]:
        return events(run, Kind.RESIZED)

    with ExitStack() as stack:
        stack.enter_context(Conducted(OneMachine(), run, args, hired=True))
        _, lost = stack.enter_context(hired(OneMachine(), run, 2, LEASE_S))
        wait_for(lambda: len(steps(run)) >= FIRST, words)
        lost.kill()
        wait_for(lambda: len(resized()) == 1, words)
        stack.enter_context(Outpost(OneMachine(), run, 1, LEASE_S))
        wait_for(lambda: len(resized()) == 2, words)
        ask(run, {"op": "resize", "layout": asked})
        wait_for(lambda: len(resized()) == 3, words)
        last = max(resized()[0]["step"] + LONG, resized()[2]["step"] + 10)
        wait_for(lambda: steps(run)[-1] >= last, words)
    large, small, other = labels
    changes = [(event["before"], event["after"]) for event in resized()]
    assert changes == [(large, small), (small, large), (large, other)]
    done = steps(run)
    assert done == list(range(1, done[-1] + 1))
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    plain = losses_without_faults(here, done[-1])
    assert losses == pytest.approx({step: plain[step] for step in done}, rel=CLOSE)
