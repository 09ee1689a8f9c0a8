"""What holds of every prediction, whatever the model, the cluster and the layout.

Bounds are worked out here from the model's shape and the nameplates alone, apart from the cost
model: no step is faster than its FLOPs, than what each chip reads and writes, than what crosses the
links of its groups. What runs beside compute is bounded by the longer of the two, so that a whole
step is compared with each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster, cluster
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.oom import BALANCED
from meshwright.plan.cost.workload import Precision
from meshwright.plan.layout import Layout, expert_grid
from meshwright.plan.prediction import Prediction, predict
from meshwright.plan.search_legal import check_layout
from meshwright.plan.search_question import Question

CLUSTERS = ("h100", "a100", "b200", "h200", "p4de", "gb200-nvl72", "mi300x", "trn2", "tpu-v5p")
FRAMEWORKS = ("megatron", "torchtitan", "deepspeed", "meshwright")
SLACK = 1 + 1e-9  # relative: sums of floats in another order
WIRE_BYTES = 2.0  # a value that travels has 16 bits; fp8 would travel as one byte
bounded = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.filter_too_much]
)


@dataclass(frozen=True)
class Case:
    """A question, a layout for it, and what is predicted."""

    question: Question
    layout: Layout

    @property
    def found(self) -> Prediction:
        return predict(self.question, self.layout)

    @property
    def bare_s(self) -> float:
        """Seconds of a step whose kernels start at once: bounds are closest to these."""
        return predict(_seconds_times(self.question, 0.0), self.layout).step_time_s

    @property
    def micro_batches(self) -> int:
        return self.question.global_batch // (self.layout.dp * self.layout.micro_batch)

    @property
    def rank_tokens(self) -> float:
        """Tokens that a tp group sees in one micro-batch."""
        return self.layout.micro_batch * self.question.seq_len / self.layout.cp


@st.composite
def specs(draw: st.DrawFn, family: str | None = None) -> ModelSpec:
    """Decoders of any family, from 0.1 to some hundred billion weights."""
    kind = family or draw(st.sampled_from(["llama", "gpt2", "qwen3", "qwen3_moe", "deepseek_v3"]))
    heads = draw(st.sampled_from([16, 32, 64]))
    raw: dict[str, Any] = {
        "family": kind,
        "layers": draw(st.integers(4, 24)) * 2,
        "heads": heads,
        "hidden": heads * 128,
        "ffn_hidden": heads * 128 * draw(st.sampled_from([2, 3, 4])),
        "vocab": draw(st.sampled_from([32_000, 50_304, 128_256])),
        "max_seq_len": 8192,
        "tie_embeddings": draw(st.booleans()),
    }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        raw["kv_heads"] = draw(st.sampled_from([8, heads]))
    if kind == "deepseek_v3":
        raw |= {"head_dim": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
                "q_lora_rank": draw(st.sampled_from([0, 1536]))}  # fmt: skip
    if kind in ("qwen3_moe", "deepseek_v3"):
        raw |= {"n_experts": draw(st.sampled_from([16, 64, 128])), "expert_ffn_hidden": 1024,
                "top_k": draw(st.sampled_from([2, 4, 8])),
                "first_dense_layers": draw(st.sampled_from([0, 2]))}  # fmt: skip
    return ModelSpec(**raw)


@st.composite
def layouts(draw: st.DrawFn, spec: ModelSpec) -> Layout:
    def size(*values: int) -> int:
        return draw(st.sampled_from(values))

    keys: dict[str, Any] = {
        "dp_replicate": size(1, 1, 2),
        "dp_shard": size(1, 2, 4, 16),
        "tp": size(1, 2, 8, 16),
        "cp": size(1, 1, 2, 4),
        "pp": size(1, 1, 2, 4),
        "micro_batch": size(1, 2),
        "sp": draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }
    if keys["dp_shard"] * keys["cp"] > 1:
        keys["zero"] = size(1, 2, 3)
    if keys["cp"] > 1:
        keys["cp_method"] = draw(st.sampled_from(["ring", "ulysses"]))
    if keys["pp"] > 1:
        keys["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zbv"]))
        keys["vpp"] = 2 if keys["schedule"] == "interleaved" else 1
    if spec.n_experts:
        keys["ep"] = size(1, 2, 8)
        keys["etp"] = size(1, keys["tp"])
        lanes = keys["dp_shard"] * keys["cp"] * (1 if keys["etp"] == keys["tp"] else keys["tp"])
        assume(lanes % keys["ep"] == 0)
    return Layout(**keys)


@st.composite
def cases(draw: st.DrawFn, family: str | None = None, precision: Precision = "bf16") -> Case:
    spec = draw(specs(family))
    layout = draw(layouts(spec))
    assume(spec.layers >= layout.virtual_stages and spec.kv_heads % layout.tp == 0)
    batch = layout.dp * layout.micro_batch * layout.pp * draw(st.sampled_from([1, 2, 8]))
    seq_len = draw(st.sampled_from([512, 2048, 8192]))
    name, style = draw(st.sampled_from(CLUSTERS)), draw(st.sampled_from(FRAMEWORKS))
    question = _question(spec, name, layout, style, seq_len, batch, precision)
    assume(precision in question.cluster.chip.peak_flops and _legal(question, layout))
    return Case(question, layout)


def _legal(question: Question, layout: Layout) -> bool:
    try:
        check_layout(question, layout)
    except ConfigError:
        return False
    return True


def _question(
    spec: ModelSpec,
    where: str,
    layout: Layout,
    style: str,
    seq_len: int,
    batch: int,
    precision: Precision = "bf16",
) -> Question:
    """Of a cluster of as many chips; where it is never so large, the example is passed over."""
    try:
        chips = cluster(f"{where}:{layout.world}")
    except ConfigError:
        reject()
    constants = Constants.shipped()
    return Question(spec, chips, framework(style), seq_len, batch, precision, BALANCED, constants)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_step_beats_its_flops(precision: Precision) -> None:
    @bounded
    @given(cases(precision=precision))
    def check(case: Case) -> None:
        question = case.question
        flops = question.spec.flops_per_token(question.seq_len) * question.tokens
        least = flops / question.cluster.chips / question.cluster.chip.peak(precision)
        assert case.bare_s * SLACK >= least

    check()


def rank_weights(spec: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Weights of layers, dense and routed, that a rank of the mean stage holds without ZeRO."""
    routed_layers = sum(spec.is_moe(layer) for layer in range(spec.layers))
    routed = routed_layers * spec.n_experts * spec.expert_params
    dense = sum(spec.matmul_params_of_layer(layer) for layer in range(spec.layers)) - routed
    etp = layout.etp if spec.n_experts else 1
    return dense / layout.tp / layout.pp, routed / (layout.ep * etp) / layout.pp


@bounded
@given(cases())
def test_no_step_beats_what_a_chip_reads_and_writes(case: Case) -> None:
    """Weights in 16 bits once forward and once backward in each micro-batch; 12 bytes of Adam's
    state and masters read and written once."""
    dense, routed = rank_weights(case.question.spec, case.layout)
    shards = case.layout.dp_shard * case.layout.cp if case.layout.zero_stage else 1
    moved = 2 * 2.0 * dense * case.micro_batches + 24.0 * (dense + routed) / shards
    bandwidth = case.question.cluster.chip.memory_bandwidth_bytes_s
    assert case.bare_s * SLACK >= moved / bandwidth


def crossing_s(where: Cluster, count: int, stride: int, whole_bytes: float) -> float:
    """What must enter a unit of each level, over the links of the group's ranks in it: all of
    `whole_bytes` but what is in there already."""
    seconds, inside = 0.0, 1
    for level in where.levels:
        last = level is where.levels[-1]
        here = count if last else max(1, min(count, level.size // stride))
        if here > inside:
            missing = whole_bytes * (count - inside) / count
            seconds = max(seconds, missing / inside / level.bandwidth_bytes_s)
        inside = max(inside, here)
    return seconds


def gradients_s(case: Case) -> float:
    """Gradients reduced, and the sums, or under ZeRO-1 and 2 the weights, gathered; under ZeRO-3
    see `weights_s`."""
    layout, where = case.layout, case.question.cluster
    dense, routed = rank_weights(case.question.spec, case.layout)
    group = layout.dp * layout.cp
    ways = WIRE_BYTES * (1 if layout.zero_stage == 3 else 2)
    whole = crossing_s(where, group, layout.tp, ways * dense)
    if case.question.spec.n_experts:
        grid = expert_grid(layout)
        apart = layout.ep * layout.etp
        whole += crossing_s(where, grid.replicas * grid.shards, apart, ways * routed)
    return whole


def weights_s(case: Case) -> float:
    """ZeRO-3: weights of layers gathered for each forward and each backward of a micro-batch."""
    layout = case.layout
    if layout.zero_stage != 3:
        return 0.0
    dense, _ = rank_weights(case.question.spec, layout)
    group = layout.dp_shard * layout.cp
    once = crossing_s(case.question.cluster, group, layout.tp, WIRE_BYTES * dense)
    return 2.0 * once * case.micro_batches


def slices_s(case: Case) -> float:
    """Tensor slices: each half of a layer, or attention's alone where experts are, is summed over
    ranks forward and backward: twice all but a rank's own part."""
    layout, spec = case.layout, case.question.spec
    whole = WIRE_BYTES * case.rank_tokens * spec.hidden
    once = 2.0 * crossing_s(case.question.cluster, layout.tp, 1, whole)
    halves = 1 if spec.n_experts else 2
    return 2.0 * halves * once * case.micro_batches * spec.layers / layout.pp


def contexts_s(case: Case) -> float:
    """A ring: keys and values of all other ranks forward, and their gradients besides backward."""
    layout, spec = case.layout, case.question.spec
    if layout.cp_method != "ring" or spec.latent_attention:
        return 0.0
    whole = WIRE_BYTES * case.rank_tokens * layout.cp * 2 * spec.kv_dim / layout.tp
    once = crossing_s(case.question.cluster, layout.cp, layout.tp, whole)
    return 2.0 * once * case.micro_batches * spec.layers / layout.pp


def experts_s(case: Case) -> float:
    """Tokens sent to experts and back, forward and backward, inside one unit of the innermost
    level; further out copies for one unit travel once."""
    layout, spec = case.layout, case.question.spec
    apart = 1 if layout.etp != layout.tp else layout.tp
    inner = case.question.cluster.levels[0]
    if not spec.n_experts or layout.ep * apart > inner.size:
        return 0.0
    sent = case.rank_tokens / (layout.tp if apart == 1 else 1) * spec.top_k * spec.hidden
    away = WIRE_BYTES * sent * (layout.ep - 1) / layout.ep
    routed = sum(spec.is_moe(layer) for layer in range(spec.layers)) / layout.pp
    return 2.0 * 2.0 * away / inner.bandwidth_bytes_s * case.micro_batches * routed


def hops_s(case: Case) -> float:
    """Between stages: each micro-batch forward over one boundary, at the least."""
    layout = case.layout
    if layout.pp == 1:
        return 0.0
    levels = case.question.cluster.levels
    away = layout.world // layout.pp
    level = next((one for one in levels[:-1] if away < one.size), levels[-1])
    sent = WIRE_BYTES * case.rank_tokens * case.question.spec.hidden / layout.tp
    return sent / level.bandwidth_bytes_s * case.micro_batches


def over_slow_links(case: Case) -> Case:
    """The same over links of a hundredth of the speed, where little else counts."""
    where = case.question.cluster
    slow = [replace(one, bandwidth_bytes_s=one.bandwidth_bytes_s / 100) for one in where.levels]
    return replace(
        case, question=replace(case.question, cluster=replace(where, levels=tuple(slow)))
    )


@pytest.mark.parametrize("slow", [False, True], ids=["nameplate", "slow"])
@pytest.mark.parametrize(
    "least_s", [gradients_s, weights_s, slices_s, contexts_s, experts_s, hops_s]
)
def test_no_step_beats_the_wire(least_s: Callable[[Case], float], slow: bool) -> None:
    family = "qwen3_moe" if least_s is experts_s else None

    @bounded
    @given(cases(family))
    def check(case: Case) -> None:
        case = over_slow_links(case) if slow else case
        least = least_s(case)
        assume(least > 0)
        assert case.bare_s * SLACK >= least

    check()


def test_no_step_beats_the_wire_where_tensor_slices_overlap() -> None:
    """64 slices over 8 nodes of p4de: 12 s of traffic beside 3 s of compute."""
    spec = presets.preset("llama3-70b").model_copy(update={"kv_heads": 64})
    layout = Layout(tp=64, micro_batch=4)
    case = Case(_question(spec, "p4de", layout, "megatron", 4096, 16), layout)
    assert case.found.step_time_s >= slices_s(case)


@bounded
@given(cases(), st.sampled_from(["dp_shard", "dp_replicate"]))
def test_more_ranks_of_data_never_raise_memory_of_a_chip(case: Case, axis: str) -> None:
    """From two on: the second rank of an axis is the first that needs a communicator for it."""
    layout, question = case.layout, case.question
    assume(getattr(layout, axis) > 1)
    more = Layout(**(layout.model_dump() | {axis: 2 * getattr(layout, axis)}))
    name = question.cluster.name.split(":")[0]
    batch = 2 * question.global_batch
    twice = _question(question.spec, name, more, question.framework.name, question.seq_len, batch)
    assert predict(twice, more).memory_bytes <= case.found.memory_bytes * SLACK


@bounded
@given(cases())
def test_parts_are_all_there_is_and_rates_follow_from_time(case: Case) -> None:
    question, found = case.question, case.found
    assert all(seconds >= -1e-12 for seconds in found.time_parts.values())
    assert all(size >= 0 for size in found.memory_parts.values())
    assert sum(found.time_parts.values()) == pytest.approx(found.step_time_s)
    assert sum(found.memory_parts.values()) == pytest.approx(found.memory_bytes)
    assert found.step_time_low_s <= found.step_time_s <= found.step_time_high_s
    assert found.memory_low_bytes <= found.memory_bytes <= found.memory_high_bytes
    tokens = question.global_batch * question.seq_len
    assert found.tokens_per_s * found.step_time_s == pytest.approx(tokens)
    assert found.tokens_per_s_per_chip * case.layout.world == pytest.approx(found.tokens_per_s)
    flops = question.spec.flops_per_token(question.seq_len) * tokens
    peak = case.layout.world * question.cluster.chip.peak("bf16")
    assert found.mfu == pytest.approx(flops / (found.step_time_s * peak))
    assert found.tflops_per_chip * 1e12 == pytest.approx(found.mfu * found.peak_flops_per_chip)


def twice_as_fast(question: Question) -> Question:
    """All speeds doubled and all times halved."""
    where, chip = question.cluster, question.cluster.chip
    levels = tuple(
        replace(one, bandwidth_bytes_s=2 * one.bandwidth_bytes_s, latency_s=one.latency_s / 2)
        for one in where.levels
    )
    chip = replace(
        chip,
        peak_flops={name: 2 * peak for name, peak in chip.peak_flops.items()},
        memory_bandwidth_bytes_s=2 * chip.memory_bandwidth_bytes_s,
    )
    faster = _seconds_times(question, 0.5)
    return replace(faster, cluster=replace(where, chip=chip, levels=levels))


def _seconds_times(question: Question, factor: float) -> Question:
    """With constants in seconds, whose names end in `_s`, times `factor`."""
    table = {
        name: replace(one, value=one.value * factor) if name.split(".")[0].endswith("_s") else one
        for name, one in question.constants.table.items()
    }
    return replace(question, constants=replace(question.constants, table=table))


@bounded
@given(cases())
def test_units_hold(case: Case) -> None:
    slow, fast = case.found, predict(twice_as_fast(case.question), case.layout)
    assert fast.step_time_s == pytest.approx(slow.step_time_s / 2)
    for name, seconds in slow.time_parts.items():
        assert fast.time_parts[name] == pytest.approx(seconds / 2, abs=1e-12), name
    assert fast.mfu == pytest.approx(slow.mfu)
    assert fast.memory_bytes == slow.memory_bytes
    price, halved = slow.dollars_per_trillion_tokens, fast.dollars_per_trillion_tokens
    assert (price is None) == (halved is None)
    if price is not None and halved is not None:
        assert halved == pytest.approx(price / 2)
