"""What settings promise besides equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity_jobs import layout

OnRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_zero_3_frees_layers_after_every_action(
    on_ranks: OnRanks, tokens: Path, schedule: str
) -> None:
    """Also after half a backward, whose weight gradients need no weights. One layer may be on its
    way already for what comes next."""
    how = layout({"dp_shard": 2, "pp": 2, "schedule": schedule}, 4)
    found = on_ranks("parity_move_workers:layers_present", how, tokens=str(tokens))
    assert all(most <= 1 for rank in found for most in rank.values()), found
