"""Users' bug reports as tests: trainer cases 2 to 5, and what else can go wrong with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_gates import Gate, ratios, wrong
from parity_jobs import EXPERTS, job, layout
from rank_results import run_on_ranks

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.opening import newest
from meshwright.checkpoint.reader import Reader
from meshwright.conduct.local import LocalEngine
from meshwright.plan.layout import Layout

# Two dense layers, then one routed one: the first of two stages has no experts at all.
SMALL = {
    **EXPERTS,
    "layers": 3,
    "first_dense_layers": 2,
    "n_experts": 4,
    "n_shared_experts": 0,
}
ALL_LOSSES = {**SMALL, "aux_loss": 0.5, "seq_aux_loss": 0.7, "z_loss": 0.3}
ROUTER = "layers.2.mlp.router.weight"


@pytest.fixture(scope="module")
def gate(engine: LocalEngine, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """The check, with references shared by the tests of this file."""
    return Gate(engine, tokens, tmp_path_factory.mktemp("experts"))


# Case 2: the norm adds up the squares of all experts once, wherever they live.

HOMES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "everywhere": {"dp_replicate": 2},
    "ep over replicas": {"dp_replicate": 2, "ep": 2},
    "ep over shards": {"dp_shard": 2, "ep": 2},
    "ep over cp": {"cp": 2, "ep": 2},
    "ep over tp": {"tp": 2, "ep": 2},
    "ep beside etp": {"dp_replicate": 2, "tp": 2, "ep": 2, "etp": 2},
    "in shards": {"dp_shard": 2, "cp": 2},
    "on one stage": {"dp_replicate": 2, "pp": 2, "stages": [2, 1], "ep": 2},
    "twice": {"dp_replicate": 2, "ep": 2, "expert_replicas": 2, "rebalance_above": 1e9},
}
GIVEN = {"experts": [2.0, 4.0, 6.0, 8.0]}


@pytest.mark.parametrize("name", HOMES)
def test_experts_norm_is_10_954452_wherever_they_live(
    engine: LocalEngine, tmp_path: Path, name: str
) -> None:
    how = layout(HOMES[name], 1)
    results = run_on_ranks(
        engine, tmp_path, "parity_case_workers:expert_norm", job(SMALL), how, {**GIVEN, "dense": 0}
    )
    assert [norm for norm, *_ in results] == pytest.approx([10.954452] * how.world, rel=1e-7)
    if name == "on one stage":  # the others have joined the collective, or nobody would be here
        assert sorted(held for _, _, held, _ in results) == [0, 0, 1, 1]


def test_dense_parameters_stay_equal_after_the_clip(engine: LocalEngine, tmp_path: Path) -> None:
    args = {**GIVEN, "dense": 1.0}
    for name in ("ep over replicas", "twice"):
        how = layout(HOMES[name], 1)
        one, two = run_on_ranks(
            engine, tmp_path, "parity_case_workers:expert_norm", job(SMALL), how, args
        )
        assert one == two
        assert one[:2] == pytest.approx([11.0, 11.0])


def test_averaging_the_norms_of_ranks_is_seen(engine: LocalEngine, tmp_path: Path) -> None:
    args = {**GIVEN, "dense": 0, "averaged": True}
    how = layout(HOMES["ep over replicas"], 1)
    results = run_on_ranks(
        engine, tmp_path, "parity_case_workers:expert_norm", job(SMALL), how, args
    )
    assert [norm for norm, *_ in results] == pytest.approx([7.236068] * 2)


# Case 3: an expert's gradient is the same however many ranks share the experts out.


@pytest.mark.parametrize("name", [name for name in HOMES if name.startswith("ep over")])
def test_every_gradient_has_ratio_1_at_ep_2(gate: Gate, name: str) -> None:
    found = gate.against_one_process(job(SMALL), layout(HOMES[name], 2))
    assert found.equal, found.worst
    experts = {n: r for n, r in ratios(found).items() if ".experts." in n}
    assert sorted(n.rpartition(".")[2] for n in experts) == ["down", "gate", "up"]
    assert list(ratios(found).values()) == pytest.approx([1.0] * len(ratios(found)), abs=1e-4)


def test_experts_scaled_by_ep_are_seen(gate: Gate) -> None:
    how = layout(HOMES["ep over replicas"], 2)
    found = gate.against_one_process(job(SMALL), how, "parity_expert_faults:experts_scaled_by_ep")
    assert set(wrong(found)) == {f"layers.2.mlp.experts.{name}" for name in ("gate", "up", "down")}
    assert list(wrong(found).values()) == pytest.approx([2.0] * 3, abs=1e-3)


# Case 4: the router under tp without ep.

SPLIT = {
    "etp, whole tokens": {"tp": 2, "etp": 2, "sp": False},
    "etp, sequence parallel": {"tp": 2, "etp": 2},
    "no etp": {"tp": 2},
}


@pytest.mark.parametrize("name", SPLIT)
def test_every_gradient_has_ratio_1_under_tp(gate: Gate, name: str) -> None:
    found = gate.against_one_process(job(SMALL), layout(SPLIT[name], 1))
    assert found.equal, found.worst
    assert ROUTER in ratios(found)
    assert list(ratios(found).values()) == pytest.approx([1.0] * len(ratios(found)), abs=1e-4)


@pytest.mark.parametrize("name", SPLIT)
def test_a_router_not_summed_over_tp_is_seen(gate: Gate, name: str) -> None:
    entry = "parity_expert_faults:router_not_summed_over_tp"
    found = gate.against_one_process(job(SMALL), layout(SPLIT[name], 1), entry)
    assert set(wrong(found)) == {ROUTER}


# Case 5: router losses weigh the same in any number of micro-batches and ranks.

SPREAD = {
    "accumulated": {},
    "dp": {"dp_shard": 2},
    "cp": {"cp": 2},
    "tp, etp": {"tp": 2, "etp": 2},
    "tp, no etp": {"tp": 2},
    "pp": {"pp": 2},
    "cp and ep over tp": {"cp": 2, "tp": 2, "ep": 4},
}


@pytest.mark.parametrize(
    ("name", "accumulation"), [*((name, 4) for name in SPREAD), ("tp, etp", 1), ("cp", 1)]
)
def test_router_losses_do_not_depend_on_how_tokens_are_cut(
    gate: Gate, name: str, accumulation: int
) -> None:
    """All three losses at once, so large that they make most of the router's gradient."""
    found = gate.against_one_process(job(ALL_LOSSES), layout(SPREAD[name], accumulation))
    assert found.equal, found.worst
    assert ratios(found)[ROUTER] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_a_coefficient_of_1e_2_is_not_one_of_0(gate: Gate, loss: str) -> None:
    without, with_loss = (
        newest(gate.trace(job({**SMALL, loss: c}), layout({}, 1)) / "gradients")
        for c in (0.0, 1e-2)
    )
    name = f"gradient/{ROUTER}"
    before, after = without.read(name), with_loss.read(name)
    assert np.linalg.norm(after - before) > 1e-3 * np.linalg.norm(before)


LOSS_FAULTS = {
    "router_losses_discarded": (ALL_LOSSES, {"dp_shard": 2}, 1),
    "router_losses_times_4": (ALL_LOSSES, {}, 4),
    "router_losses_of_every_copy": (ALL_LOSSES, SPREAD["tp, etp"], 1),
    "sequence_loss_of_own_part": ({**SMALL, "seq_aux_loss": 0.7}, {"cp": 2}, 1),
}


@pytest.mark.parametrize("fault", LOSS_FAULTS)
def test_a_wrong_router_loss_is_seen(gate: Gate, fault: str) -> None:
    model, axes, accumulation = LOSS_FAULTS[fault]
    how = layout(axes, accumulation)
    found = gate.against_one_process(job(model), how, f"parity_expert_faults:{fault}")
    assert ROUTER in wrong(found)


# Each reduction of what routers and replicated experts learn from.


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"cp": 2}, {"tp": 2}])
def test_counts_not_summed_are_seen(gate: Gate, axes: dict[str, Any]) -> None:
    model = {**SMALL, "bias_update_rate": 0.01}
    assert gate.against_one_process(job(model), layout(axes, 1)).equal
    entry = "parity_expert_faults:counts_not_summed"
    found = gate.against_one_process(job(model), layout(axes, 1), entry)
    assert wrong(found, "router load")


def test_places_of_an_expert_not_summed_are_seen(gate: Gate) -> None:
    entry = "parity_expert_faults:places_of_an_expert_not_summed"
    found = gate.against_one_process(job(SMALL), layout(HOMES["twice"], 1), entry)
    assert wrong(found) and all(".experts." in name for name in wrong(found))


# Nothing is counted twice where layers are run again.


def test_recomputing_counts_nothing_twice(
    engine: LocalEngine, tokens: Path, tmp_path: Path
) -> None:
    model = {**SMALL, "aux_loss": 1e-2, "seq_aux_loss": 1e-2, "bias_update_rate": 0.01}
    shared = {"tokens": str(tokens)}

    def seen(recompute: dict[str, Any], **more: Any) -> list[Any]:
        how = layout({"dp_shard": 2, "ep": 2, **recompute}, 2)
        args = {**shared, **more}
        return run_on_ranks(
            engine, tmp_path, "parity_case_workers:routed_counts", job(model), how, args
        )

    kept = seen({})
    total = 16 * 32 * 2  # every token of the batch goes to two experts
    assert [sum(counts["2"]) for _, _, counts in kept[0][0]] == [total] * 2
    assert kept[0][0][0][1] > 0
    assert seen({"recompute": "full"}) == kept
    assert seen({"recompute": "selective", "recompute_parts": ["mlp"]}) == kept
    again = seen({"recompute": "full"}, again=True)
    assert [sum(counts["2"]) for _, _, counts in again[0][0]] == [2 * total] * 2


# Experts without tokens, and numbers that do not divide.


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "ep": 2}, {"dp_shard": 2, "ep": 2}])
@pytest.mark.parametrize("unused", [[1], [2, 3]])
def test_experts_without_tokens_get_gradients_of_zero(
    engine: LocalEngine, tokens: Path, tmp_path: Path, axes: dict[str, Any], unused: list[int]
) -> None:
    """One of a rank's experts, and all of a rank's."""

    def step(how: Layout, name: str) -> tuple[Any, Reader]:
        args = {"tokens": str(tokens), "unused": unused, "save": str(tmp_path / name)}
        found = run_on_ranks(
            engine, tmp_path, "parity_case_workers:silent_experts", job(SMALL), how, args
        )[0]
        return found, newest(tmp_path / name)

    (expected, alone), (found, split) = step(layout({}, 1), "one"), step(layout(axes, 2), "split")
    assert found == pytest.approx(expected, rel=1e-5)
    for name in alone.names:
        a, b = alone.read(name), split.read(name)
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a), name
        if ".experts." in name:
            assert not b[unused].any() and all(b[e].any() for e in range(4) if e not in unused)


def test_experts_that_do_not_divide_are_refused() -> None:
    for axes, key in (({"dp_replicate": 3, "ep": 3}, "ep"), ({"tp": 3, "etp": 3}, "etp")):
        with pytest.raises(ConfigError, match=f"layout.{key}.*does not divide"):
            job(
                {**SMALL, "heads": 6, "kv_heads": 6, "hidden": 36, "vocab": 96},
                data={"seq_len": 36, "global_batch": 12},
                layout=axes,
                cluster={"ref": "local:3"},
            )
