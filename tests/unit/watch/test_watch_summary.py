"""What a run came to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from watch_runs import (
    EXPERTS,
    START_TS,
    evaluated,
    event,
    expert_load,
    experts_moved,
    metric,
    plan_of,
    profile,
    started,
    write_run,
)

from meshwright.base.events import Kind, RankProfile
from meshwright.plan.layout import Layout
from meshwright.watch.history import Evaluation, read_run
from meshwright.watch.summary import (
    comparison,
    finite_median,
    mean_shares,
    split_by_rank,
    status,
    summary,
    wall_time_s,
)

ONE = Layout()


def rank_profile(rank: int, **changes: Any) -> RankProfile:
    raw = profile(rank, 0, 10, **changes)
    return RankProfile(**{key: raw[key] for key in RankProfile.__dataclass_fields__ if key in raw})


def test_the_split_sums_profiles_and_names_the_rest_other() -> None:
    parts = {"compute_s": 5.0, "comm_wait_s": 2.0, "data_wait_s": 0.5, "optimizer_s": 1.5}
    profiles = [
        rank_profile(1, wall_s=10.0, **parts),
        rank_profile(0),
        rank_profile(1, wall_s=10.0, **parts),
    ]
    splits = split_by_rank(profiles)
    assert [split.rank for split in splits] == [0, 1]
    assert splits[1].steps == 20
    assert splits[1].seconds == (10.0, 4.0, 1.0, 3.0, 2.0)
    assert splits[1].shares == (0.5, 0.2, 0.05, 0.15, 0.1)


def test_parts_that_exceed_the_wall_leave_no_other() -> None:
    (split,) = split_by_rank([rank_profile(0, wall_s=1.0, compute_s=2.0)])
    assert split.other_s == 0.0
    assert sum(split.shares) == pytest.approx(1.0)


def test_shares_of_no_rank_and_of_no_time() -> None:
    assert mean_shares(()) is None
    nothing = dict.fromkeys(
        ("wall_s", "compute_s", "comm_wait_s", "data_wait_s", "optimizer_s"), 0.0
    )
    assert mean_shares(split_by_rank([rank_profile(0, **nothing)])) == (0.0,) * 5


def test_the_median_passes_over_what_is_not_finite() -> None:
    assert finite_median([math.nan, 1.0, math.inf, 3.0]) == 2.0
    assert finite_median([math.nan]) is None


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], "not started"),
        ([Kind.RUN_STARTED, Kind.RANK_READY], "running"),
        ([Kind.RUN_STARTED, Kind.RUN_FINISHED, Kind.MODEL_EXPORTED], "finished"),
        ([Kind.RUN_STARTED, Kind.RANK_LOST, Kind.RUN_FAILED], "failed"),
        ([Kind.RUN_STARTED, Kind.RUN_INTERRUPTED], "interrupted"),
        ([Kind.RUN_STARTED, Kind.RUN_FAILED, Kind.RUN_STARTED], "running"),
    ],
)
def test_status_is_that_of_the_newest_incarnation(kinds: list[Kind], expected: str) -> None:
    assert status([event(kind, seq) for seq, kind in enumerate(kinds)]) == expected


def test_wall_time_sums_incarnations_and_not_the_pause_between() -> None:
    events = [
        started(0, ONE),
        event(Kind.RUN_FAILED, 30, error="x"),
        started(1000, ONE, resumed_from=10),
        event(Kind.RUN_FINISHED, 1020, step=20, wall_s=21.0),
        event(Kind.MODEL_EXPORTED, 1500, path="model"),
    ]
    assert wall_time_s(events) == 51.0


@pytest.mark.parametrize(
    ("loss", "bigram", "unigram", "words"),
    [
        (
            3.0,
            3.6,
            5.1,
            "lower than the bigram model's 3.600 and lower than the unigram model's 5.1",
        ),
        (4.0, 3.6, 5.1, "higher than the bigram model's 3.600 and lower than the unigram"),
        (3.6, 3.6, None, "equal to the bigram model's 3.600, on the same split"),
        (math.nan, 3.6, None, "not comparable with the bigram model's 3.600"),
        (3.0, None, None, "no reference to compare with"),
    ],
)
def test_the_verdict_in_plain_words(
    loss: float, bigram: float | None, unigram: float | None, words: str
) -> None:
    assert comparison(Evaluation(1, loss, 10, bigram, unigram)).startswith(words)


def test_summary_of_a_finished_run(tmp_path: Path) -> None:
    metrics = [metric(step, tokens_per_s=1000.0 * step, mfu=0.1 * step) for step in (1, 2, 3)]
    found = summary(read_run(write_run(tmp_path, steps=3, metrics=metrics)))
    assert found["status"] == "finished" and found["error"] is None
    assert (found["step"], found["steps"], found["ranks"]) == (3, 3, 8)
    assert found["tokens_per_s"] == 2000.0 and found["tokens_per_s_per_chip"] == 250.0
    assert found["mfu"] == pytest.approx(0.2)
    assert found["wall_s"] == 141.5
    assert found["validation"]["loss"] == 3.3 and found["validation"]["bigram_loss"] == 3.6
    assert sum(found["time_split"].values()) == pytest.approx(1.0)
    assert [entry["rank"] for entry in found["time_split_by_rank"]] == list(range(8))
    assert (found["schedule"], found["stage_balance"], found["zero_stage"]) == ("1f1b", 0.97, 0)
    absent = ("router_loss", "gradient_bytes", "expert_load")
    assert [found[key] for key in absent] == [None] * 3 and found["skipped_steps"] == []


def test_summary_tells_experts_compression_and_skipped_steps(tmp_path: Path) -> None:
    layout = Layout(dp_replicate=2, ep=2)
    traffic = {"grad_wire_bytes": 1e6, "grad_plain_bytes": 4e6}
    events = [
        started(0, layout),
        *(profile(rank, 1, 2, **traffic) for rank in range(2)),
        expert_load(2, 2, 0, imbalance=1.9, chip_imbalance=1.1),
        expert_load(2, 4, 0, imbalance=1.2, chip_imbalance=1.5, hottest=7),
        expert_load(2, 4, 1, imbalance=1.4, chip_imbalance=1.3, hottest=2),
        experts_moved(3, 3, 1, moved=6),
        event(Kind.STEP_SKIPPED, 4, rank=0, step=5, loss_scale=2.0),
    ]
    metrics = [metric(step, router_loss=0.1 * step) for step in (1, 2, 3, 4)]
    run = write_run(tmp_path, layout=layout, metrics=metrics, events=events, model=EXPERTS)
    found = summary(read_run(run))
    assert found["expert_load"] == {
        **{"step": 4, "layer": 1, "expert": 2, "imbalance": 1.4},
        **{"chip_imbalance": 1.5, "moves": 1, "moved": 6},
    }
    assert found["gradient_bytes"] == {"sent": 2e6, "saved": 6e6}
    assert found["router_loss"] == pytest.approx(0.4)
    assert (found["skipped_steps"], found["step"]) == ([5], 5)


def test_summary_is_strict_json_even_when_the_loss_diverged(tmp_path: Path) -> None:
    metrics = [metric(1), metric(2, loss=math.nan), metric(3, loss=math.inf, grad_norm=math.nan)]
    events = [started(0, ONE), evaluated(1, 3, math.nan, bigram_loss=math.nan)]
    run = write_run(tmp_path, layout=ONE, metrics=metrics, events=events)
    found = json.loads(json.dumps(summary(read_run(run)), allow_nan=False))
    assert found["nonfinite_steps"] == [2, 3]
    assert found["train_loss"] is None
    assert found["validation"]["loss"] is None


def test_summary_tells_resumes_and_the_error_that_ended_it(tmp_path: Path) -> None:
    events = [
        started(0, ONE),
        event(Kind.RUN_FAILED, 5, error="first"),
        started(9, ONE, resumed_from=2),
        event(Kind.RUN_FAILED, 11, error="second", ts=START_TS + 12),
    ]
    found = summary(read_run(write_run(tmp_path, layout=ONE, events=events)))
    assert (found["status"], found["error"]) == ("failed", "second")
    assert (found["resumed_from"], found["incarnations"]) == ([2], 2)
    assert found["wall_s"] == 8.0


def test_mfu_without_a_peak_is_unknown(tmp_path: Path) -> None:
    plan = plan_of(ONE, peak_flops_per_chip=None)
    found = summary(read_run(write_run(tmp_path, layout=ONE, plan=plan)))
    assert found["mfu"] is None and found["tokens_per_s"] is not None
