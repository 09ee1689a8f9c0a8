"""The training loop hands every step's number on, and stops where the loss is no number."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from train_groups import mesh_of

from meshwright.base.errors import RunError
from meshwright.plan.job import resolve_job
from meshwright.train import loop
from meshwright.train.bad_samples import BadSampleWords
from meshwright.train.feeding import StepFeed
from meshwright.train.gradients import Vote

FIRST, STEPS = 3, 6
REPORT = loop.TrainLoop._report_profile
RIGHT = Vote(loss=1.0, tokens=4, grad_norm=1.0, stop=False)


class Said:
    """The kinds of events that were emitted."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.advice: list[tuple[int, str]] = []

    def emit(self, kind: Any, **fields: Any) -> None:
        self.kinds.append(str(kind))
        self.advice += [(fields["step"], fields["advice"])] if "advice" in fields else []


class Recorder:
    """A trainer that notes the numbers of the steps it is asked for."""

    def __init__(self, vote: Vote, may_skip: bool) -> None:
        self.job = resolve_job(
            {
                "job": {"steps": STEPS},
                "model": {"preset": "tiny"},
                "data": {"seq_len": 16, "global_batch": 1},
            }
        )
        self.mesh = mesh_of(self.job.layout, 0)
        self.vote, self.may_skip = vote, may_skip
        self.loss_scale = SimpleNamespace(scale=1.0)
        self.bad_samples = 0
        self.data_of: list[int] = []
        self.drawn_for: list[int] = []
        self.updated: list[int] = []

    def gradients(self, batches: int, _stop: bool = False, step: int = -1) -> Vote:
        self.data_of.append(batches)
        self.drawn_for.append(step)
        return self.vote

    def update(self, step: int, _agreed: Vote) -> list[Any]:
        self.updated.append(step)
        return []


@pytest.fixture(autouse=True)
def stand_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is read, evaluated or written; the signal's handler comes back."""
    monkeypatch.setattr(loop, "step_batches", lambda _job, _mesh, _samples, step: step)
    monkeypatch.setattr(BadSampleWords, "found", lambda _self, _batches, _step: [])
    for name in ("_evaluate", "_save", "_report_profile"):
        monkeypatch.setattr(loop.TrainLoop, name, lambda _self, _step: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(trainer: Any) -> Said:
    said: Any = Said()
    inputs: Any = SimpleNamespace(
        train=SimpleNamespace(far=False), peak_flops=1.0, predicted_step_time_s=None, replay=None
    )
    loop.TrainLoop(trainer, inputs, said).run(FIRST)
    return said  # type: ignore[no-any-return]


def test_data_dropout_and_rate_go_by_the_step_also_after_a_resume() -> None:
    trainer = Recorder(RIGHT, may_skip=False)
    said = run(trainer)
    assert trainer.data_of == trainer.drawn_for == trainer.updated == [3, 4, 5]
    assert said.kinds.count("metrics") == 3


def test_what_is_no_number_ends_the_run_before_an_update() -> None:
    trainer = Recorder(Vote(math.nan, 4, 1.0, stop=False), may_skip=False)
    with pytest.raises(RunError, match=r"step 4: loss nan.*nothing was updated"):
        run(trainer)
    assert trainer.updated == []


def test_an_overflow_that_a_lower_scale_answers_does_not() -> None:
    trainer = Recorder(Vote(1.0, 4, math.inf, stop=False), may_skip=True)
    said = run(trainer)
    assert trainer.updated == [3, 4, 5]
    assert said.kinds.count("step_skipped") == 3
    assert "metrics" not in said.kinds


def test_what_keeps_a_rank_waiting_is_said_where_its_time_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop.TrainLoop, "_report_profile", REPORT)
    monkeypatch.setattr(loop, "_PROFILE_EVERY", 2)
    told = iter([None, "data: a faster disk"])
    monkeypatch.setattr(StepFeed, "advice", lambda _self: next(told))
    trainer: Any = Recorder(RIGHT, may_skip=False)
    trainer.data = SimpleNamespace(take_compressed_bytes=lambda: (0.0, 0.0))
    trainer.routing = SimpleNamespace(loads=lambda _step: [])
    said = run(trainer)
    assert said.kinds.count("rank_profile") == 2
    assert said.advice == [(6, "data: a faster disk")]
