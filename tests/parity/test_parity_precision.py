"""Training in fewer bits follows training in fp32, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from parity_jobs import LAYOUTS, layout

OnRanks = Callable[..., list[Any]]
STEPS = 4


@pytest.fixture
def losses(on_ranks: OnRanks, tokens: Path, tmp_path: Path) -> Callable[..., NDArray[np.float64]]:
    """Loss and gradient norm of each step of a model under a layout, [steps, 2]."""

    def run(model: str, axes: dict[str, Any]) -> NDArray[np.float64]:
        shared = {"tokens": str(tokens), "until": STEPS, "save": str(tmp_path / str(len(axes)))}
        found = on_ranks("train_and_save", layout(axes, 2), model, **shared)
        assert all(rank == found[0] for rank in found)
        return np.asarray(found[0])[:, :2]

    return run


# What each setting may move: relative difference of losses, and of gradient norms.
CLOSE: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({"precision": "bf16"}, 5e-3, 5e-2),
    "bf16 gradients": ({"precision": "bf16", "grad_precision": "bf16"}, 5e-3, 5e-2),
    "fp16": ({"precision": "fp16"}, 2e-3, 1e-2),
    "fp16, loss in chunks": ({"precision": "fp16", "loss_chunk": 48}, 2e-3, 1e-2),
    "fp8 by tensor": ({"precision": "fp8", "fp8_scaling": "tensor"}, 1e-2, 1e-1),
    "fp8 by row": ({"precision": "fp8", "fp8_scaling": "row"}, 1e-2, 1e-1),
    "fp8 by block": ({"precision": "fp8", "fp8_scaling": "block"}, 1e-2, 1e-1),
    "gradients sent in bf16": ({"grad_compression": "bf16"}, 1e-4, 1e-2),
    "gradients sent in fp8": ({"grad_compression": "fp8"}, 1e-3, 3e-2),
    "gradients sent in int8": ({"grad_compression": "int8"}, 1e-3, 3e-2),
}


ROWS = [
    *((setting, "fsdp2") for setting in CLOSE),
    *((setting, "dp2xtp2xpp2") for setting in ("fp16", "fp8 by row", "gradients sent in int8")),
]


@pytest.mark.parametrize(("setting", "name"), ROWS)
def test_setting_follows_fp32(
    losses: Callable[..., NDArray[np.float64]], setting: str, name: str
) -> None:
    keys, loss_rel, norm_rel = CLOSE[setting]
    axes = {key: value for key, value in LAYOUTS[name].items() if key != "etp"}
    full, fewer = losses("tied", axes), losses("tied", {**axes, **keys})
    assert fewer[:, 0] == pytest.approx(full[:, 0], rel=loss_rel)
    assert fewer[:, 1] == pytest.approx(full[:, 1], rel=norm_rel)
    assert (fewer != full).any()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_follow_fp32(losses: Callable[..., NDArray[np.float64]], precision: str) -> None:
    axes = LAYOUTS["ep2+etp2"]
    full, fewer = losses("moe-bias", axes), losses("moe-bias", {**axes, "precision": precision})
    assert fewer[:, 0] == pytest.approx(full[:, 0], rel=1e-2)
    assert (fewer != full).any()


def test_an_overflow_skips_the_step_everywhere(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    """The loss scale begins far too high: steps are skipped until gradients fit. A resume after
    that goes on with the same scale, the same count of updates, and the same losses."""
    how = layout({"dp_shard": 2, "pp": 2, "precision": "fp16"}, 2)
    start, entry = 2.0**40, "parity_move_workers:overflowing"
    args = {"tokens": str(tokens), "scale": start, "save": str(tmp_path / "a"), "save_at": 26}
    found = on_ranks(entry, how, "untied", **args)
    assert all(rank[0] == found[0][0] for rank in found)
    scales, losses, applied = found[0]
    skipped = sum(now < before for before, now in pairwise([start, *scales]))
    assert scales[0] == start / 2
    assert scales[-1] == min(scales) > 1
    assert applied == len(scales) - skipped > 0
    saved = tmp_path / "a"
    resumed = on_ranks(entry, how, "untied", **args, load=str(saved))[0]
    assert resumed[:2] == [scales[26:], losses[26:]]


def test_a_loss_scale_stays_with_its_precision(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    """fp32 leaves no scale to fp16, nor fp16 one to fp32, where a step that fails must stop."""
    entry, axes = "parity_move_workers:overflowing", {"dp_shard": 2}
    for saved_as, loaded_as, expected in (("fp32", "fp16", 2.0**16), ("fp16", "fp32", 1.0)):
        save = tmp_path / saved_as
        args = {"tokens": str(tokens), "save": str(save), "save_at": 28}
        first = layout({**axes, "precision": saved_as}, 2)
        on_ranks(entry, first, "untied", **args, scale=2.0**16 if saved_as == "fp16" else 1.0)
        commit = save
        then = layout({**axes, "precision": loaded_as}, 2)
        fresh = {"load": str(commit), "scale": expected}
        scales = on_ranks(entry, then, "untied", **args, **fresh)[0][0]
        assert scales == [expected] * 2
