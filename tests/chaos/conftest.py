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

ROWS = 2  # of a test, by default; all of them where CHAOS=all (`make chaos`)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By default each test runs on its first few rows."""
    if os.environ.get("CHAOS") == "all":
        return
    rows: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        rows[test] += "tests/chaos" in test
        if rows[test] > ROWS:
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
