"""Rows of published runs: read, filled in, or refused with a reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.base.errors import DataError
from meshwright.plan.cost.candidates import CORE, FULL, INTERLEAVED, NONE, ZB2P
from meshwright.plan.validate.rows import Refused, Run, read_row, read_runs, read_vtrain, source_of

ROW = {
    "id": "dgxc-900",
    "source": "dgxc-benchmarking v25.02",
    "model": "Llama3.1-70B",
    "layers": "80",
    "hidden": "8192",
    "ffn_hidden": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "chip": "H100-80GB-SXM",
    "n_chips": "64",
    "precision": "bf16",
    "dp": "2",
    "tp": "4",
    "pp": "4",
    "vpp": "5",
    "cp": "2",
    "sharding": "zero1",
    "micro_batch": "1",
    "global_batch_sequences": "128",
    "recompute": "none",
    "sequence_parallel": "yes",
    "schedule": "interleaved 1f1b",
    "step_time_s": "14.7",
    "notes": "",
}


def run(**cells: str) -> Run:
    found = read_row({**ROW, **cells})
    assert isinstance(found, Run), found
    return found


def reason(**cells: str) -> str:
    found = read_row({**ROW, **cells})
    assert isinstance(found, Refused), found
    return found.reason


def test_a_complete_row() -> None:
    found = run()
    assert (found.spec.layers, found.spec.kv_heads, found.step_s) == (80, 8, 14.7)
    assert found.layout.world[0] == 64
    assert found.layout.schedule[0] == INTERLEAVED
    assert found.layout.zero[0] == 1
    assert found.cluster == "h100"
    assert found.assumed == ()


def test_tokens_per_second_stand_in_for_a_step_time() -> None:
    found = run(step_time_s="", tokens_per_s_per_chip="1000")
    assert found.step_s == pytest.approx(128 * 8192 / (1000 * 64))


def test_tflops_never_do() -> None:
    assert "no step time" in reason(step_time_s="", tflops_per_chip="500", mfu_pct="50")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"notes": "MFU DOUBTFUL: wrong constants"}, "DOUBTFUL"),
        ({"chip": "Quantum-9000"}, "unknown chip Quantum-9000"),
        ({"tp": ""}, "layout is not stated"),
        ({"dp": "7"}, "is not 64 chips"),
        ({"n_chips": "63"}, "does not divide 63 chips"),
        ({"global_batch_sequences": ""}, "global_batch_sequences is not stated"),
        ({"global_batch_sequences": "129"}, "not a multiple of dp"),
        ({"layers": ""}, "layers is not stated"),
        ({"model": "Nemotron_3_Nano"}, "no cost model for the layers"),
        ({"sharding": "LoRA"}, "no cost model for LoRA"),
        ({"n_experts": "8", "top_k": ""}, "expert_ffn_hidden or top_k is not stated"),
    ],
)
def test_refusals_say_why(cells: dict[str, str], words: str) -> None:
    assert words in reason(**cells)


def test_what_is_filled_in_is_named() -> None:
    found = run(recompute="", sequence_parallel="", vocab="")
    assert found.assumed == ("vocab 32000", "recompute none", "sequence parallelism")


@pytest.mark.parametrize(("text", "code"), [("full", FULL), ("none", NONE), ("selective", CORE)])
def test_recomputation(text: str, code: int) -> None:
    assert run(recompute=text).layout.recompute[0] == code


def test_a_share_of_blocks_is_read_off_hfu_over_mfu() -> None:
    found = run(
        id="ibm-900", tp="1", pp="1", cp="1", dp="64", vpp="1", recompute="selective",
        sharding="zero3/fsdp", mfu_pct="60", notes="HFU 70%",
    )  # fmt: skip
    assert found.layout.recompute_share[0] == pytest.approx(0.5)


def test_schedules_of_other_frameworks() -> None:
    assert run(schedule="ZB-2p", vpp="1").layout.schedule[0] == ZB2P


def test_latent_attention_and_shared_experts_follow_the_name() -> None:
    found = run(
        model="DeepSeek-V3", layers="61", hidden="7168", heads="128", kv_heads="128",
        ffn_hidden="18432", vocab="129280", n_experts="256", top_k="8", expert_ffn_hidden="2048",
        tp="1", pp="4", vpp="4", cp="1", dp="16", ep="16",
    )  # fmt: skip
    assert found.spec.latent_attention
    assert found.spec.layers == 62
    assert found.spec.params == pytest.approx(682e9, rel=0.01)  # 671 billion and one more layer


def test_sources_are_known_by_the_longest_beginning() -> None:
    assert source_of("mbskill-q30-1").key == "mbskill-q30"
    assert source_of("mb-001").key == "mb"
    assert source_of("nobody-1").key == "default"
    assert source_of("dgxc-216", "dgxc-benchmarking v24.11.1 MaxText").style == "xla"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_runs(tmp_path / "absent.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="has no column id"):
        read_runs(tmp_path / "other.csv")


def test_vtrain_has_columns_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "vtrain.csv"
    names = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
    )
    path.write_text(f"\ufeff{names}\n8,32,4,1024,16,24,1024,2,2,2,219.73\n", encoding="utf-8")
    (found,) = read_vtrain(path)
    assert isinstance(found, Run)
    assert found.step_s == pytest.approx(0.21973)
    assert found.layout.recompute[0] == FULL


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    names = sorted({name for row in rows for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_files_of_the_same_schema_are_read(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "id": "other-1", "chip": "?"}]
    first, second = read_runs(write(tmp_path / "more.csv", rows))
    assert isinstance(first, Run)
    assert isinstance(second, Refused)
