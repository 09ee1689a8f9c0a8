"""Chaos tests use the stand-ins of the conductor's unit tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "conduct"))

from meshwright.train import member


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
