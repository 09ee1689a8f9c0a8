"""Reading run directories: whole, young, torn, and gone back to a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from watch_runs import (
    EXPERTS,
    evaluated,
    event,
    expert_load,
    experts_moved,
    job_text,
    metric,
    plan_of,
    started,
    write_run,
)

from meshwright.base.errors import InputError
from meshwright.base.events import Kind
from meshwright.plan.layout import Layout
from meshwright.watch.history import read_run

ONE = Layout()


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    history = read_run(write_run(tmp_path, steps=40))
    assert [m.step for m in history.metrics] == list(range(1, 41))
    assert [e.step for e in history.evaluations] == [20, 40]
    assert history.plan is not None
    assert [place.rank for place in history.plan.ranks] == list(range(8))
    assert {p.rank for p in history.profiles} == set(range(8))
    assert history.unreadable_lines == 0


def test_a_young_run_has_only_its_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(job_text(ONE, 10))
    history = read_run(tmp_path)
    assert history.plan is None
    assert (history.events, history.metrics, history.evaluations) == ((), (), ())


def test_a_half_written_last_line_is_no_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    whole = json.dumps(metric(4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(whole[: len(whole) // 2])
    history = read_run(tmp_path)
    assert [m.step for m in history.metrics] == [1, 2, 3]
    assert history.unreadable_lines == 0


def test_lines_that_cannot_be_read_are_counted_and_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    bad = ['{"step": 4, "lo', "[]", json.dumps({"loss": 3.0}), json.dumps(metric(5, loss="much"))]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*bad, json.dumps(metric(6))]) + "\n")
    history = read_run(tmp_path)
    assert [m.step for m in history.metrics] == [1, 2, 3, 6]
    assert history.unreadable_lines == len(bad)


def test_a_later_incarnation_wins_and_what_it_lost_is_gone(tmp_path: Path) -> None:
    lines = [metric(step, loss=9.0) for step in range(1, 8)]
    lines += [metric(step, loss=1.0) for step in range(4, 6)]
    events = [
        started(0, ONE),
        evaluated(1, 4, 9.0),
        evaluated(2, 6, 9.0),
        started(3, ONE, resumed_from=3),
        evaluated(4, 4, 1.0),
    ]
    history = read_run(write_run(tmp_path, layout=ONE, metrics=lines, events=events))
    assert [(m.step, m.loss) for m in history.metrics] == [
        *((step, 9.0) for step in (1, 2, 3)),
        *((step, 1.0) for step in (4, 5)),
    ]
    assert [(e.step, e.loss) for e in history.evaluations] == [(4, 1.0)]


@pytest.mark.parametrize("written", ["NaN", "null"])
def test_a_loss_that_is_not_a_number_is_nan(tmp_path: Path, written: str) -> None:
    write_run(tmp_path, steps=2)
    line = json.dumps(metric(3, loss="LOSS", mfu="LOSS")).replace('"LOSS"', written)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    last = read_run(tmp_path).metrics[-1]
    assert last.step == 3
    assert math.isnan(last.loss) and math.isnan(last.mfu)


def test_an_evaluation_needs_no_reference_models(tmp_path: Path) -> None:
    bare = event(Kind.EVALUATED, 1, step=1, loss=3.0, tokens=10)
    write_run(tmp_path, layout=ONE, events=[started(0, ONE), bare])
    assert read_run(tmp_path).evaluations[0].bigram_loss is None


def test_what_a_resumed_run_undid_is_not_told_of_experts_and_skipped_steps(tmp_path: Path) -> None:
    def skipped(seq: int, step: int) -> dict[str, Any]:
        return event(Kind.STEP_SKIPPED, seq, rank=0, step=step, loss_scale=1024.0)

    events = [
        started(0, ONE),
        skipped(1, 3),
        skipped(2, 15),
        *(expert_load(3, step, layer) for step in (10, 20) for layer in (0, 1)),
        experts_moved(4, 9, 1),
        experts_moved(5, 18, 1),
        started(6, ONE, resumed_from=10),
        expert_load(7, 20, 1, imbalance=3.0),
    ]
    history = read_run(write_run(tmp_path, layout=ONE, events=events, model=EXPERTS))
    assert history.skipped_steps == (3,)
    loads = [(load.step, load.layer, load.imbalance) for load in history.expert_loads]
    assert loads == [(10, 0, 1.6), (10, 1, 1.6), (20, 1, 3.0)]
    assert [move.step for move in history.expert_moves] == [9]
    assert history.expert_loads[0].counts[5] == 200


def test_loads_moves_and_skips_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    events = [
        expert_load(1, 10, 0, imbalance="much"),
        experts_moved(2, 10, 0, moved=None),
        event(Kind.STEP_SKIPPED, 3, rank=0, step="x", loss_scale=2.0),
    ]
    history = read_run(write_run(tmp_path, layout=ONE, events=events, model=EXPERTS))
    assert history.unreadable_lines == 3
    assert (history.expert_loads, history.expert_moves, history.skipped_steps) == ((), (), ())


def test_older_lines_have_no_router_loss_and_no_compression(tmp_path: Path) -> None:
    history = read_run(write_run(tmp_path, steps=3))
    assert [m.router_loss for m in history.metrics] == [0.0] * 3
    assert {p.grad_plain_bytes for p in history.profiles} == {0.0}
    lines = [metric(1, router_loss=0.25), metric(2, router_loss=None)]
    newer = read_run(write_run(tmp_path, metrics=lines)).metrics
    assert newer[0].router_loss == 0.25 and math.isnan(newer[1].router_loss)


def test_a_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no job\.toml"):
        read_run(tmp_path)


def test_a_broken_plan_is_refused_with_its_key(tmp_path: Path) -> None:
    plan = plan_of(ONE)
    del plan["ranks"][0]["chip"]
    with pytest.raises(InputError, match=r"plan\.json: ranks\.0\.chip"):
        read_run(write_run(tmp_path, layout=ONE, plan=plan))
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(InputError, match=r"plan\.json: not valid JSON"):
        read_run(tmp_path)
