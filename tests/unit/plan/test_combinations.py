"""Combinations that cannot run: each is refused in one line that names both options and a way out,
and that way leads out."""

from __future__ import annotations

import ast
import copy
import traceback
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.plan import combinations
from meshwright.plan.job import Job, resolve_job

Changes = dict[str, Any]

GOOD: dict[str, Any] = {
    "job": {"steps": 10},
    "model": {"preset": "tiny"},
    "data": {"seq_len": 256, "global_batch": 32},
    "layout": {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 4},
    "cluster": {"ref": "local:8"},
}


def dense(ranks: int, **layout: Any) -> Changes:
    return {"layout": layout, "cluster.ref": f"local:{ranks}"}


# What is changed in GOOD, the line that refuses it, and what is changed besides by its way out.
REFUSED: list[tuple[Changes, str, Changes]] = [
    (
        {"resilience": {"recheck_every": 5}},
        "resilience.recheck_every = 5: only ranks that can be replaced are checked; set "
        "resilience.redundancy = 'auto'",
        {"resilience": {"recheck_every": 5, "redundancy": "auto"}},
    ),
    (
        {"layout.dp_replicate": 4},
        "layout = 'dp4xtp2xpp2': its axes multiply to 16 ranks but cluster.ref = 'local:8' has "
        "8; change an axis or set cluster.ref = 'local:16'",
        {"cluster.ref": "local:16"},
    ),
    (
        dense(4, dp_replicate=4, domain=3),
        "layout.domain = 3: does not divide the number of replicas, 4 (layout.dp_replicate = "
        "4); set 1, 2, 4, or 0",
        {"layout.domain": 2},
    ),
    (
        dense(4, dp_replicate=2, cp=2, domain=3),
        "layout.domain = 3: does not divide the number of replicas, 4 (layout.dp_replicate = 2 "
        "x layout.cp = 2); set 1, 2, 4, or 0",
        {"layout.domain": 4},
    ),
    (
        dense(4, dp_shard=2, cp=2, domain=2),
        "layout.domain = 2: does not divide the number of replicas, 1 (layout.dp_replicate = "
        "1); set 1, or 0",
        {"layout.domain": 0},
    ),
    (
        dense(4, dp_replicate=4, domain=2, grad_compression="int8"),
        "layout.domain = 2: is passed over by layout.grad_compression = 'int8', which adds up "
        "over all replicas at once; set domain = 0 or grad_compression = 'none'",
        {"layout.domain": 0},
    ),
    (
        dense(2, tp=2, grad_compression="bf16"),
        "layout.grad_compression = 'bf16': has no gradients to send: layout.dp_replicate, "
        "dp_shard and cp are 1; raise one of them or set grad_compression = 'none'",
        {"layout.grad_compression": "none"},
    ),
    (
        {"model.heads": 3, "model.kv_heads": 3, "model.head_dim": 32},
        "layout.tp = 2: does not divide model.heads = 3; it takes 1, 3",
        {"layout.tp": 1, "cluster.ref": "local:4"},
    ),
    (
        {"model.kv_heads": 1},
        "layout.tp = 2: does not divide model.kv_heads = 1; it takes 1",
        {"layout.tp": 1, "cluster.ref": "local:4"},
    ),
    (
        {"model.ffn_hidden": 353},
        "layout.tp = 2: does not divide model.ffn_hidden = 353; it takes 1",
        {"layout.tp": 1, "cluster.ref": "local:4"},
    ),
    (
        {"model.vocab": 50257},
        "layout.tp = 2: does not divide model.vocab = 50257; it takes 1, 29",
        {"layout.tp": 1, "cluster.ref": "local:4"},
    ),
    (
        {
            **dense(2, tp=2),
            "model.n_experts": 4,
            "model.top_k": 2,
            "model.n_shared_experts": 1,
            "model.expert_ffn_hidden": 49,
        },
        "layout.tp = 2: does not divide model.n_shared_experts x expert_ffn_hidden = 49; it "
        "takes 1, 7, 49",
        {"layout.tp": 1, "cluster.ref": "local:1"},
    ),
    (
        {"data.seq_len": 255},
        "data.seq_len = 255: is not a multiple of 2, into which layout.tp = 2 with sp = true "
        "cut it; use 256 or change the axes, or set layout.sp = false",
        {"layout.sp": False},
    ),
    (
        {**dense(4, cp=2, tp=2), "data.seq_len": 254},
        "data.seq_len = 254: is not a multiple of 4, into which layout.cp = 2 (ring) and "
        "layout.tp = 2 with sp = true cut it; use 256 or change the axes",
        {"data.seq_len": 256},
    ),
    (
        {**dense(3, cp=3, cp_method="ulysses"), "data.seq_len": 250},
        "data.seq_len = 250: is not a multiple of 3, into which layout.cp = 3 (ulysses) cut it;"
        " use 252 or change the axes",
        {"data.seq_len": 252, "layout.cp_method": "ring"},
    ),
    (
        {"model": {"preset": "gpt2", "vocab": 50304}, "data.seq_len": 2048},
        "data.seq_len = 2048: is longer than model.max_seq_len = 1024; shorten it or set "
        "model.max_seq_len = 2048",
        {"model.max_seq_len": 2048},
    ),
    (
        dense(8, cp=8, cp_method="ulysses"),
        "layout.cp = 8: does not divide the 4 heads of a rank (model.heads / layout.tp), which "
        "cp_method = 'ulysses' shares out; it takes 1, 2, 4, or set cp_method = 'ring'",
        {"layout.cp_method": "ring"},
    ),
    (
        dense(1, schedule="zbv"),
        "layout.schedule = 'zbv': needs stages, but layout.pp = 1; raise pp or set schedule = "
        "'1f1b'",
        {"layout.schedule": "1f1b"},
    ),
    (
        dense(2, pp=2, schedule="interleaved"),
        "layout.vpp = 1: is one stage a rank, but layout.schedule = 'interleaved' runs several;"
        " set vpp = 2 or more, or schedule = '1f1b'",
        {"layout.vpp": 2},
    ),
    (
        dense(2, pp=2, vpp=2),
        "layout.vpp = 2: contradicts layout.schedule = '1f1b', which puts 1 on a rank; leave "
        "vpp out or set schedule = 'interleaved'",
        {"layout.schedule": "interleaved"},
    ),
    (
        dense(2, pp=2, schedule="zbv", vpp=3),
        "layout.vpp = 3: contradicts layout.schedule = 'zbv', which puts 2 on a rank; leave vpp"
        " out or set schedule = 'interleaved'",
        {"layout.vpp": 1},
    ),
    (
        {"model.layers": 1},
        "layout.pp = 2: makes 2 stages under layout.schedule = '1f1b', more than model.layers ="
        " 1; use pp <= 1",
        {"layout.pp": 1, "cluster.ref": "local:4"},
    ),
    (
        {**dense(2, pp=2, schedule="dualpipev"), "model.layers": 3},
        "layout.pp = 2: makes 4 stages under layout.schedule = 'dualpipev', more than "
        "model.layers = 3; use schedule = '1f1b', one a rank",
        {"layout.schedule": "1f1b"},
    ),
    (
        {**dense(4, pp=4, schedule="interleaved", vpp=2), "model.layers": 5},
        "layout.pp = 4: makes 8 stages under layout.schedule = 'interleaved', more than "
        "model.layers = 5; use pp <= 2",
        {"layout.pp": 2, "cluster.ref": "local:2"},
    ),
    (
        dense(2, pp=2, stages=[1, 2]),
        "layout.stages = [1, 2]: must be 2 numbers (layout.pp x chunks) that add up to "
        "model.layers = 4; mend it, or leave stages out to have layers assigned by cost",
        {"layout.stages": [1, 3]},
    ),
    (
        dense(2, pp=2, stages=[4]),
        "layout.stages = [4]: must be 2 numbers (layout.pp x chunks) that add up to "
        "model.layers = 4; mend it, or leave stages out to have layers assigned by cost",
        {"layout.stages": []},
    ),
    (
        dense(4, pp=4, stages=[2, 0, 1, 1]),
        "layout.stages = [2, 0, 1, 1]: gives 0 layers to stage 1 of 4 (layout.pp = 4); only the"
        " first and the last may have none: give it one, or leave stages out",
        {"layout.stages": [0, 2, 2, 0]},
    ),
    (
        dense(2, pp=2, stages=[-1, 5]),
        "layout.stages = [-1, 5]: gives -1 layers to stage 0 of 2 (layout.pp = 2); only the "
        "first and the last may have none: give it one, or leave stages out",
        {"layout.stages": [0, 4]},
    ),
    (
        {"data.global_batch": 30},
        "data.global_batch = 30: is not a multiple of dp x micro_batch = 2 x 4 = 8; use 24 or 32",
        {"data.global_batch": 32},
    ),
    (
        {"data.global_batch": 3},
        "data.global_batch = 3: is not a multiple of dp x micro_batch = 2 x 4 = 8; use 8",
        {"data.global_batch": 8},
    ),
    (
        dense(1, fp8_scaling="block"),
        "layout.fp8_scaling = 'block': scales nothing under layout.precision = 'fp32'; set "
        "precision = 'fp8' or leave fp8_scaling out",
        {"layout.precision": "fp8"},
    ),
    (
        dense(1, recompute="budget"),
        "layout.recompute = 'budget': needs a budget, but layout.activation_gib = 0; set "
        "activation_gib to what a rank may keep, or recompute = 'full'",
        {"layout.activation_gib": 1.0},
    ),
    (
        dense(1, activation_gib=2.0),
        "layout.activation_gib = 2.0: bounds nothing under layout.recompute = 'none'; set "
        "recompute = 'budget' or leave activation_gib out",
        {"layout.recompute": "budget"},
    ),
    (
        dense(1, recompute_parts=["mlp"]),
        "layout.recompute_parts = ['mlp']: chooses nothing under layout.recompute = 'none'; set"
        " recompute = 'selective' or leave recompute_parts out",
        {"layout.recompute": "selective"},
    ),
    (
        dense(1, recompute="selective", recompute_parts=[]),
        "layout.recompute_parts = []: is empty, but layout.recompute = 'selective' recomputes "
        "what it lists; name 'attention' or 'mlp', or set recompute = 'none'",
        {"layout.recompute_parts": ["mlp"]},
    ),
    (
        dense(1, recompute="budget", activation_gib=1e-6),
        "layout.activation_gib = 1e-06: recomputing everything still keeps 0.000488 GiB on a "
        "rank; raise it, or lower micro_batch",
        {"layout.activation_gib": 1.0},
    ),
]


def resolved(*all_changes: Changes) -> Job:
    """GOOD with dotted keys or whole sections changed."""
    tables = copy.deepcopy(GOOD)
    for dotted, value in (item for changes in all_changes for item in changes.items()):
        section, dot, key = dotted.partition(".")
        table, name = (tables[section], key) if dot else (tables, section)
        table[name] = copy.deepcopy(value)
    return resolve_job(tables)


@pytest.mark.parametrize(("changes", "line", "way_out"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_with_a_way_out_that_works(changes: Changes, line: str, way_out: Changes) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(changes)
    assert (str(caught.value), caught.value.exit_code) == (line, 2)
    resolved(changes, way_out)


def raised_from(changes: Changes) -> tuple[str, int]:
    """File and line of the statement that refuses `changes`."""
    with pytest.raises(ConfigError) as caught:
        resolved(changes)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.lineno is not None
    return frame.filename, frame.lineno


def test_every_refusal_has_a_row() -> None:
    path = str(combinations.__file__)
    tree = ast.parse(Path(path).read_text())
    rules = {(path, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    assert rules <= {raised_from(changes) for changes, _, _ in REFUSED}


@pytest.mark.parametrize(
    "changes",
    [
        dense(1, cp_method="ulysses"),
        dense(4, dp_replicate=4, domain=4),
        dense(4, dp_replicate=4, domain=1, grad_precision="bf16"),
        dense(2, dp_replicate=2, grad_precision="bf16", grad_compression="int8"),
        dense(2, cp=2, zero=1, grad_compression="fp8"),
        dense(2, pp=2, schedule="zbv", vpp=2, recompute="full", offload="both"),
        dense(2, pp=2, schedule="gpipe", stages=[0, 4], precision="fp16"),
        dense(1, precision="fp8", fp8_scaling="block", compile=False),
    ],
    ids=str,
)
def test_what_can_run_or_does_no_harm_is_let_through(changes: Changes) -> None:
    resolved(changes)
