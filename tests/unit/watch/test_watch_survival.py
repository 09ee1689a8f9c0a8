"""Losses that a run has survived, in words, in the terminal and in the report."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.base.events import Kind
from meshwright.watch.happenings import event_rows
from meshwright.watch.live_state import LiveState
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


def test_the_report_lists_it() -> None:
    [row] = event_rows([TAKEOVER])
    assert row.detail == "rank 3 taken over (died by SIGKILL) in 51 ms, no step lost"
    assert not row.bad
