"""Sums that any one bit changes, and who is believed where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import RunError
from meshwright.train import rechecking
from meshwright.train.agreement import Finding, Guard, bits, outvoted
from meshwright.train.rechecking import recheck, sampled_work


@given(
    size=st.integers(1, 70),
    first=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
@settings(deadline=None)
def test_any_bit_changes_the_sum(size: int, first: int, dtype: torch.dtype, data: Any) -> None:
    flat = torch.randn(first + size).to(dtype)[first:]
    before = bits([flat, torch.zeros(3)])
    assert -(1 << 63) <= before < 1 << 63
    assert bits([flat.clone(), torch.zeros(3)]) == before
    memory = flat.view(torch.uint8)
    at = data.draw(st.integers(0, memory.numel() - 1))
    memory[at] ^= 1 << data.draw(st.integers(0, 7))
    assert bits([flat, torch.zeros(3)]) != before


def test_the_odd_one_is_outvoted_if_most_agree() -> None:
    assert outvoted([5]) == ()
    assert outvoted([5, 5, 5]) == ()
    assert outvoted([5, 6, 5]) == (1,)
    assert outvoted([5, 6]) is None
    assert outvoted([5, 5, 6, 6]) is None
    assert outvoted([5, 6, 7]) is None
    assert outvoted([5, 5, 5, 6, 7]) == (3, 4)


def make_trainer() -> Any:
    """What the checks know of one."""
    group = SimpleNamespace(master=torch.randn(5000), grad=torch.randn(5000))
    layout = SimpleNamespace(precision="fp32")
    return SimpleNamespace(
        data=SimpleNamespace(groups=[group]),
        optimizer=SimpleNamespace(moments=[(torch.zeros(5000), torch.zeros(5000))]),
        mesh=SimpleNamespace(rank=3, layout=layout),
        applied=5,
    )


def test_a_state_that_was_given_is_held_against_what_was_told_of_it() -> None:
    def guarded(applied: int, more: int = 0) -> tuple[Guard, list[Finding]]:
        trainer, told = make_trainer(), list[Finding]()
        seen: list[tuple[int, int]] = []
        Guard(
            trainer, None, told.append, lambda: pytest.fail(), lambda *it: seen.append(it)
        ).before_vote(5)
        [(of, total)] = seen
        assert of == 5
        guard = Guard(trainer, None, told.append, lambda: pytest.fail())
        guard.expect(applied, total + more)
        return guard, told

    looks: list[Callable[[Guard], None]] = [lambda one: one.before_vote(5), Guard.check_given]
    for look in looks:
        guard, told = guarded(5)
        look(guard)
        guard, told = guarded(4, more=1)  # of another step: it says nothing
        look(guard)
        assert not told
        guard, told = guarded(5, more=1)
        with pytest.raises(RunError, match="is not that of the rank that was lost"):
            look(guard)
        assert [(one.suspects, one.certain) for one in told] == [((3,), True)]


def test_a_rank_without_twins_convicts_itself() -> None:
    trainer, told = make_trainer(), list[Finding]()
    guard = Guard(trainer, None, told.append, lambda: pytest.fail("nobody to wait for"))
    guard.before_vote(0)
    trainer.data.groups[0].master += 1
    guard.after_update()
    guard.before_vote(1)
    guard.before_update(1)
    trainer.data.groups[0].grad[7] = 5.0
    with pytest.raises(Exception, match="step 2: its gradients changed in memory"):
        guard.before_update(1)
    trainer.optimizer.moments[0][1][4] = 1e-9
    guard.before_vote(2)  # gradients go by the weights alone
    with pytest.raises(Exception, match="step 3: its state changed in memory"):
        guard.before_update(2)
    trainer.data.groups[0].master[4] += 1.0
    with pytest.raises(Exception, match="step 4: its state changed in memory"):
        guard.before_vote(3)
    assert [(one.step, one.suspects) for one in told] == [(2, (3,)), (3, (3,)), (4, (3,))]
    assert all(one.certain for one in told)
    assert guard.take_cost() > 0.0


def test_the_same_sample_comes_to_the_same_and_another_to_something_else() -> None:
    trainer = make_trainer()
    assert sampled_work(trainer, 10) == sampled_work(trainer, 10)
    assert sampled_work(trainer, 10) != sampled_work(trainer, 20)
    before = sampled_work(trainer, 10)
    trainer.data.groups[0].master += 1
    assert sampled_work(trainer, 10) != before
    assert recheck(trainer, None, 10) is None


def test_a_chip_that_computes_differently_the_second_time_is_convicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: Iterator[int] = iter([1, 2])
    monkeypatch.setattr(rechecking, "sampled_work", lambda *_: next(found))
    told = recheck(make_trainer(), None, 10)
    assert told is not None and (told.suspects, told.certain) == ((3,), True)


@pytest.mark.parametrize(
    ("others", "suspects", "certain"), [((8, 8), (3,), True), ((7, 8), (5,), True)]
)
def test_of_twins_the_one_that_computes_differently_is_convicted(
    monkeypatch: pytest.MonkeyPatch, others: tuple[int, int], suspects: Any, certain: bool
) -> None:
    monkeypatch.setattr(rechecking, "sampled_work", lambda *_: 7)
    rows = [(7,), (others[0],), (others[1],)]
    monkeypatch.setattr(rechecking, "gather", lambda *_: rows)
    told = [
        recheck(make_trainer(), SimpleNamespace(ranks=(3, 4, 5), index=index), 10)  # type: ignore[arg-type]
        for index in range(3)
    ]
    [one] = [finding for finding in told if finding is not None]
    assert (one.suspects, one.certain) == (suspects, certain)
