"""Where experts cannot live and what cannot move them: refused in one line with a way out, and
that way leads out."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.plan import expert_rules
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout

Keys = dict[str, Any]

MOE: Keys = {
    "family": "qwen3_moe",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "vocab": 512,
    "n_experts": 8,
    "top_k": 2,
    "expert_ffn_hidden": 48,
}
DENSE: Keys = {"family": "llama", "n_experts": 0, "top_k": 0, "expert_ffn_hidden": 0}

# The layout, what is changed in MOE, the line that refuses it, and the way out of the layout.
REFUSED: list[tuple[Keys, Keys, str, Keys]] = [
    (
        {"dp_replicate": 2, "ep": 2},
        DENSE,
        "layout.ep = 2: needs experts, but model.n_experts = 0; leave ep out or set n_experts",
        {"ep": 1},
    ),
    (
        {"tp": 2, "etp": 2},
        DENSE,
        "layout.etp = 2: needs experts, but model.n_experts = 0; leave etp out or set n_experts",
        {"etp": 1},
    ),
    (
        {"dp_replicate": 2, "expert_replicas": 2},
        DENSE,
        "layout.expert_replicas = 2: needs experts, but model.n_experts = 0; leave "
        "expert_replicas out or set n_experts",
        {"expert_replicas": 0},
    ),
    (
        {"dp_replicate": 2, "rebalance_above": 1.5},
        DENSE,
        "layout.rebalance_above = 1.5: needs experts, but model.n_experts = 0; leave "
        "rebalance_above out or set n_experts",
        {"rebalance_above": 0.0},
    ),
    (
        {"tp": 4, "etp": 2},
        {"kv_heads": 4},
        "layout.etp = 2: takes the ranks of layout.tp = 4: all or none; set etp = 4 or 1",
        {"etp": 4},
    ),
    (
        {"tp": 2, "etp": 2},
        {"expert_ffn_hidden": 49},
        "layout.etp = 2: does not divide model.expert_ffn_hidden = 49; set etp = 1",
        {"etp": 1},
    ),
    (
        {"tp": 2, "sp": False},
        {},
        "layout.sp = False: with layout.tp = 2 and etp = 1 each rank routes its own slice of the "
        "sequence; set sp = true or etp = 2",
        {"sp": True},
    ),
    (
        {"tp": 2, "sp": False},
        {},
        "layout.sp = False: with layout.tp = 2 and etp = 1 each rank routes its own slice of the "
        "sequence; set sp = true or etp = 2",
        {"etp": 2},
    ),
    (
        {"dp_replicate": 4, "ep": 3},
        {},
        "layout.ep = 3: cannot be cut out of the 4 ranks of a stage that share experts "
        "(layout.dp_replicate x dp_shard x cp); it takes 1, 2, 4",
        {"ep": 4},
    ),
    (
        {"dp_replicate": 2, "dp_shard": 3, "ep": 2},
        {},
        "layout.ep = 2: cannot be cut out of the 6 ranks of a stage that share experts "
        "(layout.dp_replicate x dp_shard x cp); it takes 1, 3, 6",
        {"ep": 1},
    ),
    (
        {"dp_replicate": 3, "ep": 3},
        {},
        "layout.ep = 3: does not divide model.n_experts = 8; it takes 1, 2, 4, 8",
        {"ep": 1},
    ),
    (
        {"dp_replicate": 4, "ep": 4, "expert_replicas": 2, "rebalance_above": 1.2},
        {},
        "layout.ep = 4: does not divide model.n_experts = 8 and layout.expert_replicas = 2 "
        "together; it takes 1, 2, 5, 10",
        {"expert_replicas": 4},
    ),
    (
        {"dp_replicate": 2, "ep": 2, "rebalance_above": 0.2},
        {},
        "layout.rebalance_above = 0.2: is a max / mean, which is never below 1; use 1.2, say, or "
        "0 for never",
        {"rebalance_above": 1.2},
    ),
    (
        {"dp_replicate": 2, "rebalance_above": 1.2},
        {},
        "layout.rebalance_above = 1.2: moves experts among ranks, but layout.ep = 1; raise ep or "
        "leave rebalance_above out",
        {"ep": 2},
    ),
    (
        {"dp_replicate": 2, "ep": 2, "rebalance_above": 1.2, "offload": "both"},
        {},
        "layout.rebalance_above = 1.2: sends masters and moments from chip to chip, but "
        "layout.offload = 'both' keeps them on the host; leave rebalance_above out, or set "
        "offload = 'activations' or 'none'",
        {"offload": "activations"},
    ),
    (
        {"dp_replicate": 2, "ep": 2, "expert_replicas": 2},
        {},
        "layout.expert_replicas = 2: is for experts that turn out hot, but layout.rebalance_above "
        "= 0 never looks; set rebalance_above = 1.2, say, or leave expert_replicas out",
        {"rebalance_above": 1.2},
    ),
    (
        {"dp_replicate": 4, "ep": 2, "rebalance_above": 1.2, "grad_compression": "fp8"},
        {},
        "layout.rebalance_above = 1.2: and layout.grad_compression = 'fp8' contradict: its "
        "rounding depends on where an expert lies; set grad_compression = 'bf16' or 'none', or "
        "leave rebalance_above out",
        {"grad_compression": "bf16"},
    ),
]


def resolved(layout: Keys, model: Keys) -> Job:
    """A job on as many ranks as `layout` has, whose batch suits any of them."""
    return resolve_job(
        {
            "job": {"steps": 10},
            "model": {**MOE, **model},
            "data": {"seq_len": 256, "global_batch": 36},
            "layout": layout,
            "cluster": {"ref": f"local:{Layout(**layout).world}"},
        }
    )


@pytest.mark.parametrize(
    ("layout", "model", "line", "way_out"), REFUSED, ids=lambda value: str(value)[:50]
)
def test_refused_with_a_way_out_that_works(
    layout: Keys, model: Keys, line: str, way_out: Keys
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(layout, model)
    assert (str(caught.value), caught.value.exit_code) == (line, 2)
    resolved({**layout, **way_out}, model)


def test_every_refusal_has_a_row() -> None:
    tree = ast.parse(Path(str(expert_rules.__file__)).read_text())
    rules = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    seen = set()
    for layout, model, _, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            resolved(layout, model)
        seen.add(traceback.extract_tb(caught.value.__traceback__)[-1].lineno)
    assert seen == rules


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "grad_compression": "int8"},
        {"tp": 2, "dp_shard": 2, "ep": 4},
        {"tp": 2, "cp": 2, "sp": False, "etp": 2, "ep": 2},
        {"dp_replicate": 4, "ep": 2, "rebalance_above": 1.2, "grad_compression": "bf16"},
        {
            "dp_replicate": 2,
            "dp_shard": 2,
            "ep": 4,
            "expert_replicas": 8,
            "rebalance_above": 1.0,
        },
    ],
    ids=str,
)
def test_what_can_run_is_let_through(layout: Keys) -> None:
    resolved(layout, {})
