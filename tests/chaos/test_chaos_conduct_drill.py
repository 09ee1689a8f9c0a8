"""`meshwright drill` and `meshwright job`: what they plan, count and refuse; and one drill."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surviving_scene import make_job
from typer.testing import CliRunner

from meshwright.base.errors import ConfigError
from meshwright.base.events import Kind
from meshwright.checkpoint.opening import newest
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.cli.app import app
from meshwright.cli.drill import drill_job, lines, parse_kinds
from meshwright.cli.drill_plan import (
    GAP_STEPS,
    KINDS,
    DrillFault,
    account,
    plan_faults,
    steps_for,
    summary,
)
from meshwright.cli.job import parse_layout

ALL = os.environ.get("CHAOS") == "all"  # `make chaos`
JOB = """
[job]
steps = 10
eval_every = 1000
eval_sequences = 4
[model]
preset = "tiny"
[data]
source = "python-stdlib"
seq_len = 16
global_batch = 4
[layout]
dp_replicate = 2
[cluster]
ref = "local:2"
[checkpoint]
every = 10
[resilience]
redundancy = "auto"
"""


def test_a_plan_draws_all_kinds_and_phases_and_no_victim_twice() -> None:
    faults = plan_faults(25, seed=1, world=16, nodes=4, checkpoint_every=10, mirrors=True)
    assert faults == plan_faults(25, 1, 16, 4, 10, mirrors=True)
    assert faults != plan_faults(25, 2, 16, 4, 10, mirrors=True)
    victims = [fault.member for fault in faults if fault.member is not None]
    assert len(victims) == len(set(victims)) == 16
    assert {fault.kind for fault in faults} == set(KINDS)
    phases = {fault.phase for fault in faults if fault.member is not None}
    assert len(phases) >= 6
    for before, after in pairwise(faults):
        assert after.step > before.step
    assert faults[-1].step < steps_for(25) - GAP_STEPS / 2
    assert all(f.step % 10 == 0 for f in faults if f.phase == "checkpoint")


@pytest.mark.parametrize("kind", ["kill agent", "cut data"])
def test_an_agent_that_is_the_only_one_is_no_victim(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}'.*takes two nodes"):
        plan_faults(1, 0, 4, 1, 10, mirrors=False, kinds=[kind])


def test_after_a_cut_ranks_are_elsewhere_and_no_member_is_a_victim() -> None:
    faults = plan_faults(30, 3, 16, 4, 10, mirrors=False, kinds=["kill", "cut both", "cut link"])
    first = next(i for i, fault in enumerate(faults) if fault.kind == "cut both")
    assert first > 4 and all(fault.member is None for fault in faults[first:])


@pytest.mark.parametrize(("times", "survived"), [(0, False), (1, True), (2, False)])
def test_a_cut_takes_exactly_one_recovery(times: int, survived: bool) -> None:
    done = {"kind": Kind.TAKEOVER_DONE, "detected_s": 0.1, "lost_steps": 0, "takeover_s": 0.2}
    events = [{**done, "ts": 10.0 + i, "step": 4 + i} for i in range(times)]
    [cut] = account([DrillFault("cut data", 4, node=1)], events, {3: 9.0, 4: 11.0, 9: 20.0})
    assert cut.survived is survived


def test_one_node_has_no_agent_to_lose_and_twins_no_mirror() -> None:
    faults = plan_faults(40, 0, 4, 1, 10, mirrors=False)
    assert "kill agent" not in {fault.kind for fault in faults}
    assert "mirror" not in {fault.phase for fault in faults}
    # Once every first member was a victim, faults come from outside.
    assert sum(fault.armed is not None for fault in faults) == 4


def test_what_is_armed() -> None:
    fault = DrillFault("kill", 7, "vote", member=3)
    assert fault.armed == {"member": 3, "step": 7, "phase": "vote", "kind": "kill"}
    assert DrillFault("kill conductor", 7).armed is None


def test_the_account() -> None:
    faults = [DrillFault("kill", 4, "vote", 1), DrillFault("cut link", 14), DrillFault("kill", 24)]
    done: dict[str, Any] = {"kind": Kind.TAKEOVER_DONE, "detected_s": 0.001, "lost_steps": 0}
    events = [
        {"kind": Kind.RANK_LOST, "rank": 1, "step": 4},
        {**done, "ts": 10.05, "takeover_s": 0.05, "step": 4},
    ]
    metrics_ts = {3: 9.9, 4: 10.3, 5: 10.5, 30: 30.0}
    kill, cut, unnoticed = account(faults, events, metrics_ts)
    assert (kill.rank, kill.takeover_s, kill.lost_steps, kill.survived) == (1, 0.05, 0, True)
    assert kill.next_commit_s == pytest.approx(0.3)
    assert (cut.takeover_s, cut.survived) == (None, True)
    assert not unnoticed.survived
    document = summary([kill, cut, unnoticed], bit_identical=True)
    assert document["takeover_p50_s"] == document["takeover_p95_s"] == 0.05
    assert set(document) == {
        "faults",
        "takeover_p50_s",
        "takeover_p95_s",
        "next_commit_p95_s",
        "lost_steps",
        "bit_identical",
    }
    told = lines(document)
    assert told[0].startswith("step 4: kill of rank 1 in vote: detected after 1 ms, taken over")
    assert told[1] == "step 14: cut link: nothing to take over"
    assert told[2] == "step 24: kill: NOT SURVIVED"
    assert "equal, bit for bit" in told[-1]
    assert "NOT EQUAL" in lines({**document, "bit_identical": False})[-1]


def test_the_account_of_errors_and_slowness() -> None:
    faults = [
        DrillFault("corrupt", 4, "vote", 1),
        DrillFault("slow", 14, "data", 2),
        DrillFault("slow", 24, "data", 3),
    ]
    done = {"kind": Kind.TAKEOVER_DONE, "detected_s": 0.0, "lost_steps": 0, "cause": "it changed"}
    events = [
        {"kind": Kind.QUARANTINED, "member": 1},
        {**done, "ts": 10.25, "takeover_s": 0.05, "step": 4},
        {"kind": Kind.STRAGGLER, "member": 2, "rank": 2, "ts": 31.5},
    ]
    metrics_ts = {3: 10.0, **{step: float(step + 16) for step in range(4, 40)}}
    corrupt, slow, unnamed = account(faults, events, metrics_ts)
    assert corrupt.detected_s == pytest.approx(0.2)
    assert corrupt.survived and corrupt.done == "it changed; its chip is not used again"
    assert (slow.rank, slow.detected_s, slow.survived) == (2, 2.5, True)
    assert slow.done == "named a straggler after 2 steps"
    assert not unnamed.survived
    told = lines(summary([corrupt, slow, unnamed], bit_identical=True))
    assert "detected after at most 200 ms" in told[0] and told[0].endswith("is not used again")
    assert told[1].endswith("detected after 2500 ms: named a straggler after 2 steps")
    assert told[2].endswith("slow in data: NOT NAMED")


def test_a_drill_needs_a_run_that_survives() -> None:
    job = make_job(4)
    drilled = drill_job(job, 30)
    assert drilled.job.steps == steps_for(30)
    assert drilled.resilience.max_takeovers > 30
    mortal = job.model_copy(
        update={"resilience": job.resilience.model_copy(update={"redundancy": "none"})}
    )
    with pytest.raises(ConfigError, match=r"resilience.redundancy = 'none'.*set it to 'auto'"):
        drill_job(mortal, 1)


def test_what_is_refused() -> None:
    assert parse_kinds("kill, cut link") == ["kill", "cut link"]
    with pytest.raises(ConfigError, match=r'no such fault; did you mean "freeze"'):
        parse_kinds("frezee")
    with pytest.raises(ConfigError, match="names no fault"):
        parse_kinds(" ,")
    assert parse_layout(["tp = 4", "schedule=gpipe"]) == {"tp": 4, "schedule": "gpipe"}
    for text in ("tp", "tp=", "chips=2"):
        with pytest.raises(ConfigError, match="write it as KEY=VALUE"):
            parse_layout([text])


@pytest.mark.parametrize(
    ("kind", "longest_stall_s"),
    [
        ("cut data", 30.0),
        pytest.param(
            "cut both", 4.0, marks=pytest.mark.skipif(not ALL, reason="waits for a lease")
        ),
    ],
)
def test_a_drill_of_data_links(tmp_path: Path, kind: str, longest_stall_s: float) -> None:
    job = tmp_path / "job.toml"
    nodes = 'ref = "local:2"\nnodes = 2'
    job.write_text(JOB.replace('ref = "local:2"', nodes) + f"longest_stall_s = {longest_stall_s}\n")
    arguments = ["drill", str(job), "--faults", "1", "--kinds", kind, "--json"]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert result.return_value == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert document["bit_identical"] and document["lost_steps"] == 0
    [fault] = document["faults"]
    assert fault["survived"] and fault["takeover_s"] is not None


def test_a_drill_of_a_small_job(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    keep = tmp_path / "kept"
    arguments = ["drill", str(job), "--faults", "2", "--kinds", "kill,kill conductor", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--keep", str(keep)], standalone_mode=False)
    assert result.return_value == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert document["bit_identical"]
    assert document["lost_steps"] == 0
    assert [fault["survived"] for fault in document["faults"]] == [True, True]
    assert document["takeover_p95_s"] is not None
    # It can tell a difference: other weights are not equal.
    from meshwright.cli.drill import weights

    store, last = Store.open(keep / "with" / "checkpoints"), newest(keep / "with" / "checkpoints")
    pieces = {Piece.whole(name, last.shape(name)): last.read(name).ravel() for name in last.names}
    next(iter(pieces.values())).view(np.uint8)[0] ^= 1
    attempt = Attempt(last.step, "other", ranks=1)
    store.write_part(attempt, 0, pieces)
    store.commit(attempt, last.meta)
    assert weights(keep / "with") != weights(keep / "without")
