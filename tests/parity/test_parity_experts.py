"""Experts that change places change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity_jobs import layout
from rank_results import saved_tensors

OnRanks = Callable[..., list[Any]]

PLACES: dict[str, dict[str, Any]] = {
    "ep2": {"dp_replicate": 2, "ep": 2},
    "ep2, four copies": {"dp_replicate": 8, "ep": 2},
    "ep2 in shards": {"dp_shard": 8, "ep": 2},
    "ep2, split, in a pipeline": {"dp_shard": 2, "tp": 2, "pp": 2, "ep": 2, "etp": 2},
}


@pytest.mark.parametrize("name", PLACES)
def test_a_move_changes_no_bit(on_ranks: OnRanks, tokens: Path, tmp_path: Path, name: str) -> None:
    """Ten steps in which experts change places after the third, and ten in which they stay."""

    def run(move_after: int | None) -> tuple[list[Any], dict[str, bytes]]:
        how = layout({**PLACES[name], "rebalance_above": 1e9}, 2)
        save = tmp_path / str(move_after)
        args = {"tokens": str(tokens), "until": 6, "save": str(save), "move_after": move_after}
        ranks = on_ranks("parity_move_workers:moving_experts", how, "moe-bias", **args)
        return ranks, saved_tensors(save)

    (stay, still), (moving, moved) = run(None), run(3)
    assert [rank["losses"] for rank in moving] == [rank["losses"] for rank in stay]
    for name in still:
        assert moved[name] == still[name] or name.startswith("router.places"), name
    # They did move: every rank holds other experts than before.
    assert all(rank["held"][0] != rank["held"][1] for rank in moving)


def test_a_lasting_imbalance_moves_experts(on_ranks: OnRanks, tokens: Path, tmp_path: Path) -> None:
    how = layout({"dp_replicate": 2, "ep": 2, "rebalance_above": 1.0001}, 1)
    args = {"tokens": str(tokens), "until": 14, "save": str(tmp_path / "a"), "move_after": None}
    moves = on_ranks("parity_move_workers:moving_experts", how, "moe-aux", **args)[0]["moves"]
    assert moves
    assert all(move["after"] < move["before"] for move in moves)


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_resume_goes_on_with_experts_where_they_were(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path, replicas: int
) -> None:
    """Moved after step 2, saved after 4, gone on to 6: the bits of six steps in one go."""
    axes = {"dp_shard": 4, "ep": 2, "rebalance_above": 1.0001, "expert_replicas": replicas}
    how, entry = layout(axes, 2), "parity_move_workers:moving_experts"
    shared = {"tokens": str(tokens), "move_after": 2}

    def run(name: str, until: int, **more: Any) -> list[Any]:
        save = str(tmp_path / name)
        return on_ranks(entry, how, "moe-bias", **shared, until=until, save=save, **more)

    whole = run("whole", 6)
    first = run("half", 4)
    half = tmp_path / "half"
    rest = run("rest", 6, load=str(half))
    assert first[0]["losses"] + rest[0]["losses"] == whole[0]["losses"]
    assert [rank["held"][0] for rank in rest] == [rank["held"][1] for rank in first]
    assert saved_tensors(tmp_path / "rest") == saved_tensors(tmp_path / "whole")
