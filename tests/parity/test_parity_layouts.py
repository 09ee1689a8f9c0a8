"""Every layout trains the same model as one process; and every kind of check can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parity_jobs import LAYOUTS, layout

from meshwright.train.compare import Comparison

Compare = Callable[..., Comparison]

GPT2_LAYOUTS = ("fsdp2", "tp2", "tp2+sp", "pp2", "dp2xtp2xpp2", "fsdp2xtp2xpp2")


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_layout_equals_one_process(
    against_one_process: Compare, model: str, name: str, accumulation: int
) -> None:
    found = against_one_process(model, layout(LAYOUTS[name], accumulation))
    assert found.equal, (found.loss_rel, found.grad_norm_rel, found.worst)


@pytest.mark.parametrize("name", GPT2_LAYOUTS)
def test_gpt2_equals_one_process(against_one_process: Compare, name: str) -> None:
    found = against_one_process("gpt2-tied", layout(LAYOUTS[name], 2))
    assert found.equal, (found.loss_rel, found.grad_norm_rel, found.worst)


def _wrong(found: Comparison, what: str) -> dict[str, float]:
    """Norm ratios of the tensors out of bounds."""
    wrong = [one for one in found.tensors if not one.equal and one.what == what]
    return {one.name: one.norm_ratio for one in wrong}


def test_a_gradient_scaled_by_tp_is_seen(against_one_process: Compare) -> None:
    found = against_one_process(
        "untied", layout({"tp": 2}, 1), "parity_faults:gradient_scaled_by_tp"
    )
    assert not found.equal
    assert _wrong(found, "gradient") == {"head.weight": pytest.approx(2.0)}
    assert found.grad_norm_rel > 1e-5


def test_a_stage_clipped_by_its_own_norm_is_seen(against_one_process: Compare) -> None:
    found = against_one_process(
        "untied", layout({"pp": 2}, 4), "parity_faults:stage_clipped_by_its_own_norm"
    )
    # The gradients before clipping are right and AdamW hides the scale from the loss; the moments
    # tell.
    assert not found.equal
    assert not _wrong(found, "gradient")
    assert _wrong(found, "first moment")


# What each fault must be seen by: the kind of figure that is out of bounds.
FAULTS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "norms_not_summed_over_tp": ("untied", {"tp": 2}, 1, "gradient"),
    "tied_ends_not_summed": ("tied", {"pp": 2}, 4, "gradient"),
    "replicas_not_summed": ("untied", {"dp_replicate": 2}, 1, "gradient"),
    "shards_averaged": ("untied", {"dp_shard": 2}, 1, "gradient"),
    "one_micro_batch_forgotten": ("untied", {"pp": 2}, 4, "gradient"),
    "weights_start_by_local_index": ("untied", {"tp": 2}, 1, "loss"),
    "partial_sums_scaled": ("gpt2-tied", {"tp": 2, "sp": False}, 1, "gradient"),
    "stage_updated_by_another_rate": ("untied", {"pp": 2}, 1, "parameter"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(against_one_process: Compare, fault: str) -> None:
    model, axes, accumulation, kind = FAULTS[fault]
    found = against_one_process(model, layout(axes, accumulation), f"parity_faults:{fault}")
    assert not found.equal
    assert found.loss_rel > 1e-5 if kind == "loss" else _wrong(found, kind)


def test_norm_gradients_are_what_sequence_parallelism_breaks(against_one_process: Compare) -> None:
    found = against_one_process(
        "untied", layout({"tp": 2}, 1), "parity_faults:norms_not_summed_over_tp"
    )
    assert all("norm" in name for name in _wrong(found, "gradient"))
    assert len(_wrong(found, "gradient")) == 2 * 6 + 1
