"""Every layout trains the same model as one process; and every kind of check can fail.

By default a part of the acceptance matrix runs; all of it where PARITY=all (`make test-all`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from parity_jobs import LAYOUTS, MODELS, layout, matrix, quick
from parity_table import Table

from meshwright.train.compare import Comparison

Compare = Callable[..., Comparison]

ROWS = list(matrix() if os.environ.get("PARITY") == "all" else quick())
# What the matrix leaves out: other families, and experts that drop tokens.
MORE = [
    *(("gpt2-tied", name, 2) for name in ("fsdp2", "tp2", "tp2+sp", "ring2", "dp2xtp2xpp2")),
    *(("qwen3", name, 2) for name in ("tp2", "tp2+spxpp2", "ulysses2")),
    *(("deepseek", name, 2) for name in ("tp2", "tp2+sp", "ring2", "ep4", "all five on 8")),
    *(("moe-capacity", name, 4) for name in ("ring2", "ep2+etp1", "ep2+etp2", "all five on 8")),
]


@pytest.mark.parametrize(("model", "name", "accumulation"), [*ROWS, *MORE])
def test_layout_equals_one_process(
    against_one_process: Compare, table: Table, model: str, name: str, accumulation: int
) -> None:
    how = layout(LAYOUTS[name], accumulation, experts="n_experts" in MODELS[model])
    found = against_one_process(model, how)
    table.add(model, name, accumulation, found)
    assert found.equal, (found.loss_rel, found.grad_norm_rel, found.worst)


HOT = {"expert_replicas": 2, "rebalance_above": 1.2}

# Settings that change how a step is computed, not what it computes.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "recompute selective": ("moe-aux", {"tp": 2, "etp": 2, "recompute": "selective"}),
    "recompute full, zero 3": ("moe-aux", {"dp_shard": 2, "ep": 2, "recompute": "full"}),
    "recompute full, zbv": ("moe-bias", {"pp": 2, "schedule": "zbv", "recompute": "full"}),
    "recompute to a budget": (
        "untied",
        {"pp": 2, "recompute": "budget", "activation_gib": 0.0006},
    ),
    "loss in chunks": ("tied", {"tp": 2, "loss_chunk": 48}),
    "loss in chunks, zbv": ("tied", {"pp": 2, "schedule": "zbv", "loss_chunk": 48}),
    "offload": ("moe-aux", {"dp_shard": 2, "offload": "both"}),
    "domains": ("untied", {"dp_replicate": 4, "domain": 2}),
    "stages by hand": ("untied", {"pp": 2, "stages": [1, 5]}),
    "hot experts twice": ("moe-aux", {"dp_replicate": 2, "ep": 2, **HOT}),
    "hot experts twice, sharded": ("moe-aux", {"dp_shard": 4, "ep": 2, **HOT}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_changes_nothing(against_one_process: Compare, name: str) -> None:
    model, axes = SETTINGS[name]
    found = against_one_process(model, layout(axes, 4))
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
    "domains_not_summed": ("untied", {"dp_replicate": 4, "domain": 2}, 1, "gradient"),
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
