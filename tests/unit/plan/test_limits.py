"""Impossible requests say what is in the way and what would do."""

from __future__ import annotations

import pytest
from plan_questions import question

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster, cluster
from meshwright.plan.limits import refusal
from meshwright.plan.search import feasible, search
from meshwright.plan.search_question import Question


def _maybe(name: str, chips: int) -> Cluster | None:
    try:
        return cluster(f"{name}:{chips}")
    except ConfigError:
        return None


def _refused(asked: Question) -> tuple[str, int | None]:
    name = asked.cluster.name.partition(":")[0]
    found = refusal(asked, search(asked), lambda chips: _maybe(name, chips))
    return str(found.error(asked)), found.smallest


def test_case_8_70b_does_not_train_on_8_a100() -> None:
    """Megatron-LM#1000: 18 bytes a parameter are 1.26 TB, 8 chips have 0.69."""
    asked = question("llama3-70b", "a100:8")
    text, smallest = _refused(asked)
    assert "memory" in text and "\n" not in text
    assert smallest is not None and f"a100:{smallest}" in text
    assert 16 <= smallest <= 40
    assert len(search(asked.on(cluster(f"a100:{smallest}"))).best)


@pytest.mark.parametrize(
    ("model", "name", "batch"), [("llama3-70b", "a100", 512), ("llama3-8b", "rtx4090", 64)]
)
def test_the_smallest_cluster_is_the_smallest(model: str, name: str, batch: int) -> None:
    asked = question(model, f"{name}:1", global_batch=batch)
    _, smallest = _refused(asked)
    assert smallest
    for chips in range(1, smallest):
        there = _maybe(name, chips)
        assert there is None or not feasible(asked.on(there)), chips


def test_a_batch_that_no_data_parallel_size_divides_is_named() -> None:
    asked = question("llama3-8b", "p5:512", global_batch=3, seq_len=128)
    found = search(asked)
    if not found.legal:
        text, _ = _refused(asked)
        assert "no legal layout" in text
    else:
        assert any("global batch of 3" in reason for reason in found.refused)


def test_more_ranks_than_can_be_used_is_not_called_memory() -> None:
    """8,192 chips, a batch of one short sequence, 32 layers: nothing can use them all."""
    asked = question("llama3-8b", "p5:8192", global_batch=1, seq_len=256)
    text, _ = _refused(asked)
    assert "no legal layout" in text and "memory" not in text


def test_what_no_cluster_can_do_is_said() -> None:
    asked = question("llama3-8b", "rtx4090:1", global_batch=1, seq_len=8192)
    found = refusal(asked, search(asked), lambda _: None)
    assert found.smallest is None
    assert "no cluster of up to" in str(found.error(asked))
