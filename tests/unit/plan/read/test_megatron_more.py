"""Megatron-LM's arguments about routing, positions, sharding and drawn pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.plan.read import Reading, read

BASE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --swiglu --vocab-size 512 "
EXPERTS = BASE + "--num-experts 8 --moe-router-topk 2 "
LATENT = BASE + "--multi-latent-attention --kv-lora-rank 32 "


def reading(folder: Path, text: str, world: int | None = None) -> Reading:
    path = folder / "args.txt"
    path.write_text(text, encoding="utf-8")
    return read(path, world)


@pytest.mark.parametrize(
    "flags, normalised",
    [
        ("", True),
        ("--moe-router-pre-softmax", False),
        ("--moe-router-score-function sigmoid", True),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", True),
        ("--moe-router-score-function sigmoid --moe-router-topk 1", False),
    ],
)
def test_a_softmax_before_the_choice_is_not_normalised(
    tmp_path: Path, flags: str, normalised: bool
) -> None:
    found = reading(tmp_path, EXPERTS + flags)
    assert found.spec().norm_top_k is normalised
    assert "moe-router-pre-softmax" not in found.unused
    assert found.origins["model.norm_top_k"]


@pytest.mark.parametrize(
    "flags, aux, by_sequence",
    [
        ("--moe-aux-loss-coeff 0.01", 0.01, 0.0),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01", 0.0, 0.01),
        (
            "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 1e-4 0.01",
            0.01,
            1e-4,
        ),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01", 0.0, 0.0),
    ],
)
def test_several_losses_balance_at_once(
    tmp_path: Path, flags: str, aux: float, by_sequence: float
) -> None:
    spec = reading(tmp_path, EXPERTS + flags).spec()
    assert (spec.aux_loss, spec.seq_aux_loss) == (aux, by_sequence)


def test_losses_of_a_yaml_list_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(
        "--num-layers: 8\n--hidden-size: 64\n--num-attention-heads: 4\n--swiglu: true\n"
        "--vocab-size: 512\n--num-experts: 8\n"
        "--moe-router-load-balancing-type: [aux_loss, seq_aux_loss]\n"
        "--moe-aux-loss-coeff: [0.01, 0.001]\n",
        encoding="utf-8",
    )
    spec = read(path).spec()
    assert (spec.aux_loss, spec.seq_aux_loss) == (0.01, 0.001)


def test_a_loss_without_its_coefficient_is_refused(tmp_path: Path) -> None:
    flags = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01"
    with pytest.raises(ConfigError, match=r"one for each of .* 2 of them") as caught:
        reading(tmp_path, EXPERTS + flags)
    assert "moe-aux-loss-coeff" in caught.value.key and "\n" not in str(caught.value)


def test_balancing_of_another_kind_is_noted(tmp_path: Path) -> None:
    found = reading(tmp_path, EXPERTS + "--moe-router-load-balancing-type sinkhorn")
    assert any("sinkhorn is not read" in note for note in found.notes)


def test_a_bias_that_balances_has_megatrons_rate(tmp_path: Path) -> None:
    flags = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    assert reading(tmp_path, EXPERTS + flags).spec().bias_update_rate == 1e-3


def test_llama_3s_stretched_positions_are_read(tmp_path: Path) -> None:
    found = reading(tmp_path, BASE + "--position-embedding-type rope --use-rope-scaling")
    spec = found.spec()
    assert (spec.rope_scaling, spec.rope_factor, spec.rope_original_len) == ("llama3", 8.0, 8192)
    assert (spec.rope_low_freq, spec.rope_high_freq) == (1.0, 4.0)
    assert found.origins["model.rope_factor"] == "--rope-scaling-factor 8.0 (default)"
    more = reading(tmp_path, BASE + "--use-rope-scaling --rope-scaling-factor 32")
    assert more.spec().rope_factor == 32.0
    alone = reading(tmp_path, BASE + "--rope-scaling-factor 32")
    assert alone.spec().rope_scaling == "none" and "rope-scaling-factor" in alone.unused


@pytest.mark.parametrize(
    "flags, kind",
    [
        ("", "none"),
        ("--rotary-scaling-factor 40", "yarn"),
        ("--rotary-scaling-factor 40 --rope-type yarn", "yarn"),
        ("--rotary-scaling-factor 40 --rope-type rope", "none"),
        ("--use-rope-scaling", "none"),
    ],
)
def test_latent_attention_is_stretched_by_its_own_arguments(
    tmp_path: Path, flags: str, kind: str
) -> None:
    found = reading(tmp_path, LATENT + flags)
    spec = found.spec()
    assert spec.rope_scaling == kind
    if kind == "yarn":
        assert (spec.rope_factor, spec.rope_original_len, spec.rope_mscale) == (40.0, 4096, 1.0)
    assert any("use-rope-scaling" in note for note in found.notes) == ("use-rope" in flags)


@pytest.mark.parametrize(
    "flag, noted",
    [
        ("--rotary-percent 0.5", True),
        ("--rotary-percent 1.0", False),
        ("--rotary-seq-len-interpolation-factor 4", True),
        ("--no-rope-freq 4", True),
        ("--position-embedding-type yarn", True),
    ],
)
def test_positions_that_turn_otherwise_are_noted(tmp_path: Path, flag: str, noted: bool) -> None:
    found = reading(tmp_path, BASE + flag)
    assert any("turn as without it" in note for note in found.notes) is noted
    found.spec()


@pytest.mark.parametrize(
    "flags, stage, noted",
    [
        ("--use-megatron-fsdp", 3, True),
        ("--use-custom-fsdp", 0, True),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0, False),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim", 1, False),
        ("--data-parallel-sharding-strategy optim_grads_params", 0, False),
    ],
)
def test_the_sharding_of_fsdp_follows_its_flag(
    tmp_path: Path, flags: str, stage: int, noted: bool
) -> None:
    found = reading(tmp_path, BASE + flags, world=8)
    assert found.to_layout().zero_stage == stage
    assert any("sharding-strategy not given" in note for note in found.notes) is noted


def test_fsdp_has_instances_without_the_distributed_optimizers_flag(tmp_path: Path) -> None:
    flags = "--use-megatron-fsdp --num-distributed-optimizer-instances 2"
    layout = reading(tmp_path, BASE + flags, world=8).to_layout()
    assert (layout.dp_replicate, layout.dp_shard, layout.zero_stage) == (2, 4, 3)


@pytest.mark.parametrize(
    "flags, stages, vpp",
    [
        ("--pipeline-model-parallel-layout 'Et|ttt|t*3|tL'", [1, 3, 3, 1], 2),
        ("--pipeline-model-parallel-layout 'Et|(t|)*6,tL'", [1, 1, 1, 1, 1, 1, 1, 1], 4),
        ("--pipeline-model-parallel-layout 'Et*8|L'", [8, 0], 1),
        ("--decoder-first-pipeline-num-layers 6", [6, 2], 1),
        (
            "--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
            [3, 1, 3, 1],
            2,
        ),
    ],
)
def test_uneven_stages_are_read(tmp_path: Path, flags: str, stages: list[int], vpp: int) -> None:
    text = f"{BASE} --pipeline-model-parallel-size 2 {flags}"
    layout = reading(tmp_path, text, world=2).to_layout()
    assert (layout.stages, layout.vpp) == (stages, vpp)
    assert layout.schedule == ("interleaved" if vpp > 1 else "1f1b")


@pytest.mark.parametrize(
    "flags, key, says",
    [
        ("--pipeline-model-parallel-layout 'Et*2|t*3|t*3L'", "layout", "3 stages; must be a mult"),
        ("--pipeline-model-parallel-layout 'Ex*8|L'", "layout", "as Et*3|t*4|t*3L"),
        (
            "--decoder-last-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
            "decoder-last",
            "[5, 3] layers, which 2 chunks do not cut",
        ),
        ("--decoder-last-pipeline-num-layers 9", "decoder-last", "leaves -1 layers"),
    ],
)
def test_stages_that_do_not_add_up_are_named(
    tmp_path: Path, flags: str, key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        reading(tmp_path, f"{BASE} --pipeline-model-parallel-size 2 {flags}", world=2)
    assert key in caught.value.key and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_origins_name_the_arguments_of_positions_and_routing(tmp_path: Path) -> None:
    found = reading(tmp_path, EXPERTS + "--use-rope-scaling --moe-router-pre-softmax")
    wanted: dict[str, Any] = {
        "model.rope_scaling": "--use-rope-scaling",
        "model.norm_top_k": "--moe-router-pre-softmax",
        "model.top_k": "--moe-router-topk 2",
    }
    assert {key: found.origins[key] for key in wanted} == wanted
