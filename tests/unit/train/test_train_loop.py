"""The training loop hands every step's number on, and stops where the loss is no number."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from train_groups import mesh_of

from meshwright.base.errors import RunError
from meshwright.checkpoint.opening import StoreAt
from meshwright.plan.job import CheckpointSection, resolve_job
from meshwright.train import loop
from meshwright.train.bad_samples import BadSampleWords
from meshwright.train.feeding import StepFeed
from meshwright.train.gradients import Vote
from meshwright.train.saving import Due

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

        self.agreed: tuple[int, Vote] | None = None

    def gradients(self, batches: int, _stop: bool, step: int, save: int) -> Vote:
        self.data_of.append(batches)
        self.drawn_for.append(step)
        self.agreed = (step, replace(self.vote, save=save))
        return self.agreed[1]

    def update(self, step: int, _agreed: Vote) -> list[Any]:
        self.updated.append(step)
        return []


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, Due]]]:
    """Nothing is read, evaluated or written; which steps would be saved, and how. The signal's
    handler comes back."""
    saved: list[tuple[int, Due]] = []
    monkeypatch.setattr(loop, "step_batches", lambda _job, _mesh, _samples, step: step)
    monkeypatch.setattr(BadSampleWords, "found", lambda _self, _batches, _step: [])
    for name in ("_evaluate", "_report_profile"):
        monkeypatch.setattr(loop.TrainLoop, name, lambda _self, _step: None)
    monkeypatch.setattr(loop.TrainLoop, "_save", lambda _self, *how: saved.append(how))
    before = signal.getsignal(signal.SIGTERM)
    yield saved
    signal.signal(signal.SIGTERM, before)


def run(trainer: Any) -> Said:
    said: Any = Said()
    inputs: Any = SimpleNamespace(
        train=SimpleNamespace(far=False),
        peak_flops=1.0,
        predicted_step_time_s=None,
        replay=None,
        checkpoints=StoreAt("nowhere"),
        attempt="one",
        begun=None,
        made_with={},
    )
    loop.TrainLoop(trainer, inputs, said).run(FIRST)
    return said  # type: ignore[no-any-return]


def test_data_dropout_and_rate_go_by_the_step_also_after_a_resume() -> None:
    trainer = Recorder(RIGHT, may_skip=False)
    said = run(trainer)
    assert trainer.data_of == trainer.drawn_for == trainer.updated == [3, 4, 5]
    assert said.kinds.count("metrics") == 3


def test_what_is_saved_is_what_the_votes_ask_for(saved: list[tuple[int, Due]]) -> None:
    trainer = Recorder(RIGHT, may_skip=False)
    trainer.job = trainer.job.model_copy(update={"checkpoint": CheckpointSection(every=5)})
    run(trainer)
    assert saved == [(5, Due.WHOLE), (6, Due.WHOLE)]


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
