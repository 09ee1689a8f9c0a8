"""The prediction of our own step against the step of the real trainer on fake tensors.

Prints a row for each layout: `pytest tests/unit/plan/test_own.py -s`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from own_table import ROWS, table_job

from meshwright.base.errors import ConfigError
from meshwright.plan import own_layers
from meshwright.plan.own import OwnStep, own_step
from meshwright.plan.own_groups import Group
from meshwright.train.dryrun import DryRun, dry_run

_LASTING = ("weights", "masters", "moments")
_WORKING = ("activations", "temporary", "communication", "gradients")
_TOLERANCE = 0.03


def traffic(found: DryRun | OwnStep) -> dict[tuple[str, str], tuple[int, int, int, float]]:
    """Collectives by axis and kind."""
    return {
        (t.axis, t.kind): (t.ranks, t.count, t.payload_bytes, round(t.wire_bytes, 3))
        for t in found.traffic
    }


def differences(measured: DryRun, predicted: OwnStep) -> dict[str, Any]:
    """What of a prediction does not hold."""
    here, there = measured.parts_bytes, predicted.parts_bytes
    found: dict[str, Any] = {}
    error = predicted.peak_bytes / measured.peak_bytes - 1
    if abs(error) > _TOLERANCE:
        found["peak"] = error
    # What stays through the step exactly; what comes and goes on its own, so that a large
    # optimizer state cannot hide it.
    lasting = {part: there[part] - here[part] for part in _LASTING if there[part] != here[part]}
    working = sum(there[p] for p in _WORKING) / sum(here[p] for p in _WORKING) - 1
    if lasting:
        found["lasting"] = lasting
    if abs(working) > _TOLERANCE:
        found["working"] = working
    if measured.flops != predicted.flops:
        found["flops"] = measured.flops, predicted.flops
    a, b = traffic(measured), traffic(predicted)
    wrong = {key: (a.get(key), b.get(key)) for key in {*a, *b} if a.get(key) != b.get(key)}
    if wrong:
        found["traffic"] = wrong
    row = f"peak {measured.peak_bytes:>12,} B {error:+.3%}, working {working:+.3%}"
    sys.stdout.write(f"{row}, other than predicted: {', '.join(found) or 'nothing'}  ")
    return found


@pytest.mark.parametrize(
    ("model", "layout", "rank"),
    ROWS,
    ids=[f"{model}-{'-'.join(f'{k}{v}' for k, v in how.items())}" for model, how, _ in ROWS],
)
def test_it_agrees_with_the_trainer(model: str, layout: dict[str, Any], rank: int) -> None:
    job = table_job(model, layout, seq_len=128 if model == "deepseek_v3" else 512)
    assert not differences(dry_run(job, rank), own_step(job, rank))


def test_the_table_has_every_family_and_thirty_layouts() -> None:
    families = {table_job(model, {}).model.family for model, _, _ in ROWS}
    assert len(ROWS) >= 30
    assert families == {"llama", "gpt2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"}


def _no_gather(_group: Group) -> None:
    """Weights of stage 3 that are never gathered."""


def _saves_nothing(layer: own_layers.Layer, *args: Any) -> Any:
    n_bytes, inputs, _, grads = args
    held: list[Any] = []
    return _KEEPING(layer, n_bytes, inputs, held, grads)


_KEEPING: Callable[..., Any] = own_layers.Layer.keeping


@pytest.mark.parametrize(
    ("place", "name", "fault", "layout", "what"),
    [
        (Group, "start_gather", _no_gather, {"dp_shard": 2, "zero": 3}, "traffic"),
        (own_layers.Layer, "keeping", _saves_nothing, {"precision": "bf16"}, "working"),
        (own_layers, "_heads", lambda _: 5, {}, "flops"),
    ],
)
def test_a_fault_in_the_prediction_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    fault: Any,
    layout: dict[str, Any],
    what: str,
) -> None:
    job = table_job("llama", layout)
    measured = dry_run(job)
    assert not differences(measured, own_step(job))
    monkeypatch.setattr(place, name, fault)
    assert what in differences(measured, own_step(job))


def test_what_has_no_prediction_is_refused() -> None:
    with pytest.raises(ConfigError, match="use meshwright dryrun"):
        own_step(table_job("llama", {"offload": "activations"}))
