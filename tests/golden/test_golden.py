"""What the shipped recipes resolve to and what the presets weigh, as text under review.

After a change that is meant: `make golden`, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.models import presets
from meshwright.plan.job import load_job

HERE = Path(__file__).parent
RECIPES = sorted((HERE.parents[1] / "recipes").glob("*.toml"))


def _check(path: Path, actual: str) -> None:
    if os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(actual, encoding="utf-8")
    assert path.exists(), f"{path} is missing; write it with `make golden`"
    assert actual == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_resolves_to_its_golden(recipe: Path) -> None:
    resolved = load_job(recipe).model_dump_json(indent=2)
    _check(HERE / f"{recipe.stem}.json", resolved + "\n")


def test_every_golden_has_its_recipe() -> None:
    recipes = {recipe.stem for recipe in RECIPES}
    assert recipes == {golden.stem for golden in HERE.glob("*.json")}
    assert "quickstart" in recipes


def test_presets_weigh_what_their_golden_says() -> None:
    lines = [f"{'preset':<16}{'parameters':>20}{'FLOPs per token':>22}{'at tokens':>12}"]
    for name in presets.names():
        model = presets.preset(name)
        flops = int(model.flops_per_token(model.max_seq_len))
        lines.append(f"{name:<16}{model.params:>20,}{flops:>22,}{model.max_seq_len:>12,}")
    _check(HERE / "presets.txt", "\n".join(lines) + "\n")
