"""When a run saves, and that storage which hangs, or is away, never holds it up for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_groups import mesh_of

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.plan.job import Job, resolve_job
from meshwright.train import saving
from meshwright.train.pace import Pace
from meshwright.train.saving import Due, Saver
from meshwright.train.state import owned_tensors
from meshwright.train.trainer import Trainer

LIMIT_S = 60.0


def job_of(steps: int = 9, **checkpoint: Any) -> Job:
    return resolve_job(
        {
            "job": {"steps": steps},
            "model": {"preset": "tiny"},
            "data": {"seq_len": 16, "global_batch": 1},
            "checkpoint": {"every": 1, **checkpoint},
        }
    )


class Said:
    """What was emitted: kind, step and error."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []

    def emit(self, kind: Any, **fields: Any) -> None:
        self.events.append((str(kind), fields["step"], str(fields.get("error", ""))))

    def of(self, step: int) -> list[tuple[str, str]]:
        return [(kind, error) for kind, at, error in self.events if at == step]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing can be written to a pack while it is cleared."""
    opened = threading.Event()
    opened.set()
    create = LocalFiles.create

    def held(self: LocalFiles, name: str, parts: Any) -> bool:
        if name.startswith("packs/"):
            assert opened.wait(LIMIT_S)
        return create(self, name, parts)

    monkeypatch.setattr(LocalFiles, "create", held)
    return opened


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """All that a trainer has, which needs no model."""
    values = torch.zeros(5)
    held = {Piece.whole("w", (5,)): values}
    monkeypatch.setattr(saving, "owned_tensors", lambda _: held)
    monkeypatch.setattr(saving, "decays", lambda _: {})
    return values


TRAINER: Any = SimpleNamespace(optimizer=SimpleNamespace(updates_done=1))


def saver_of(job: Job, folder: Path) -> Saver:
    at = StoreAt(str(folder))
    at.begin()
    return Saver(job, mesh_of(job.layout, 0), at, "a")


def settle(saver: Saver) -> None:
    assert saver._opened is not None
    saver._opened.wait()
    while saver._upkeep is not None and saver._upkeep.is_busy:
        time.sleep(0.005)


def test_a_write_that_hangs_holds_up_training_once_and_is_one_line_a_step(
    tmp_path: Path, gate: threading.Event, state: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_PATIENCE_S", 0.2)
    saver, said, waited = saver_of(job_of(), tmp_path), Said(), []
    saver.idle = lambda: waited.append(len(said.events))
    saver.save(1, TRAINER, {}, Due.WHOLE)
    settle(saver)
    gate.clear()
    for step in (2, 3, 4, 5):
        state.fill_(step)
        saver.save(step, TRAINER, {}, Due.WHOLE)
        saver.report(said.emit)
    assert set(waited) == {1}  # step 3 alone has waited, and others could be heard meanwhile
    line = "step 2 is still being written"
    for step in (3, 4, 5):
        ((kind, error),) = said.of(step)
        assert kind == "checkpoint_failed" and error.startswith(line) and "every" in error
    assert said.of(2) == []
    gate.set()
    settle(saver)
    state.fill_(6)
    saver.save(6, TRAINER, {}, Due.WHOLE)
    saver.finish(6, said.emit)
    assert [said.of(step)[0][0] for step in (2, 6)] == ["checkpoint_committed"] * 2
    store = Store.open(tmp_path)
    assert [commit.step for commit in store.commits()][-1] == 6
    assert store.reader(store.commits()[-1]).read("w").tolist() == [6.0] * 5


@pytest.mark.usefixtures("state")
def test_the_last_step_is_waited_for_until_the_deadline_and_its_loss_ends_the_run(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_ANSWER_S", 0.0)
    saver, said = saver_of(job_of(2, deadline_s=0.2), tmp_path), Said()
    saver.save(1, TRAINER, {}, Due.WHOLE)
    settle(saver)
    gate.clear()
    saver.save(2, TRAINER, {}, Due.WHOLE)
    match = r"step 2 was not saved: storage has not answered within 0\.2 s; main@1 .* stays"
    with pytest.raises(CheckpointError, match=match):
        saver.finish(2, said.emit)
    assert [kind for kind, _ in said.of(2)] == ["checkpoint_failed"]
    gate.set()


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("deltas", [False, True])
def test_a_store_that_is_away_is_one_line_a_step_until_it_is_back(
    tmp_path: Path, deltas: bool
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    saver, said = saver_of(job_of(deltas=deltas), home), Said()
    home.rename(away)
    for step in (1, 2):
        saver.save(step, TRAINER, {}, Due.WHOLE)
        saver.report(said.emit)
    for step in (1, 2):
        ((kind, error),) = said.of(step)
        assert kind == "checkpoint_failed" and "no checkpoints here" in error
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*no checkpoints here"):
        saver.finish(2, said.emit)
    away.rename(home)
    saver.save(3, TRAINER, {}, Due.WHOLE)
    saver.finish(3, said.emit)
    assert [kind for kind, _ in said.of(3)] == ["checkpoint_committed"]


@pytest.mark.usefixtures("state")
def test_of_two_runs_on_a_branch_the_first_goes_on(tmp_path: Path) -> None:
    """Both began when nothing was there, so neither could be refused then."""
    job, said = job_of(), Said()
    saver_of(job, tmp_path)
    ours, theirs = (
        Saver(job, mesh_of(job.layout, 0), StoreAt(str(tmp_path)), name, begun=0) for name in "ab"
    )
    for step, saver in ((1, ours), (1, theirs), (2, ours)):
        saver.save(step, TRAINER, {}, Due.WHOLE)
        settle(saver)
    ours.report(said.emit)
    assert [kind for kind, _, _ in said.events] == ["checkpoint_committed"] * 2
    with pytest.raises(CheckpointError, match=r"another run has brought branch main to main@1"):
        theirs.finish(1, said.emit)
    assert {commit.attempt[10:11] for commit in Store.open(tmp_path).commits()} == {"a"}
    resumed = Saver(job, mesh_of(job.layout, 0), StoreAt(str(tmp_path)), "c", begun=2)
    resumed.save(3, TRAINER, {}, Due.WHOLE)
    resumed.finish(3, said.emit)


def asked(saver: Saver, steps: range, save: Callable[[int, Due], None]) -> list[str]:
    """What the saver asks for at each step, which it gets."""
    found = []
    for step in steps:
        due = Due.agreed(saver.asks(step))
        found.append(due.name)
        if due:
            save(step, due)
    return found


def test_changes_follow_a_whole_save_and_pause_where_the_chain_is_broken(
    tmp_path: Path, state: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, said = saver_of(job_of(12, every=4, deltas=True, keep=20), tmp_path), Said()
    create, failing = LocalFiles.create, {6}

    def create_or_fail(self: LocalFiles, name: str, parts: Any) -> bool:
        if step_now in failing and name.startswith("packs/"):
            raise OSError(28, "No space left on device")
        return create(self, name, parts)

    monkeypatch.setattr(LocalFiles, "create", create_or_fail)
    step_now = 0

    def save(step: int, due: Due) -> None:
        nonlocal step_now
        step_now = step
        state.fill_(step)
        saver.save(step, TRAINER, {}, due)
        settle(saver)
        saver.report(said.emit)

    kinds = asked(saver, range(1, 11), save)
    whole, change, none = "WHOLE", "CHANGE", "NOT"
    first = [whole, change, change, whole, change, change]
    assert kinds == [*first, none, whole, change, change]
    failed = [(kind, step) for kind, step, _ in said.events if kind == "checkpoint_failed"]
    assert failed == [("checkpoint_failed", 6)]
    store = Store.open(tmp_path)
    depths = [(one.step, one.depth) for one in store.commits()]
    assert depths == [*zip([1, 2, 3, 4, 5, 8, 9, 10], [0, 1, 2, 0, 1, 0, 1, 2], strict=True)]
    for commit in store.commits():
        assert store.reader(commit).read("w").tolist() == [float(commit.step)] * 5


def test_who_took_a_rank_over_has_no_change_to_save_and_asks_for_a_whole_one(
    tmp_path: Path, state: torch.Tensor
) -> None:
    job = job_of(12, every=100, deltas=True)
    at = StoreAt(str(tmp_path))
    at.begin()
    fresh = Saver(job, mesh_of(job.layout, 0), at, "a")
    state.fill_(5.0)
    fresh.save(5, TRAINER, {}, Due.CHANGE)  # what all had voted for when it was lost
    assert fresh.asks(6) is Due.WHOLE
    fresh.save(6, TRAINER, {}, Due.WHOLE)
    settle(fresh)
    assert [(one.step, one.depth) for one in Store.open(tmp_path).commits()] == [(6, 0)]
    assert fresh.asks(7) is Due.CHANGE


def test_steps_that_storage_cannot_keep_up_with_go_unsaved_and_the_chain_goes_on(
    tmp_path: Path, gate: threading.Event, state: torch.Tensor
) -> None:
    saver, said = saver_of(job_of(12, every=100, deltas=True), tmp_path), Said()
    for step in (1, 2):
        state.fill_(step)
        saver.save(step, TRAINER, {}, Due.agreed(saver.asks(step)))
        settle(saver)
        saver.report(said.emit)
    gate.clear()
    state.fill_(3.0)
    saver.save(3, TRAINER, {}, Due.agreed(saver.asks(3)))
    assert saver.asks(4) is Due.NOT
    gate.set()
    settle(saver)
    saver.report(said.emit)
    assert saver.asks(5) is Due.CHANGE
    state.fill_(5.0)
    saver.save(5, TRAINER, {}, Due.CHANGE)
    settle(saver)
    store = Store.open(tmp_path)
    assert [(one.step, one.depth) for one in store.commits()] == [(1, 0), (2, 1), (3, 2), (5, 3)]
    assert store.reader(store.commits()[-1]).read("w").tolist() == [5.0] * 5


@pytest.mark.usefixtures("state")
def test_a_branch_that_was_turned_back_is_not_written_to_as_if_nothing_were(
    tmp_path: Path,
) -> None:
    saver, said = saver_of(job_of(), tmp_path), Said()
    for step in (1, 2):
        saver.save(step, TRAINER, {}, Due.WHOLE)
        settle(saver)
    store = Store.open(tmp_path)
    first, second = store.commits()
    store.rollback(first)
    saver.save(3, TRAINER, {}, Due.WHOLE)
    settle(saver)
    saver.report(said.emit)
    assert said.of(3)[0][0] == "checkpoint_failed"
    assert Store.open(tmp_path).head() == first
    store.mark_bad(second, "a flipped bit")  # that would not have been the run's fault
    saver.save(4, TRAINER, {}, Due.WHOLE)
    settle(saver)
    assert Store.open(tmp_path).commits()[-1].step == 4


def test_a_trainer_tells_before_its_state_changes() -> None:
    job = resolve_job(
        {
            "job": {"steps": 4},
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2}
            | {"ffn_hidden": 64, "vocab": 64, "n_experts": 4, "top_k": 2, "expert_ffn_hidden": 32},
            "data": {"seq_len": 8, "global_batch": 2},
            "layout": {"micro_batch": 2},
        }
    )
    trainer = Trainer(job, mesh_of(job.layout, 0), torch.device("cpu"))
    trainer.initialise()

    def bits() -> list[bytes]:
        return [values.numpy().tobytes() for values in owned_tensors(trainer).values()]

    seen: list[list[bytes]] = []
    trainer.before_change = lambda: seen.append(bits())
    for step in range(3):
        before = bits()
        agreed = trainer.gradients(torch.randint(64, (1, 2, 9)), step=step)
        if step:  # the first learns the loads that the routers begin with
            assert bits() == before
        trainer.update(step, agreed)
        assert bits() != before
        assert len(seen) == step + 1
        assert step == 0 or seen[-1] == before


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_every_so_many_steps() -> None:
    pace = Pace(job_of(every=4), 1)
    assert [step for step in range(1, 13) if pace.is_due(step)] == [4, 8, 12]


def test_auto_saves_the_first_step_and_then_by_what_that_cost() -> None:
    clock = Clock()
    pace = Pace(job_of(every="auto"), 1, clock)
    assert pace.is_due(1)
    pace.saved(0.5)
    pace.committed(3.0)
    assert not pace.is_due(2)
    best_s = pace.interval_s
    assert best_s > 6.0
    clock.now_s += best_s * 0.99
    assert not pace.is_due(3)
    clock.now_s += best_s * 0.02
    assert pace.is_due(4)
    pace.saved(2.0)  # it has become slower: fewer saves are best
    assert pace.interval_s == pytest.approx(2 * best_s, rel=0.1)


def test_auto_saves_more_often_where_more_can_fail_and_never_before_the_last_is_done() -> None:
    few, many = Pace(job_of(every="auto"), 1, Clock()), Pace(job_of(every="auto"), 1000, Clock())
    for pace in (few, many):
        pace.saved(0.5)
        pace.committed(1.0)
    assert 20 < few.interval_s / many.interval_s < 40  # the square root
    many.committed(10_000.0)
    assert many.interval_s >= 20_000.0
