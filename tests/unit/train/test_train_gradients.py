"""What ranks agree on at the end of a step, and who answers for which gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_groups import Twins, alone, flat_group, mesh_of, slot_of

from meshwright.plan.layout import Layout
from meshwright.train.gradients import (
    Vote,
    counts_here,
    finish_gradients,
    gradient_divisor,
    square_sum,
    vote,
)
from meshwright.train.parallel.flat import FlatGroup
from meshwright.train.parallel.pipeline import StepSums


def world(size: int = 1, tp_index: int = 0) -> Any:
    """A mesh of `size` ranks that all do the same, this one at `tp_index` of two."""
    tp = replace(Twins.of(2), index=tp_index) if tp_index else alone()
    return SimpleNamespace(tp=tp, parts=tp, world=Twins.of(size), ends=alone(), layout=Layout())


def group_with(*values: float) -> FlatGroup:
    group = flat_group([("w", torch.zeros(len(values)))])
    group.grad.copy_(torch.tensor(values))
    return group


def sums(loss: float, tokens: int, penalty: float = 0.0) -> StepSums:
    return StepSums(torch.tensor(loss), torch.tensor(penalty), tokens)


def test_the_mean_is_over_all_valid_tokens() -> None:
    agreed = vote([group_with(3.0, 4.0)], sums(6.0, 2, 1.0), world(), stop=False)
    assert agreed == Vote(loss=3.0, tokens=2, grad_norm=2.5, stop=False, router_loss=0.5)


def test_every_rank_of_the_world_is_heard() -> None:
    agreed = vote([group_with(3.0, 4.0)], sums(6.0, 2, 1.0), world(4), stop=True)
    assert agreed.tokens == 8
    assert agreed.loss == 3.0
    assert agreed.grad_norm == pytest.approx(10.0 / 8)
    assert agreed.stop


def test_other_tp_ranks_do_not_count_tokens_again() -> None:
    agreed = vote([], sums(6.0, 2, 1.0), world(tp_index=1), stop=False)
    # A penalty is the share of this rank: its router saw other tokens, or divided by the copies.
    assert (agreed.loss, agreed.tokens, agreed.router_loss) == (0.0, 0, 1.0)


def test_the_loss_scale_is_in_gradients_alone() -> None:
    plain = vote([group_with(3.0, 4.0)], sums(6.0, 2), world(), stop=False)
    scaled = vote([group_with(3072.0, 4096.0)], sums(6.0, 2), world(), stop=False, loss_scale=1024)
    assert scaled == plain
    assert gradient_divisor(scaled, 1e9, 1024) == 1024 * gradient_divisor(plain, 1e9)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_overflowed_on_one_rank_is_not_finite_for_any(bad: float) -> None:
    assert vote([group_with(3.0)], sums(1.0, 1), world(), stop=False).finite
    assert not vote([group_with(bad, 1.0)], sums(1.0, 1), world(2), stop=False).finite
    assert not vote([group_with(1.0)], sums(bad, 1), world(2), stop=False).finite


def test_a_step_without_tokens_divides_by_one() -> None:
    agreed = vote([group_with(0.0)], sums(0.0, 0), world(), stop=False)
    assert (agreed.loss, agreed.grad_norm) == (0.0, 0.0)
    assert gradient_divisor(agreed, 1.0) == 1.0


def test_the_clip_bounds_the_norm_of_the_mean() -> None:
    agreed = Vote(loss=1.0, tokens=4, grad_norm=5.0, stop=False)
    assert gradient_divisor(agreed, clip=10.0) == 4.0
    assert gradient_divisor(agreed, clip=1.0) == 20.0


def test_a_rank_with_both_ends_of_a_tied_table_adds_them_up() -> None:
    parts = []
    for value, copy in ((1.0, False), (2.0, True)):
        group = flat_group([("embed.weight", torch.zeros(2, 2))])
        group.slots = [slot_of("embed.weight", (2, 2), tied=True, copy=copy)]
        group.grad.fill_(value)
        parts.append(group)
    finish_gradients(parts, world())
    assert [set(group.grad.tolist()) for group in parts] == [{3.0}, {3.0}]
    # One of the copies answers for the table.
    assert float(square_sum(parts, world())) == 4 * 9.0


def test_what_tp_ranks_hold_whole_but_see_in_parts_is_summed() -> None:
    mesh = world()
    mesh.parts = Twins.of(2)
    group = flat_group([("norm.weight", torch.zeros(3)), ("mlp.up.weight", torch.zeros(2, 2))])
    norm = slot_of("norm.weight", (3,), whole=True, partial=True)
    group.slots = [norm if slot.name == "norm.weight" else slot for slot in group.slots]
    group.grad.fill_(1.0)
    finish_gradients([group], mesh)
    found = {slot.name: set(group.grad[here].tolist()) for slot, here, _ in group.spans()}
    assert found == {"norm.weight": {2.0}, "mlp.up.weight": {1.0}}


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2, tp=2), Layout(dp_shard=2, tp=2, zero=1), Layout(cp=2, tp=2)],
)
@pytest.mark.parametrize("whole", [True, False])
def test_exactly_one_rank_answers_for_each_element(layout: Layout, whole: bool) -> None:
    """Over all ranks every element counts once: slices over tp, shards over dp."""
    answers = 0.0
    for rank in range(layout.world):
        mesh = mesh_of(layout, rank)
        group: Any = SimpleNamespace(replicas=mesh.replicas)
        part = 1 / mesh.shards.size / (1 if whole else layout.tp)
        answers += part * counts_here(group, slot_of("w", (4, 4), whole=whole), mesh)
        assert not counts_here(group, slot_of("w", (4, 4), whole=whole, copy=True), mesh)
    assert answers == 1.0
