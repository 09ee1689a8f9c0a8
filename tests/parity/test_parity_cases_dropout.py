"""Trainer case 17: what dropout drops is the same in every layout, and nowhere twice."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from parity_gates import Gate
from parity_jobs import GPT2, LLAMA, job, layout
from rank_results import run_on_ranks

from meshwright.conduct.local import LocalEngine

LAYERS = 4
DROPS = {**LLAMA, "layers": LAYERS, "dropout": 0.1}


@pytest.fixture(scope="module")
def gate(engine: LocalEngine, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """The check, with references shared by the tests of this file."""
    return Gate(engine, tokens, tmp_path_factory.mktemp("dropout"))


SAME: dict[str, dict[str, Any]] = {
    "dp2": {"dp_replicate": 2},
    "tp2": {"tp": 2, "sp": False},
    "tp2+sp": {"tp": 2},
    "cp2": {"cp": 2},
    "ulysses2+sp": {"cp": 2, "tp": 2, "cp_method": "ulysses"},
    "pp2": {"pp": 2},
    "zbv2": {"pp": 2, "schedule": "zbv"},
    "fsdp2xtp2": {"dp_shard": 2, "tp": 2},
    "run again": {"recompute": "full"},
    "half run again": {"dp_shard": 2, "recompute": "selective"},
}


@pytest.mark.parametrize("name", SAME)
def test_a_layout_with_dropout_equals_one_process(gate: Gate, name: str) -> None:
    found = gate.against_one_process(job(DROPS), layout(SAME[name], 4))
    assert found.equal, (found.loss_rel, found.worst)


def test_gpt2_with_dropout_equals_one_process(gate: Gate) -> None:
    model = {**GPT2, "layers": LAYERS, "dropout": 0.1}
    assert gate.against_one_process(job(model), layout(SAME["fsdp2xtp2"], 2)).equal


FAULTS = {
    "same_dropout_in_every_step": {},
    "dropout_by_place_in_the_slice": {"tp": 2},
    "dropout_by_sample_of_the_rank": {"dp_replicate": 2},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mask_is_seen(gate: Gate, fault: str) -> None:
    found = gate.against_one_process(job(DROPS), layout(FAULTS[fault], 1), f"parity_faults:{fault}")
    assert found.loss_rel > 1e-5


def test_dropout_in_slices_of_a_ring_is_seen(gate: Gate) -> None:
    entry = "parity_faults:dropout_by_place_in_the_slice"
    assert gate.against_one_process(job(DROPS), layout({"cp": 2}, 1), entry).loss_rel > 1e-5


@pytest.fixture
def masks(engine: LocalEngine, tokens: Path, tmp_path: Path) -> Any:
    """Of each rank: digests of the masks of two steps, an evaluation's loss and its masks."""

    def of(axes: dict[str, Any], model: dict[str, Any] = DROPS) -> list[Any]:
        args, how = {"tokens": str(tokens)}, layout(axes, 1)
        name = "parity_case_workers:dropout_masks"
        return run_on_ranks(engine, tmp_path, name, job(model), how, args)

    return of


def test_masks_are_equal_where_activations_are_and_only_there(masks: Any) -> None:
    one, two = masks(SAME["tp2"])
    assert one == two
    for name in ("tp2+sp", "dp2", "cp2"):
        ranks = masks(SAME[name])
        digests = [digest for steps, *_ in ranks for digest in chain(*steps)]
        # Two halves of each layer, in each of two steps, on each of two ranks.
        assert len(digests) == 2 * LAYERS * 2 * 2
        assert len(set(digests)) == len(digests), name


def test_a_layer_that_is_run_again_drops_the_same(masks: Any) -> None:
    ((first, second),) = ([set(step) for step in steps] for steps, *_ in masks(SAME["run again"]))
    ((kept, _),) = ([set(step) for step in steps] for steps, *_ in masks({}))
    assert first == kept
    assert len(first | second) == 2 * LAYERS * 2


def test_an_evaluation_drops_nothing(masks: Any) -> None:
    ((_, loss, made),) = masks({})
    ((_, without, _),) = masks({}, {**DROPS, "dropout": 0.0})
    assert made == 0
    assert loss == without
