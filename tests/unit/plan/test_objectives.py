"""What is best, and what nothing beats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_questions import question

from meshwright.catalog import cluster
from meshwright.plan.goodput import Reliability
from meshwright.plan.objectives import Choice, best_choice, choices, ranked, sizes
from meshwright.plan.search import search
from meshwright.plan.search_front import front

ROWS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=40)


@given(ROWS)
def test_a_front_is_what_nothing_beats(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, float)
    chosen = set(front(*table.T).tolist())
    for index, row in enumerate(table):
        as_good = np.all(table <= row, axis=1)
        better = as_good & np.any(table < row, axis=1)
        if index in chosen:
            assert not np.any(better)
        else:
            assert np.any(better) or any(np.all(table[i] == row) for i in chosen)


@pytest.fixture(scope="module")
def every() -> list[Choice]:
    asked = question("llama3-8b", "p5:64", global_batch=512)
    questions = [asked.on(cluster(f"p5:{chips}")) for chips in (64, 32, 16)]
    return choices(questions, 1e12, Reliability())


def test_each_objective_is_served_by_the_front(every: list[Choice]) -> None:
    soonest, cheapest = best_choice(every, "time"), best_choice(every, "cost")
    both, safest = best_choice(every, "goodput"), best_choice(every, "memory")
    dollars = {id(c): c.bill.dollars or 0.0 for c in every}
    assert all(dollars.values())
    assert soonest.bill.days == min(c.bill.days for c in every)
    assert cheapest.bill.dollars == min(dollars.values())
    assert soonest.question.cluster.chips == 64
    assert cheapest.bill.days >= soonest.bill.days
    products = {id(c): c.bill.days * dollars[id(c)] for c in every}
    assert products[id(both)] == min(products.values())
    assert safest.oom_probability <= min(c.oom_probability for c in (soonest, cheapest))


def test_nothing_on_the_front_is_beaten(every: list[Choice]) -> None:
    for one in every:
        for other in every:
            assert not (
                other.bill.days < one.bill.days
                and (other.bill.dollars or 0.0) < (one.bill.dollars or 0.0)
                and other.oom_probability < one.oom_probability - 1e-3
            )


def test_memory_prefers_room() -> None:
    found = search(question("llama3-70b", "p5:128"))
    roomy = ranked(found, "memory")
    assert roomy.memory_bytes[0] == found.best.memory_bytes.min()
    assert roomy.step_s[0] >= found.best.step_s[0]


def test_sizes_are_halves_down_to_a_node() -> None:
    assert sizes(cluster("p5:64")) == [64, 32, 16, 8]
    assert sizes(cluster("p5:24")) == [24]
