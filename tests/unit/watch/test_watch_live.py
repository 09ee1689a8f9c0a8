"""The live view, on a terminal and off it, with a clock of our own."""

from __future__ import annotations

import io
import math
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from watch_runs import (
    EXPERTS,
    evaluated,
    event,
    expert_load,
    experts_moved,
    job_text,
    metric,
    plan_of,
    profile,
    started,
)

from meshwright.base.events import Kind
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout
from meshwright.watch.live import LiveView
from meshwright.watch.live_state import LiveState, sparkline

LAYOUT = Layout(dp_replicate=2, tp=2, pp=2)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def job_of(steps: int) -> Job:
    return resolve_job(tomllib.loads(job_text(LAYOUT, steps)))


def view(steps: int, terminal: bool, **plan: Any) -> tuple[LiveView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    return LiveView(job_of(steps), plan_of(LAYOUT, **plan), console, clock), out, clock


def measured(step: int, **changes: Any) -> dict[str, Any]:
    return event(Kind.METRICS, step, rank=0, **metric(step, **changes))


def run(live: LiveView, clock: Clock, steps: int, step_s: float) -> Iterator[int]:
    live.on_event(started(0, LAYOUT))
    for step in range(1, steps + 1):
        clock.now_s += step_s
        live.on_event(measured(step))
        yield step


def step_lines(out: io.StringIO) -> list[int]:
    lines = [line for line in out.getvalue().splitlines() if "loss " in line]
    return [int(line.split()[1].split("/")[0]) for line in lines]


def test_off_a_terminal_a_line_every_tenth_of_the_steps() -> None:
    live, out, clock = view(40, terminal=False)
    with live:
        assert list(run(live, clock, 40, step_s=0.01))[-1] == 40
    assert step_lines(out) == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40]
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().startswith("synthetic · dp2xtp2xpp2 · 1.23 M parameters\n")


def test_off_a_terminal_a_line_every_five_seconds() -> None:
    live, out, clock = view(10_000, terminal=False)
    list(run(live, clock, 14, step_s=1.0))
    assert step_lines(out) == [1, 6, 11]
    assert "tokens/s  MFU" in out.getvalue() and "ETA 2 h 46 min" in out.getvalue()


def test_off_a_terminal_evaluations_are_told() -> None:
    live, out, _ = view(40, terminal=False)
    live.on_event(evaluated(1, 20, 3.3))
    live.on_event(evaluated(2, 40, 3.9))
    first, second = out.getvalue().splitlines()
    assert first == "step 20  validation 3.3000, below bigram 3.6000"
    assert second == "step 40  validation 3.9000, not below bigram 3.6000"


def test_text_from_a_run_is_not_read_as_markup() -> None:
    live, out, _ = view(40, terminal=False, label="[red]:smile:[/red]")
    live.on_event(started(0, LAYOUT))
    assert "[red]:smile:[/red]" in out.getvalue()


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moments at which a panel was built."""
    seen: list[float] = []
    build = LiveView.render

    def counted(self: LiveView) -> object:
        seen.append(self.state.now_s)
        return build(self)

    monkeypatch.setattr(LiveView, "render", counted)
    return seen


def test_on_a_terminal_at_most_four_drawings_a_second(renders: list[float]) -> None:
    live, _, clock = view(2000, terminal=True)
    with live:
        list(run(live, clock, 2000, step_s=0.001))
        drawn = list(renders)
    gaps = [b - a for a, b in pairwise(drawn)]
    assert 8 <= len(drawn) <= 9, "two seconds"
    assert min(gaps) >= 0.25 - 1e-9


def test_time_goes_on_without_messages(renders: list[float]) -> None:
    live, out, clock = view(40, terminal=True)
    with live:
        live.on_event(started(0, LAYOUT))
        clock.now_s += 7
        live.tick()
        assert renders[-1] == clock.now_s
    assert "7.0 s" in out.getvalue()


def test_the_panel_tells_all() -> None:
    live, out, clock = view(40, terminal=True)
    with live:
        for rank in range(8):
            live.on_event(event(Kind.RANK_READY, 1, rank=rank))
            live.on_event(profile(rank, 2, 10))
        list(run(live, clock, 20, step_s=1.0))
        live.on_event(evaluated(3, 20, 3.3))
    panel = out.getvalue()
    for words in ("20/40", "running", "20.0 s left", "tokens/s · MFU", "▁", "(step 20)"):
        assert words in panel, words
    for words in (
        "below bigram 3.6000",
        "■ compute 67%",
        "■ comm 14%",
        "■ other 7%",
        "grad norm",
    ):
        assert words in panel, words


def test_what_only_some_runs_have_is_in_the_panel_and_in_the_lines() -> None:
    layout = Layout(dp_replicate=2, pp=2, ep=2, schedule="zbv")
    job = resolve_job(tomllib.loads(job_text(layout, 40, EXPERTS)))
    plan = plan_of(layout, active_params=400_000)
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
        with LiveView(job, plan, console, Clock()) as live:
            live.on_event(started(0, layout))
            for rank in range(4):
                traffic = {"grad_wire_bytes": 3e8, "grad_plain_bytes": 1.2e9}
                live.on_event(profile(rank, 2, 20, **traffic))
            live.on_event(expert_load(2, 20, 1))
            live.on_event(expert_load(2, 20, 3, imbalance=1.83, chip_imbalance=1.0))
            live.on_event(experts_moved(2, 20, 3))
            live.on_event(event(Kind.STEP_SKIPPED, 3, rank=0, step=39, loss_scale=512.0))
            live.on_event(measured(40, router_loss=0.0123))
        shown = out.getvalue()
        for words in (
            "1.23 M parameters, 400 k active",
            "schedule zbv, 2 stages a rank · stage balance 0.97 · ep 2, etp 1",
            "load max/mean 1.83 (layer 3), chips 1.20; 4 moved",
            "1.20 GB sent, 3.60 GB saved",
            "1, last 39; loss scale 512",
            " + router 0.0123",
        ):
            assert words in shown, words


def test_experts_that_no_chips_share_have_no_load_of_chips() -> None:
    live, out, _ = view(1, terminal=False)
    live.on_event(expert_load(1, 1, 2))
    live.on_event(measured(1))
    assert "experts: load max/mean 1.60 (layer 2)" in out.getvalue()
    assert "chips" not in out.getvalue()


def test_off_a_terminal_what_has_not_changed_is_not_told_again() -> None:
    live, out, clock = view(40, terminal=False)
    reports = {3: 1.6, 20: 1.6, 30: 1.7}
    for step in run(live, clock, 40, step_s=0.01):
        if step in reports:
            live.on_event(expert_load(1, step, 2, imbalance=reports[step]))
    assert [line for line in out.getvalue().splitlines() if "experts" in line] == [
        "step 5  experts: load max/mean 1.60 (layer 2)",
        "step 33  experts: load max/mean 1.70 (layer 2)",
    ]


def test_a_plain_run_shows_nothing_of_it() -> None:
    for terminal in (True, False):
        live, out, clock = view(4, terminal, stage_balance=None)
        with live:
            live.on_event(profile(0, 1, 2, grad_wire_bytes=0.0, grad_plain_bytes=0.0))
            list(run(live, clock, 3, step_s=1.0))
            live.on_event(measured(4, router_loss=0.0))
        for word in ("expert", "router", "gradients", "skipped", "active", "balance"):
            assert word not in out.getvalue(), word


def test_what_is_safe_and_what_is_not_is_shown() -> None:
    live, out, clock = view(4, terminal=True)
    with live:
        list(run(live, clock, 3, step_s=1.0))
        told = {"path": "runs/a", "save_s": 0.5, "verified_step": 100, "verified_age_s": 42.0}
        live.on_event(event(Kind.CHECKPOINT_COMMITTED, 4, step=200, **told))
        live.on_event(event(Kind.CHECKPOINT_FAILED, 4, step=300, error="disk full"))
    assert "step 200; step 100 verified, 42.0 s old" in out.getvalue()
    assert "step 300 is not safe: disk full; training goes on" in out.getvalue()


def test_a_run_that_only_skips_steps_is_seen_to_go_on() -> None:
    live, out, clock = view(40, terminal=False)
    for step in range(1, 5):
        clock.now_s += 6
        live.on_event(
            event(Kind.STEP_SKIPPED, step, rank=0, step=step, loss_scale=2.0 ** (16 - step))
        )
    assert out.getvalue().splitlines()[-2:] == [
        *("step 4/40  ETA 3 min 36 s", "step 4  skipped steps: 4, last 4; loss scale 4,096")
    ]
    assert live.state.status == "running"


def test_a_panel_before_anything_has_happened() -> None:
    live, out, _ = view(40, terminal=True)
    with live:
        live.on_event(started(0, LAYOUT))
        live.on_event(event(Kind.RANK_READY, 1, rank=3))
    assert "1/8 ranks ready" in out.getvalue()


def test_mfu_without_a_peak_is_not_shown() -> None:
    live, out, clock = view(4, terminal=False, peak_flops_per_chip=None)
    list(run(live, clock, 4, step_s=1.0))
    assert "MFU" not in out.getvalue() and "tokens/s" in out.getvalue()


def test_a_diverged_run_is_still_shown() -> None:
    for terminal in (False, True):
        live, out, _ = view(4, terminal=terminal)
        with live:
            live.on_event(measured(1, loss=math.nan, grad_norm=None, mfu=None))
        assert "nan" in out.getvalue()


def test_the_pace_counts_evaluations_and_starts_anew_on_resuming() -> None:
    state = LiveState(steps=100, world=8)
    for now_s, step in ((0.0, 10), (1.0, 11), (6.0, 12)):
        state.apply(measured(step), now_s)
    assert state.eta_s == pytest.approx(88 * 3.0)
    state.apply(started(9, LAYOUT, resumed_from=5), 7.0)
    assert (state.step, state.eta_s, state.status) == (5, None, "starting")


def test_a_lost_rank_is_no_longer_ready() -> None:
    state = LiveState(steps=100, world=8)
    state.apply(event(Kind.RANK_READY, 1, rank=3), 0.0)
    state.apply(event(Kind.RANK_LOST, 2, rank=3, step=7), 1.0)
    assert (state.ready, state.status) == (set(), "lost rank 3")


def test_sparkline() -> None:
    assert sparkline([8.0, 4.0, 1.0], 10) == "█▄▁"
    assert len(sparkline([float(v) for v in range(500)], 32)) == 32
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁x█"
    assert sparkline([], 10) == ""
