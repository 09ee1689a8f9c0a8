"""Parts of memory: what they are for known layouts, and what must hold for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.models.presets import preset
from meshwright.plan.cost.candidates import (
    CORE,
    DUALPIPE,
    DUALPIPEV,
    FULL,
    GPIPE,
    INTERLEAVED,
    NONE,
    ONE_F_ONE_B,
    SCHEDULES,
    ZB1P,
    ZB2P,
    ZBV,
    Candidates,
)
from meshwright.plan.cost.framework import framework, names
from meshwright.plan.cost.memory import (
    PARTS,
    STATES,
    TENSORS,
    Memory,
    add,
    memory,
    memory_parts,
    rank_parts,
)
from meshwright.plan.cost.memory_setting import setting_of
from meshwright.plan.cost.memory_stage import in_flight, stage_of
from meshwright.plan.cost.workload import Workload
from meshwright.plan.layout import Layout, Schedule
from meshwright.plan.schedule import build
from meshwright.plan.timeline import Costs, simulate

bounded = settings(deadline=None, max_examples=60)
powers = st.sampled_from([1, 2, 4, 8])


def _work(model: str = "llama3-8b", name: str = "megatron", **changes: Any) -> Workload:
    base = Workload(preset(model), 4096, 512, "bf16", framework(name))
    return replace(base, **changes)


def _memory(work: Workload, **columns: Any) -> Memory:
    return memory(work, Candidates.of(1, **columns))


def _total(work: Workload, **columns: Any) -> float:
    return float(_memory(work, **columns).total_bytes[0])


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Axes of a candidate that has data parallelism."""
    return {
        "dp_shard": draw(st.sampled_from([2, 4, 8])),
        "dp_replicate": draw(st.sampled_from([1, 2])),
        "tp": draw(powers),
        "cp": draw(st.sampled_from([1, 2])),
        "pp": draw(st.sampled_from([1, 2, 4])),
        "zero": draw(st.sampled_from([1, 2, 3])),
        "micro_batch": draw(st.sampled_from([1, 2])),
        "recompute": draw(st.sampled_from(range(5))),
        "schedule": draw(st.sampled_from([GPIPE, ONE_F_ONE_B, ZB1P, ZBV])),
        "sp": draw(st.booleans()),
    }


def test_states_of_a_dense_model_are_18_bytes_a_parameter() -> None:
    work = _work()
    found = add(_memory(work, zero=0).parts, STATES)[0]
    padded = 2 * work.spec.hidden * (-work.spec.vocab % 128)
    assert found == pytest.approx(18 * (work.spec.params + padded))


@pytest.mark.parametrize("model", ["gpt2-large", "qwen3-8b", "deepseek-v3", "mixtral-8x7b"])
def test_weights_are_those_of_the_model(model: str) -> None:
    work = _work(model, "meshwright", precision="fp32")
    found = _memory(work, zero=0).parts
    # fp32: 4 bytes of weights, 4 of gradients, 8 of Adam, no master copy.
    assert add(found, STATES)[0] == pytest.approx(16 * work.spec.params)
    assert found["master"][0] == 0


def test_the_distributed_optimizer_shards_twelve_bytes() -> None:
    """6 + 12 / dp bytes a parameter: facts/planning.md 6.1."""
    work = _work()
    for dp in (2, 8, 64):
        found = add(_memory(work, dp_shard=dp, zero=1).parts, STATES)[0]
        alone = add(_memory(work, zero=0).parts, STATES)[0]
        assert found == pytest.approx(alone * (6 + 12 / dp) / 18)


def test_experts_are_shared_out_by_ep_and_their_state_by_what_is_left() -> None:
    work = _work("mixtral-8x7b")
    layer = work.spec.n_experts * work.spec.expert_params * work.spec.layers
    whole = _memory(work, dp_shard=8, zero=1).parts
    split = _memory(work, dp_shard=8, zero=1, ep=4).parts
    assert whole["weights"][0] - split["weights"][0] == pytest.approx(2 * layer * 3 / 4)
    # All state is on eight chips either way: two copies of a quarter, or eight of all.
    assert whole["optimizer"][0] == pytest.approx(split["optimizer"][0])


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2)],
)
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 24])
def test_in_flight_is_what_the_schedule_holds(
    schedule: Schedule, chunks: int, pp: int, micro_batches: int
) -> None:
    orders = build(schedule, pp, chunks, micro_batches)
    held = simulate(orders, schedule, pp, Costs.even(pp * chunks)).peak_in_flight
    vpp = chunks if schedule == "interleaved" else 1
    c = Candidates.of(pp, pp=pp, vpp=vpp, schedule=SCHEDULES.index(schedule))
    closed = in_flight(c, np.arange(pp), np.full(pp, float(micro_batches)))
    assert np.all(closed >= held)
    if micro_batches >= 3 * pp or schedule in ("gpipe", "1f1b"):
        assert closed[0] == held[0]  # on the first rank exact, for a V on the others a bound


def test_dualpipev_holds_no_more_than_its_closed_form() -> None:
    for pp in (2, 4, 8):
        orders = build("dualpipev", pp, 2, 4 * pp)
        held = simulate(orders, "dualpipev", pp, Costs.even(2 * pp)).peak_in_flight
        c = Candidates.of(pp, pp=pp, schedule=DUALPIPEV)
        assert np.all(in_flight(c, np.arange(pp), np.full(pp, 4.0 * pp)) >= held)


def test_schedules_known_from_papers_keep_their_order() -> None:
    """ZB-H2 holds about twice as much as 1F1B, DualPipe one micro-batch more and two stages'
    weights."""
    work, columns = _work("llama3-70b"), {"pp": 8, "dp_shard": 8, "zero": 1}
    found = {
        code: _memory(work, schedule=code, **columns).parts
        for code in (ONE_F_ONE_B, ZB1P, ZB2P, DUALPIPE)
    }
    plain = found[ONE_F_ONE_B]["activations"][0]
    assert found[ZB1P]["activations"][0] == pytest.approx(plain)
    assert found[ZB2P]["activations"][0] == pytest.approx(plain * 15 / 8)
    assert found[DUALPIPE]["activations"][0] == pytest.approx(plain * 9 / 8)
    assert found[DUALPIPE]["weights"][0] == pytest.approx(2 * found[ONE_F_ONE_B]["weights"][0])


def test_interleaving_keeps_more_in_flight() -> None:
    """x (1 + (p - 1) / (p v)) of 1F1B on the first rank: Megatron, facts/planning.md 6.1."""
    work = _work("llama3-70b")
    plain = _memory(work, pp=8, dp_shard=2, zero=1).parts["activations"][0]
    many = _memory(work, pp=8, dp_shard=2, zero=1, vpp=5, schedule=INTERLEAVED)
    assert many.parts["activations"][0] == pytest.approx(plain * (1 + 7 / 40))


def test_recomputation_drops_what_it_says() -> None:
    work = _work("llama3-8b", flash_attention=False)
    none, core, full = (
        _memory(work, recompute=code).parts["activations"][0] for code in (NONE, CORE, FULL)
    )
    spec = work.spec
    scores = 2.0 * spec.layers * spec.heads * work.seq_len**2
    assert none - core == pytest.approx(scores)
    assert full == pytest.approx(2.0 * spec.layers * work.seq_len * spec.hidden)
    half = _memory(work, recompute=FULL, recompute_share=0.5).parts["activations"][0]
    assert half == pytest.approx((none + full) / 2)


def test_activations_of_a_dense_layer_follow_the_equation() -> None:
    """sbh [8 + 4ad/h + 4kd/h + 6f/h] + lse: facts/planning.md 6.1."""
    work = _work("llama3-8b")
    spec, tokens = work.spec, work.seq_len
    channels = 4 * spec.hidden + 2 * spec.query_dim + 2 * spec.kv_dim + 3 * spec.ffn_hidden
    layer = 2 * tokens * channels + 4 * tokens * spec.heads
    assert _memory(work).parts["activations"][0] == pytest.approx(spec.layers * layer)


def test_loss_in_slices_and_offloading_take_parts_away() -> None:
    work = _work()
    assert _memory(work, loss_chunk=1024).parts["logits"][0] == pytest.approx(
        _memory(work).parts["logits"][0] / 4
    )
    off = _memory(work, zero=0, offload_optimizer=True, offload_activations=True).parts
    assert off["optimizer"][0] == off["master"][0] == 0
    assert off["activations"][0] < _memory(work).parts["activations"][0] / 8


def test_imbalance_scales_what_experts_hold_alone() -> None:
    work = _work("qwen3-30b-a3b")
    even = _memory(work, dp_shard=8, ep=8, zero=1).parts
    skewed = _memory(replace(work, imbalance=2.0), dp_shard=8, ep=8, zero=1).parts
    assert skewed["experts"][0] == pytest.approx(2 * even["experts"][0])
    assert skewed["activations"][0] == even["activations"][0]


@bounded
@given(layouts(), st.sampled_from(names()))
def test_parts_are_finite_positive_and_add_up(columns: dict[str, Any], name: str) -> None:
    found = _memory(_work("llama3-8b", name), **columns)
    assert set(found.parts) == set(PARTS)
    assert all(np.isfinite(size).all() and (size >= 0).all() for size in found.parts.values())
    assert found.total_bytes[0] == pytest.approx(sum(size[0] for size in found.parts.values()))
    assert found.allocated_bytes[0] == pytest.approx(sum(found.parts[x][0] for x in TENSORS))
    assert found.allocated_bytes[0] <= found.reserved_bytes[0] <= found.total_bytes[0]


@bounded
@given(layouts(), st.sampled_from(["megatron", "torchtitan", "deepspeed", "meshwright"]))
def test_more_chips_never_raise_memory_of_one(columns: dict[str, Any], name: str) -> None:
    work = _work("llama3-8b", name)
    before = _total(work, **columns)
    for axis in ("dp_shard", "dp_replicate"):
        assert _total(work, **{**columns, axis: 2 * columns[axis]}) <= before * (1 + 1e-9)


@bounded
@given(layouts())
def test_more_tensor_or_context_parallelism_never_raises_memory(columns: dict[str, Any]) -> None:
    work = _work("llama3-70b")
    before = _memory(work, **columns).allocated_bytes[0]
    for axis in ("tp", "cp"):
        bigger = {**columns, axis: 2 * columns[axis]}
        hop = (
            _memory(work, **bigger).parts["buffers"][0]
            - _memory(work, **columns).parts["buffers"][0]
        )
        assert _memory(work, **bigger).allocated_bytes[0] <= before + max(hop, 0.0)


@bounded
@given(layouts(), st.integers(1, 3))
def test_more_tokens_never_lower_memory(columns: dict[str, Any], factor: int) -> None:
    before = _total(_work(), **columns)
    assert _total(_work(seq_len=4096 * factor), **columns) >= before


@bounded
@given(st.lists(layouts(), min_size=2, max_size=5))
def test_many_at_once_are_as_each_alone(rows: list[dict[str, Any]]) -> None:
    work = _work("deepseek-v3")
    parts = [Candidates.of(1, ep=2, **row) for row in rows]
    together = memory(work, Candidates.join(parts))
    for index, one in enumerate(parts):
        alone = memory_parts(work, one)
        assert together.parts.keys() == alone.keys()
        assert all(together.parts[k][index] == pytest.approx(alone[k][0]) for k in alone)


def test_the_heaviest_rank_is_the_heaviest_of_all() -> None:
    layout = Layout(pp=4, dp_shard=2, zero=1, micro_batch=1, precision="bf16")
    for model in ("llama3-8b", "llama3-70b", "deepseek-v2-lite"):
        work = _work(model, "meshwright")
        ranks = [sum(parts.values()) for parts in rank_parts(work, layout)]
        fast = memory(work, Candidates.from_layouts([layout])).total_bytes[0]
        layer = max(ranks) / (work.spec.layers / layout.pp)
        assert abs(fast - max(ranks)) <= 1.01 * layer, model


def test_first_and_last_stage_have_ends() -> None:
    work = _work("llama3-8b", "meshwright")
    parts = rank_parts(work, Layout(pp=4, precision="bf16"))
    assert [rank["embedding"] > 0 for rank in parts] == [True, False, False, True]
    assert [rank["logits"] > 0 for rank in parts] == [False, False, False, True]


def test_126_layers_over_64_stages_leave_one_less_at_each_end() -> None:
    """Llama 3 405B with 8 x 8 stages: 16 layers a rank, 15 on the first and the last."""
    work = _work("llama3-405b", seq_len=8192)
    s, c = setting_of(work), Candidates.of(1, pp=8, vpp=8, schedule=INTERLEAVED, dp_shard=2, zero=1)
    held = [stage_of(s.shape, c, np.array([r]), np.array([64.0]), True).dense[0] for r in range(8)]
    assert held == [15, 16, 16, 16, 16, 16, 16, 15]


def test_unknown_framework_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='did you mean "megatron"'):
        framework("megatorn")


def test_every_framework_says_where_its_numbers_come_from() -> None:
    for name in names():
        assert len(framework(name).origin) > 10, name
