"""Losses that a run has survived, in words, in the terminal and in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from watch_runs import event, started, write_run

from meshwright.base.events import Kind
from meshwright.plan.layout import Layout
from meshwright.watch.happenings import event_rows
from meshwright.watch.history import read_run
from meshwright.watch.live_state import LiveState
from meshwright.watch.report import notices
from meshwright.watch.summary import summary
from meshwright.watch.survival import survival_words

TAKEOVER = {
    "kind": Kind.TAKEOVER_DONE,
    "ts": 1.0,
    "epoch": 2,
    "ranks": [3],
    "cause": "died by SIGKILL",
    "takeover_s": 0.0514,
    "step": 7,
    "lost_steps": 0,
}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (TAKEOVER, "rank 3 taken over (died by SIGKILL) in 51 ms, no step lost"),
        (
            {**TAKEOVER, "ranks": [0, 1], "takeover_s": 1.25, "lost_steps": 2},
            "ranks 0, 1 taken over (died by SIGKILL) in 1.2 s, 2 steps lost",
        ),
        (
            {"kind": Kind.RESIZED, "before": "dp4", "after": "dp2", "resize_s": 0.5},
            "goes on as dp2, was dp4; took 500 ms",
        ),
        (
            {"kind": Kind.HANG, "rank": 1, "cause": "hung in vote", "stalled_s": 2.0},
            "rank 1 is hung in vote for 2.0 s",
        ),
        (
            {"kind": Kind.STRAGGLER, "rank": 1, "busy_ratio": 1.05},
            "rank 1 is slow: 1.05 times the time of its like",
        ),
        ({"kind": Kind.ALERT, "what": "node 1 is silent"}, "node 1 is silent"),
        ({"kind": Kind.ADVICE, "advice": "use more spares"}, "use more spares"),
        ({"kind": Kind.CORRUPT, "rank": 2, "what": "moments differ"}, "rank 2: moments differ"),
        (
            {"kind": Kind.CORRUPT, "rank": 1, "suspects": [3], "what": "its state changed"},
            "rank 3: its state changed",
        ),
        (
            {"kind": Kind.CORRUPT, "rank": 1, "suspects": [1, 3], "what": "y", "redo": True},
            "rank 1: y; the step is done again",
        ),
        (
            {"kind": Kind.QUARANTINED, "rank": 3, "node": 0, "cause": "x"},
            "the chip of rank 3 on node 0 is not used again: x",
        ),
        (
            {"kind": Kind.QUARANTINED, "rank": None, "node": 1, "cause": "x"},
            "node 1 is not used again: x",
        ),
        (
            {"kind": Kind.QUARANTINED, "rank": None, "member": 4, "node": 1, "cause": "x"},
            "the chip of spare 4 on node 1 is not used again: x",
        ),
        ({"kind": Kind.NODE_BACK, "node": 1}, "node 1 is there again"),
        (
            {"kind": Kind.FALSE_ALARM, "rank": 2, "what": "got on"},
            "false alarm: rank 2 got on",
        ),
        ({"kind": Kind.METRICS, "step": 1}, None),
    ],
)
def test_words(event: dict[str, Any], words: str | None) -> None:
    assert survival_words(event) == words


def test_a_taken_over_rank_leaves_the_run_running() -> None:
    state = LiveState(steps=10, world=4)
    state.apply({"kind": Kind.RANK_LOST, "rank": 3}, 0.0)
    assert state.status == "lost rank 3"
    state.apply(TAKEOVER, 1.0)
    assert state.status == "running"
    assert state.survived == ["rank 3 taken over (died by SIGKILL) in 51 ms, no step lost"]


def test_false_alarms_are_counted_and_chips_given_up_are_listed(tmp_path: Path) -> None:
    alarm = event(Kind.FALSE_ALARM, 2, rank=1, step=3, what="got on")
    given_up = {"rank": 2, "member": 2, "node": 0, "step": 4, "cause": "it errs"}
    events = [
        started(0, Layout(dp_replicate=2, tp=2, pp=2)),
        alarm,
        alarm,
        event(Kind.QUARANTINED, 3, **given_up),
    ]
    state = LiveState(steps=10, world=4)
    for message in events:
        state.apply(message, 0.0)
    words = "the chip of rank 2 on node 0 is not used again: it errs"
    assert (state.false_alarms, state.quarantined) == (2, [words])
    history = read_run(write_run(tmp_path, events=events))
    found = summary(history)
    assert (found["false_alarms"], found["quarantined"]) == (2, [given_up])
    assert notices(history)[-2:] == [
        "ranks that were replaced by a false alarm, and could have gone on: 2",
        words,
    ]


def test_the_report_lists_it() -> None:
    [row] = event_rows([TAKEOVER])
    assert row.detail == "rank 3 taken over (died by SIGKILL) in 51 ms, no step lost"
    assert not row.bad
