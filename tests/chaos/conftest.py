"""Chaos tests use the stand-ins of the conductor's unit tests."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "conduct"))

from meshwright.train import member

# By default, rows of a test, and tests of a file in which each takes long; all of them where
# CHAOS=all (`make chaos`).
ROWS, TESTS = 1, 2
LONG = ("test_chaos_nodes.py", "test_chaos_ways.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By default each test runs on its first rows, and some files in part."""
    if os.environ.get("CHAOS") == "all":
        return
    rows: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        rows[test] += "tests/chaos" in test
        tests[item.path.name] += item.path.name in LONG
        if rows[test] > ROWS or tests[item.path.name] > TESTS:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def own_number(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of the member that asks."""
    numbers: list[int] = []
    run = member.Member.run

    def noted(self: member.Member) -> None:
        numbers.append(self.number)
        run(self)

    monkeypatch.setattr(member.Member, "run", noted)
    return lambda: numbers[0]
