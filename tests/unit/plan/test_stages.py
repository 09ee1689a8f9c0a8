"""Layers are shared out by cost: exactly over stages, and over the ranks that hold several."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout
from meshwright.plan.stages import (
    StageCosts,
    assign_layers,
    balance,
    predicted_costs,
    stage_layers,
)

layer_costs = st.lists(st.sampled_from([1.0, 1.0, 2.5, 0.3, 0.0]), min_size=1, max_size=8)
extras = st.sampled_from([0.0, 0.2, 1.0, 4.0])
bounded = settings(deadline=None, max_examples=80)


def _spec(layers: int = 32, hidden: int = 2048, vocab: int = 256_000) -> ModelSpec:
    return ModelSpec(family="llama", layers=layers, hidden=hidden, heads=16, vocab=vocab)


def _all_cuts(layers: int, stages: int) -> list[list[range]]:
    """Every way to cut; without empty inner stages where there are layers enough."""
    ways = [
        [range(begin, end) for begin, end in pairwise([0, *inner, layers])]
        for inner in combinations_with_replacement(range(layers + 1), stages - 1)
    ]
    return [way for way in ways if layers < stages or all(way[1:-1])]


def _loads(ranges: list[range], costs: StageCosts) -> list[float]:
    loads = [sum(costs.layers[layer] for layer in stage) for stage in ranges]
    loads[0] += costs.first_extra
    loads[-1] += costs.last_extra
    return loads


def _even(layers: int, stages: int) -> list[range]:
    return [range(layers * s // stages, layers * (s + 1) // stages) for s in range(stages)]


@bounded
@given(layer_costs, extras, extras, st.integers(1, 5))
def test_stages_are_the_best_of_all_cuts(
    layers: list[float], first: float, last: float, stages: int
) -> None:
    costs = StageCosts(tuple(layers), first, last)
    found = assign_layers(layers, first, last, stages)
    ways = _all_cuts(len(layers), stages)
    assert found in ways
    slowest = min(max(_loads(way, costs)) for way in ways)
    assert max(_loads(found, costs)) == pytest.approx(slowest)
    rest = [way for way in ways if max(_loads(way, costs)) <= slowest + 1e-6]
    least = min(sum(load**2 for load in _loads(way, costs)) for way in rest)
    assert sum(load**2 for load in _loads(found, costs)) == pytest.approx(least)


def test_equally_slow_choices_differ_and_the_most_even_one_is_taken() -> None:
    costs = StageCosts((1.0,) * 8, 0.0, 3.0)
    assert sorted(_loads(assign_layers([1.0] * 8, 0.0, 3.0, 4), costs)) == [2.0, 3.0, 3.0, 3.0]
    slowest = [max(_loads(way, costs)) for way in _all_cuts(8, 4)]
    assert slowest.count(3.0) > 1 and max(_loads(_even(8, 4), costs)) == 5.0
    found = assign_layers([4.0, 1.0, 1.0, 1.0, 1.0], 0.0, 0.0, 3)
    assert [len(stage) for stage in found] == [1, 2, 2]


@pytest.mark.parametrize("layers, stages", [(1, 1), (1, 4), (3, 4), (4, 4)])
def test_few_layers_still_make_all_the_stages(layers: int, stages: int) -> None:
    found = assign_layers([1.0] * layers, 0.0, 0.0, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert len(found) == stages and max(map(len, found)) == 1


def test_a_dear_head_empties_the_last_stage_of_layers_but_never_an_inner_one() -> None:
    found = assign_layers([1.0] * 4, 9.0, 9.0, 4)
    assert [len(stage) for stage in found] == [0, 2, 2, 0]
    found = assign_layers([9.0, 1.0, 1.0, 1.0], 0.0, 0.0, 4)
    assert [len(stage) for stage in found] == [1, 1, 1, 1]
    assert all(assign_layers([0.0] * 4, 0.0, 0.0, 4)[1:-1])


@pytest.mark.parametrize(
    "spec, layout, uneven",
    [
        (_spec(), Layout(pp=4), 0.66),
        (_spec(), Layout(pp=4, vpp=2, schedule="interleaved"), 0.66),
        (_spec(), Layout(pp=4, vpp=4, schedule="interleaved"), 0.66),
        (_spec(), Layout(pp=4, schedule="zbv"), 0.66),
        (_spec(), Layout(pp=4, schedule="dualpipev"), 0.66),
        (_spec(layers=16), Layout(pp=2), 0.77),
        (_spec(layers=16), Layout(pp=2, schedule="zbv"), 0.77),
        (_spec(layers=16, hidden=4096), Layout(pp=4), 0.65),
        (_spec(layers=16, hidden=4096), Layout(pp=4, schedule="zbv"), 0.65),
        (_spec(layers=61, hidden=7168, vocab=129_280), Layout(pp=16), 0.77),
    ],
)
def test_a_heavy_head_is_balanced_to_092_and_even_stages_are_not(
    spec: ModelSpec, layout: Layout, uneven: float
) -> None:
    costs = predicted_costs(spec, seq_len=4096)
    found = stage_layers(spec, layout, seq_len=4096)
    assert [layer for stage in found for layer in stage] == list(range(spec.layers))
    assert balance(found, costs, layout) >= 0.92
    assert balance(_even(spec.layers, layout.virtual_stages), costs, layout) <= uneven


@bounded
@given(
    st.integers(3, 8),
    extras,
    extras,
    st.sampled_from([(2, 2, "interleaved"), (3, 2, "interleaved"), (2, 1, "zbv"), (3, 1, "zbv")]),
)
def test_the_slowest_rank_of_equal_layers_is_as_fast_as_it_can_be(
    layers: int, first: float, last: float, shape: tuple[int, int, str]
) -> None:
    layout = Layout.model_validate({"pp": shape[0], "vpp": shape[1], "schedule": shape[2]})
    costs = StageCosts((1.0,) * layers, first, last)
    found = stage_layers(_spec(), layout, 1, costs)
    ways = _all_cuts(layers, layout.virtual_stages)
    assert found in ways
    assert balance(found, costs, layout) == pytest.approx(
        max(balance(way, costs, layout) for way in ways)
    )


def test_a_rank_that_holds_embedding_and_head_gets_fewer_layers_in_both_its_stages() -> None:
    layout, costs = Layout(pp=2, schedule="zbv"), StageCosts((1.0,) * 10, 1.0, 3.0)
    found = stage_layers(_spec(), layout, 1, costs)
    assert len(found[0]) + len(found[3]) == 3 and len(found[1]) + len(found[2]) == 7
    assert balance(found, costs, layout) == 1.0


def test_the_user_and_measured_times_go_before_the_prediction() -> None:
    spec, layout = _spec(layers=4), Layout(pp=2)
    named = Layout(pp=2, stages=[3, 1])
    slow_first = StageCosts((5.0, 1.0, 1.0, 1.0), 0.0, 0.0)
    assert stage_layers(spec, named, 64, slow_first) == [range(0, 3), range(3, 4)]
    assert stage_layers(spec, layout, 64, slow_first) == [range(0, 1), range(1, 4)]
    assert stage_layers(spec, layout, 64) == [range(0, 4), range(4, 4)]


def test_predicted_costs_tell_dense_layers_from_routed_ones() -> None:
    spec = ModelSpec(
        family="deepseek_v3",
        layers=4,
        hidden=64,
        heads=4,
        vocab=256,
        ffn_hidden=512,
        n_experts=8,
        top_k=2,
        n_shared_experts=1,
        expert_ffn_hidden=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        first_dense_layers=1,
    )
    costs = predicted_costs(spec, seq_len=128)
    assert costs.layers[0] > 1.5 * costs.layers[1] and len(set(costs.layers[1:])) == 1
    assert costs.last_extra == 6.0 * 64 * 256
    assert sum(costs.layers) + costs.last_extra == pytest.approx(spec.flops_per_token(128))


def test_balance_is_mean_over_max_of_ranks() -> None:
    costs = StageCosts((1.0, 1.0, 2.0, 2.0), 1.0, 1.0)
    loop = Layout(pp=2, vpp=2, schedule="interleaved")
    assert balance(_even(4, 4), costs, loop) == 1.0
    assert balance(_even(4, 4), costs, Layout(pp=2, schedule="zbv")) == 4.0 / 5.0
    assert balance([range(0, 2), range(2, 4)], costs, Layout(pp=2)) == 4.0 / 5.0
