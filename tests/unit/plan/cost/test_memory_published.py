"""Predictions against peaks that others have measured, with the constants in framework.toml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.base.errors import DataError
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import (
    FULL,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB1P,
    ZB2P,
    Candidates,
)
from meshwright.plan.cost.framework import Framework, framework
from meshwright.plan.cost.memory import memory
from meshwright.plan.cost.workload import Precision, Workload
from meshwright.plan.validate.memory_fit import cross_validate
from meshwright.plan.validate.memory_golden import (
    GoldenRefused,
    GoldenRun,
    read_golden,
    read_row,
    transcribed,
)

GIB = 2.0**30

# SimuMax v1.2, docs/b200: max allocated GiB of real Megatron runs (Apache-2.0).
SIMUMAX = (
    ("70b", 4096, {"dp_shard": 4, "pp": 2}, 66.55),
    ("70b", 4096, {"dp_shard": 4, "tp": 2}, 60.68),
    ("405b", 4096, {"dp_shard": 4, "tp": 2}, 81.59),
    ("405b", 4096, {"tp": 8, "zero": 0}, 38.57),
    ("70b", 32768, {"tp": 2, "cp": 4}, 68.43),
    ("70b", 32768, {"cp": 8}, 104.51),
    ("405b", 32768, {"cp": 8}, 139.22),
    ("70b", 131072, {"tp": 2, "cp": 4}, 112.67),
    ("70b", 131072, {"cp": 8}, 147.99),
)
SHAPES: dict[str, dict[str, Any]] = {
    "70b": {"layers": 12, "hidden": 8192, "ffn_hidden": 28672, "heads": 64, "kv_heads": 8},
    "405b": {"layers": 4, "hidden": 16384, "ffn_hidden": 53248, "heads": 128, "kv_heads": 16},
}
# Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 4: GB, pipelines alone.
ZERO_BUBBLE = (
    ("1.5b", ZB2P, 1, 59),
    ("1.5b", ZB1P, 1, 32),
    ("1.5b", ONE_F_ONE_B, 1, 30),
    ("1.5b", INTERLEAVED, 3, 40),
    ("28.3b", ZB2P, 1, 74),
    ("28.3b", ZB1P, 1, 44),
    ("28.3b", ONE_F_ONE_B, 1, 43),
    ("28.3b", INTERLEAVED, 2, 58),
)
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16")
# BigScience tr11-176B, chronicles-prequel.md: GB of nvidia-smi, ZeRO-1, all recomputed.
BLOOM = (
    ("fp16", 72, 14336, {"dp_shard": 8, "tp": 8, "pp": 6, "micro_batch": 4}, 56),
    ("fp16", 72, 14336, {"dp_shard": 8, "tp": 2, "pp": 24, "micro_batch": 1}, 44),
    ("bf16", 82, 13312, {"dp_shard": 8, "tp": 4, "pp": 12, "micro_batch": 2}, 63),
)
MOE_SPEED = {
    "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2,
    "num-virtual-stages-per-pipeline-rank": 4, "expert-model-parallel-size": 4,
    "expert-tensor-parallel-size": 1, "use-distributed-optimizer": True,
    "attention-backend": "unfused", "sequence-parallel": True, "disable-bias-linear": True,
    "micro-batch-size": 4, "global-batch-size": 32, "cross-entropy-loss-fusion": True,
    "cross-entropy-fusion-impl": "native", "seq-length": 4096, "num-layers": 16,
    "hidden-size": 1024, "ffn-hidden-size": 4096, "num-attention-heads": 32, "kv-channels": 128,
    "max-position-embeddings": 4096, "position-embedding-type": "rope",
    "make-vocab-size-divisible-by": 3232, "normalization": "RMSNorm", "swiglu": True,
    "untie-embeddings-and-output-weights": True, "multi-latent-attention": True,
    "mtp-num-layers": 1, "attention-dropout": 0.0, "hidden-dropout": 0.0, "qk-layernorm": True,
    "num-experts": 32, "moe-layer-freq": "([0]*1+[1]*15)", "moe-ffn-hidden-size": 1024,
    "moe-shared-expert-intermediate-size": 1024, "moe-router-topk": 4, "q-lora-rank": 1536,
    "kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128,
    "bf16": True,
}  # fmt: skip
GPT_7B = {
    "num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32,
    "group-query-attention": True, "num-query-groups": 8, "seq-length": 8192,
    "untie-embeddings-and-output-weights": True, "micro-batch-size": 2, "global-batch-size": 8,
    "max-position-embeddings": 8192, "vocab-size": 131073, "tensor-model-parallel-size": 4,
    "pipeline-model-parallel-size": 1, "use-distributed-optimizer": True,
    "no-gradient-accumulation-fusion": True, "bf16": True,
}  # fmt: skip


def _row(case: str, arguments: dict[str, Any], peak: float, between: float) -> dict[str, str]:
    return {
        "case": case,
        "hw": "dev_dgx_h100",
        "mem_max": str(peak),
        "mem_alloc": str(between),
        "args": json.dumps({f"--{name}": value for name, value in arguments.items()}),
    }


def _golden(case: str, arguments: dict[str, Any], peak: float, between: float) -> GoldenRun:
    found = read_row(_row(case, arguments, peak, between), framework("megatron"))
    assert isinstance(found, GoldenRun), found
    return found


@pytest.mark.parametrize(("model", "seq_len", "columns", "peak_gib"), SIMUMAX)
def test_megatron_on_b200(
    model: str, seq_len: int, columns: dict[str, int], peak_gib: float
) -> None:
    spec = ModelSpec(family="llama", vocab=128256, **SHAPES[model])
    work = Workload(spec, seq_len, 16, "bf16", framework("megatron"))
    found = memory(work, Candidates.of(1, **{"zero": 1, **columns}))
    assert found.allocated_bytes[0] / GIB == pytest.approx(peak_gib, rel=0.03)


@pytest.mark.parametrize(("model", "schedule", "vpp", "peak_gb"), ZERO_BUBBLE)
def test_schedules_of_a_pipeline(model: str, schedule: int, vpp: int, peak_gb: float) -> None:
    small = model == "1.5b"
    layers, hidden, heads, pp, micro = (22, 2304, 24, 8, 6) if small else (62, 6144, 48, 32, 1)
    spec = ModelSpec(
        family="gpt2", layers=layers, hidden=hidden, heads=heads, vocab=51200, max_seq_len=1024
    )
    work = Workload(spec, 1024, 96 * micro, "bf16", framework("megatron-2021"),
                    flash_attention=False)  # fmt: skip
    c = Candidates.of(1, pp=pp, vpp=vpp, zero=0, micro_batch=micro, schedule=schedule, sp=False)
    assert memory(work, c).allocated_bytes[0] / 1e9 == pytest.approx(peak_gb, rel=0.1)


@pytest.mark.parametrize(("precision", "layers", "hidden", "columns", "peak_gb"), BLOOM)
def test_bloom_candidates(
    precision: Precision, layers: int, hidden: int, columns: dict[str, int], peak_gb: float
) -> None:
    spec = ModelSpec(
        family="gpt2", layers=layers, hidden=hidden, heads=64, vocab=250880, max_seq_len=2048,
        tie_embeddings=True,
    )  # fmt: skip
    work = Workload(spec, 2048, 2048, precision, framework("megatron-deepspeed"),
                    flash_attention=False)  # fmt: skip
    c = Candidates.of(1, **columns, zero=1, recompute=FULL, sp=False)
    assert memory(work, c).total_bytes[0] / 1e9 == pytest.approx(peak_gb, rel=0.1)


def test_deepspeed_sums_gradients_of_bf16_models_once_more_in_fp32() -> None:
    spec = ModelSpec(family="gpt2", layers=4, hidden=1024, heads=16, vocab=51200, max_seq_len=1024)
    fp16, bf16 = (
        memory(
            Workload(spec, 1024, 64, precision, framework("deepspeed")),
            Candidates.of(1, dp_shard=4, zero=1),
        ).parts["gradients"][0]
        for precision in PRECISIONS
    )
    assert bf16 == pytest.approx(3 * fp16)


def test_26_megatrons_own_ci_case() -> None:
    """gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed on H100: Megatron's own formula says 10.9 GiB,
    its CI measures 56.0, of which 6.2 between steps."""
    run = _golden("moe/memory_speed", MOE_SPEED, 60.11e9, 6.63e9)
    assert run.predicted_bytes() == pytest.approx(56.0 * GIB, rel=0.1)


def test_gpt_7b_of_megatrons_ci() -> None:
    run = _golden("gpt/gpt3_7b_tp4_pp1_memory_speed", GPT_7B, 53.22 * GIB, 19.24 * GIB)
    assert run.predicted_bytes() == pytest.approx(53.22 * GIB, rel=0.05)
    changes = {
        "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 4,
        "num-layers-per-virtual-pipeline-stage": 1, "micro-batch-size": 1,
    }  # fmt: skip
    run = _golden("gpt/gpt3_7b_tp1_pp4_memory_speed", {**GPT_7B, **changes}, 60.72e9, 24.81e9)
    assert run.predicted_bytes() == pytest.approx(60.72e9, rel=0.05)


def test_values_of_another_run_are_refused_by_what_is_allocated_between_steps() -> None:
    row = _row("gpt/gpt3_7b", GPT_7B, 53e9, 40e9)
    found = read_row(row, framework("megatron"))
    assert isinstance(found, GoldenRefused)
    assert "different runs" in found.reason


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("bert/bert_mcore_tp2_pp2", "encoder"),
        ("mimo/mimo_vlm_pretrain", "vision"),
        ("hybrid/hybrid_mr_mcore", "state spaces"),
        ("gpt/gpt_grpo_tp4_pp1", "inference"),
    ],
)
def test_other_models_are_refused_with_a_reason(case: str, why: str) -> None:
    found = read_row(_row(case, GPT_7B, 53e9, 20e9), framework("megatron"))
    assert isinstance(found, GoldenRefused)
    assert why in found.reason


def test_missing_arguments_and_files_are_refused(tmp_path: Path) -> None:
    broken = {key: value for key, value in GPT_7B.items() if key != "hidden-size"}
    found = read_row(_row("gpt/x", broken, 53e9, 20e9), framework("megatron"))
    assert isinstance(found, GoldenRefused)
    assert "--hidden-size is not given" in found.reason
    with pytest.raises(DataError, match="cannot be read"):
        read_golden(tmp_path / "none.csv", framework("megatron"))


def test_transcribed_cases_are_found_by_the_id_of_their_rows() -> None:
    assert transcribed("mlm-7b-tp1pp4-H100")
    assert transcribed("mlm-mix22-H100") is None


class _Run:
    """A run whose peak is linear in one constant."""

    def __init__(self, case: str, floor_bytes: float) -> None:
        self.case, self.peak_bytes = case, 10e9 + floor_bytes

    def predicted_bytes(self, constants: Framework | None = None) -> float:
        """10 GB and the floor."""
        return 10e9 + (constants or framework("megatron")).floor_bytes


def test_a_fit_finds_the_constant_and_does_not_see_what_it_is_judged_by() -> None:
    runs = [_Run(f"case {index}", 0.4e9) for index in range(9)]
    fitted = cross_validate("megatron", runs)
    assert fitted.values["floor_bytes"] == pytest.approx(0.4e9)
    assert np.allclose(fitted.unseen, 0.0)
    odd = _Run("case 9", 0.7e9)
    fitted = cross_validate("megatron", [*runs, odd])
    assert fitted.unseen[-1] == pytest.approx((10.4 - 10.7) / 10.7)
    assert np.allclose(fitted.unseen[:-1], 0.0)
