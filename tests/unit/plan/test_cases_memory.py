"""Cases of ../shared/cases/planner.md on memory that no other test covers, by number.

Figures are those of the threads; GB = 1e9, GiB = 2**30. The others are in cost/test_memory_cases.py
and cost/test_memory_published.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from plan_questions import question

from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import FULL, Candidates
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.memory import STATES, Memory, add, memory
from meshwright.plan.cost.oom import oom_probability
from meshwright.plan.cost.workload import Workload
from meshwright.plan.prediction import predict
from meshwright.plan.search_notation import parse_layout

CHIP_80 = 80 * 2.0**30
ADVICE = "expandable_segments:True"


def _work(spec: ModelSpec | str, seq_len: int, name: str, **more: Any) -> Workload:
    shape = preset(spec) if isinstance(spec, str) else spec
    return Workload(shape, seq_len, 512, framework=framework(name), **{"precision": "bf16", **more})


def _memory(work: Workload, **columns: Any) -> Memory:
    return memory(work, Candidates.of(1, **columns))


def _risk(work: Workload, **columns: Any) -> float:
    found = _memory(work, **columns)
    return float(oom_probability(found, work.framework, CHIP_80)[0])


@pytest.mark.parametrize(
    ("model", "seq_len", "micro"), [("llama2-70b", 4096, 2), ("llama3-70b", 8192, 1)]
)
def test_case_3_pp2_runs_out_with_dp8_without_sequence_parallelism(
    model: str, seq_len: int, micro: int
) -> None:
    """NVIDIA/Megatron-LM#1031: 70B, TP8 PP2 DP8 runs out; the README has TP8 PP2 DP48. The user had
    no sequence parallelism (`--distribute-saved-activations` excludes it); the shard of the
    optimizer alone, 5 GB more, explains nothing at 4,096 tokens in a micro-batch."""
    columns = {"tp": 8, "pp": 2, "zero": 1, "micro_batch": micro}
    work = _work(model, seq_len, "megatron")
    assert _risk(work, dp_shard=8, sp=False, **columns) > 0.9
    assert _risk(work, dp_shard=8, **columns) < 0.01
    readme = _work("llama2-70b", 4096, "megatron")
    assert _risk(readme, dp_shard=48, tp=8, pp=2, zero=1) < 0.01
    assert _risk(work, tp=8, pp=8, dp_shard=2, zero=1, sp=False, recompute=FULL) < 0.01


@pytest.mark.parametrize("chips", [2, 4])
def test_case_16_gpt_j_needs_far_more_than_its_states(chips: int) -> None:
    """deepspeedai/DeepSpeed#4093: GPT-J-6B, ZeRO-3 with offloading: 0.77 GB estimated, 13 measured,
    on 2 and on 4 chips."""
    spec = ModelSpec(family="gpt2", layers=28, hidden=4096, heads=16, vocab=50400, max_seq_len=2048)
    work = _work(spec, 2048, "deepspeed", precision="fp16")
    found = _memory(work, dp_shard=chips, zero=3, offload_optimizer=True, recompute=FULL)
    assert found.allocated_bytes[0] == pytest.approx(13e9, rel=0.4)
    assert found.allocated_bytes[0] - add(found.parts, STATES)[0] > 5 * 0.77e9


def test_case_18_megatron_fsdp_with_experts_is_above_experts_alone() -> None:
    """NVIDIA/Megatron-LM#2772: Qwen3-30B-A3B on 32 chips: EP8 45.6 GB reserved, EP8 + FSDP 55.6.
    FSDP2, which frees each gradient, is below both."""
    spec, columns = "qwen3-30b-a3b", {"dp_shard": 32, "ep": 8}
    alone, both, fsdp2 = (
        _memory(_work(spec, 4096, name), zero=zero, **columns).reserved_bytes[0]
        for name, zero in (("megatron", 1), ("megatron-fsdp", 3), ("torchtitan", 3))
    )
    assert 2e9 < both - alone < 15e9
    assert fsdp2 < alone


def test_case_19_what_is_reserved_does_not_shrink_with_the_shards() -> None:
    """pytorch/pytorch#82001: T5-3B, FSDP in BF16, 28, 26, 25 and 24 GB reserved on 1 to 4 nodes of
    8 A100, while what is allocated between steps goes down with the shards."""
    spec = ModelSpec(
        family="gpt2", layers=32, hidden=2048, heads=32, ffn_hidden=16384, vocab=32128
    )  # fmt: skip
    work = _work(spec, 512, "fsdp")
    found = [_memory(work, dp_shard=8 * nodes, zero=3, micro_batch=12) for nodes in (1, 2, 3, 4)]
    reserved = [one.reserved_bytes[0] for one in found]
    assert reserved == sorted(reserved, reverse=True)
    assert reserved[3] / reserved[0] == pytest.approx(24 / 28, abs=0.05)
    assert reserved[0] - reserved[3] == pytest.approx(4e9, rel=0.3)
    states = [add(one.parts, STATES)[0] for one in found]
    assert states[3] == pytest.approx(states[0] / 4, rel=0.01)


def test_case_21_fragmentation_is_named_where_memory_is_tight() -> None:
    """NVIDIA-NeMo/RL#919: Qwen3-30B-A3B with FSDP2 fits 8 chips of 80 GB only with expandable
    segments."""
    asked = question("qwen3-30b-a3b", "h100:8", framework="fsdp", seq_len=4096, global_batch=64)
    tight = predict(asked, parse_layout("fsdp8,mbs1,full", 8))
    assert 0.05 < tight.oom_probability < 0.6
    assert any(ADVICE in line for line in tight.assumptions)
    small = question("llama3.2-1b", "h100:8", framework="fsdp", seq_len=4096, global_batch=64)
    roomy = predict(small, parse_layout("fsdp8,mbs1,full", 8))
    assert not any(ADVICE in line for line in roomy.assumptions)


def test_case_21_is_about_allocators_of_gpus() -> None:
    asked = question("llama3-8b", "trn1:32", seq_len=4096, global_batch=64)
    tight = predict(asked, parse_layout("tp8,pp4,mbs16", 32))
    assert tight.oom_probability > 0.5
    assert not any(ADVICE in line for line in tight.assumptions)
