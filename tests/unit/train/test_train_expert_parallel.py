"""Experts on several ranks compute what one process does (trainer cases 2-5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_workers import Case, on_one_process, on_ranks
from torch import Tensor

from meshwright.plan.experts import Placement

Results = dict[str, Tensor]

LOSSES = {"aux_loss": 1e-2, "seq_aux_loss": 1e-2, "z_loss": 1e-3}
DEEPSEEK = {
    "gate": "sigmoid",
    "top_k": 3,
    "expert_groups": 4,
    "top_k_groups": 2,
    "n_shared_experts": 1,
    "routed_scaling": 2.5,
}
SHUFFLED = Placement((6, 0, 5, 3, 1, 7, 2, 4), ep=4)
SWAPPED = Placement((7, 3, 1, 0, 4, 2, 6, 5), ep=4)
TWICE = Placement((0, 1, 2, 3, 4, 5, 6, 7, 0, 5, 0, 2), ep=4)
OTHER_TWICE = Placement((3, 2, 1, 7, 7, 5, 0, 3, 6, 4, 2, 0), ep=4)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Results]]:
    """Every case of 4 ranks, run in one go."""
    cases = {
        "batch": Case(ep=4, model=LOSSES),
        "slices": Case(ep=4, cut="slices", model=LOSSES),
        "context": Case(ep=4, cut="context", model=LOSSES | {"capacity_factor": 1.0}),
        "capacity slices": Case(ep=4, cut="slices", model={"capacity_factor": 0.5}),
        "capacity batch": Case(ep=4, model={"capacity_factor": 0.5}),
        "deepseek": Case(ep=4, cut="context", model=LOSSES | DEEPSEEK),
        "unused": Case(ep=4, model=LOSSES, unused=(0, 1, 6)),
        "first": Case(ep=4, cut="first", model={"aux_loss": 1e-2}),
        "shuffled": Case(ep=4, model=LOSSES, placement=SHUFFLED),
        "moved": Case(ep=4, model=LOSSES, placement=SHUFFLED, moved_to=SWAPPED),
        "twice": Case(ep=4, model=LOSSES, placement=TWICE),
        "twice moved": Case(ep=4, model=LOSSES, placement=TWICE, moved_to=OTHER_TWICE),
        "etp": Case(ep=2, etp=2, model=LOSSES | {"capacity_factor": 1.0}),
        "etp context": Case(ep=2, etp=2, cut="context", model=LOSSES | DEEPSEEK),
        "etp alone": Case(etp=4, model=LOSSES),
        "bf16": Case(ep=4, model=LOSSES, dtype=torch.bfloat16),
        "bf16 moved": Case(ep=4, model=LOSSES, dtype=torch.bfloat16, moved_to=SWAPPED),
        "wrong gradient": Case(ep=4, model=LOSSES, fault="gradient times ep"),
        "wrong penalty": Case(ep=2, etp=2, model=LOSSES, fault="penalty not divided"),
        "wrong sequence": Case(ep=4, cut="slices", model=LOSSES, fault="sequence loss of own part"),
    }
    results = on_ranks(list(cases.values()), tmp_path_factory.mktemp("four"))
    return dict(zip(cases, zip(cases.values(), results, strict=True), strict=True))


def worst(one: Results, other: Results) -> dict[str, float]:
    """Largest difference of each result, relative to the largest value of the reference."""
    return {
        name: float((other[name].double() - one[name].double()).abs().max())
        / max(float(one[name].double().abs().max()), 1e-30)
        for name in other
    }


EQUAL = [
    "batch",
    "slices",
    "context",
    "capacity slices",
    "capacity batch",
    "deepseek",
    "unused",
    "first",
    "shuffled",
    "twice",
    "twice moved",
    "etp",
    "etp context",
    "etp alone",
]


@pytest.mark.parametrize("name", EQUAL)
def test_ranks_compute_what_one_process_does(
    four: dict[str, tuple[Case, Results]], name: str
) -> None:
    case, found = four[name]
    errors = worst(on_one_process(case), found)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("name", "seen_in"),
    [
        ("wrong gradient", "grad.experts.gate"),
        ("wrong penalty", "grad.router.weight"),
        ("wrong sequence", "grad.router.weight"),
    ],
)
def test_faults_are_seen(four: dict[str, tuple[Case, Results]], name: str, seen_in: str) -> None:
    case, found = four[name]
    assert worst(on_one_process(case), found)[seen_in] > 1e-4


def test_the_expert_gradient_ratio_is_one_and_the_fault_shows_ep(
    four: dict[str, tuple[Case, Results]],
) -> None:
    case, right = four["batch"]
    reference = on_one_process(case)["grad.experts.up"].norm()
    assert float(right["grad.experts.up"].norm() / reference) == pytest.approx(1.0, rel=1e-5)
    wrong = four["wrong gradient"][1]["grad.experts.up"].norm()
    assert float(wrong / reference) == pytest.approx(4.0, rel=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zero(
    four: dict[str, tuple[Case, Results]],
) -> None:
    _, found = four["unused"]
    assert found["counts"][[0, 1, 6]].tolist() == [0, 0, 0]
    for name in ("gate", "up", "down"):
        assert not found[f"grad.experts.{name}"][[0, 1, 6]].any()


@pytest.mark.parametrize(
    ("one", "other"), [("batch", "shuffled"), ("batch", "moved"), ("bf16", "bf16 moved")]
)
def test_a_placement_changes_no_bit(
    four: dict[str, tuple[Case, Results]], one: str, other: str
) -> None:
    first, second = four[one][1], four[other][1]
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_capacity_drops_the_same_tokens_however_they_are_cut(
    four: dict[str, tuple[Case, Results]],
) -> None:
    by_slice, by_batch = four["capacity slices"], four["capacity batch"]
    assert max(worst(by_batch[1], by_slice[1]).values()) < 1e-5
    dropless = on_one_process(replace(by_batch[0], model={}))
    assert worst(dropless, by_batch[1])["out"] > 0.1
