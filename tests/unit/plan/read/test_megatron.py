"""Megatron-LM's arguments as a command line, a launch script and a YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError, InputError
from meshwright.models import presets
from meshwright.plan.read import Reading, read

LLAMA3_70B = """
--use-mcore-models --num-layers 80 --hidden-size 8192 --num-attention-heads 64
--group-query-attention --num-query-groups 8 --ffn-hidden-size 28672 --swiglu
--normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope --rotary-base 500000
--untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256
--make-vocab-size-divisible-by 16032 --max-position-embeddings 8192 --seq-length 8192
--attention-dropout 0.0 --hidden-dropout 0.0
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
--num-layers-per-virtual-pipeline-stage 5 --context-parallel-size 2 --cp-comm-type p2p
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--micro-batch-size 1 --global-batch-size 128 --bf16 --lr 3e-4 --train-iters 1000
--recompute-activations
"""

DEEPSEEK = """#!/bin/bash
# DeepSeek-V3 on 256 nodes
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"256"}
WORLD_SIZE=$(( GPUS_PER_NODE * NNODES ))
PP=16
LAYERS=61   # three of them dense

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --rdzv_backend c10d
)
MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --swiglu
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
    --vocab-size 129280
    --make-vocab-size-divisible-by 1280
    --max-position-embeddings 4096
    --seq-length 4096
)
MOE_ARGS="--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 \\
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) \\
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 \\
    --moe-router-num-groups 8 --moe-router-group-topk 4 \\
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 \\
    --moe-router-bias-update-rate 1e-3 --moe-token-dispatcher-type alltoall"
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size $PP
    --decoder-first-pipeline-num-layers 3
    --decoder-last-pipeline-num-layers 2
    --expert-model-parallel-size 64
    # --sequence-parallel
    --use-distributed-optimizer
    --fp8-format e4m3 --fp8-recipe blockwise --bf16
    --recompute-granularity selective --recompute-modules mlp moe_act
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${MOE_ARGS} \\
    ${PARALLEL_ARGS[@]} \\
    --micro-batch-size 1 --global-batch-size 15360
"""

CI_YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: false
  --vocab-size: 50257
  --bf16: true
  --deterministic-mode: true
  --data-path: ${DATA_PATH}/text/the_pile
  --train-iters: 50
TEST_TYPE: regular
"""


def reading(folder: Path, text: str, name: str = "args.txt", world: int | None = None) -> Reading:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read(path, world)


def test_a_command_line_gives_the_published_model(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAMA3_70B, world=512)
    assert found.format == "megatron"
    assert found.spec() == presets.preset("llama3-70b")


def test_a_command_line_gives_layout_batch_and_precision(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAMA3_70B, world=512)
    layout = found.to_layout()
    assert (layout.tp, layout.pp, layout.cp, layout.vpp) == (8, 4, 2, 4)
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (1, 8, 1)
    assert layout.world == 512
    assert (layout.schedule, layout.sp, layout.cp_method) == ("interleaved", True, "ring")
    assert (layout.precision, layout.recompute, layout.micro_batch) == ("bf16", "selective", 1)
    assert (found.seq_len, found.global_batch) == (8192, 128)


def test_every_key_says_which_argument_it_is_from(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAMA3_70B, world=512)
    assert found.origins["layout.tp"] == "--tensor-model-parallel-size 8"
    assert found.origins["layout.dp_shard"] == "--use-distributed-optimizer"
    assert found.origins["model.kv_heads"] == "--num-query-groups 8"
    assert found.origins["layout.ep"] == "--expert-model-parallel-size 1 (default)"
    keys = {f"model.{key}" for key in found.model} | {f"layout.{key}" for key in found.layout}
    assert keys <= found.origins.keys()


def test_what_means_nothing_to_a_plan_is_listed(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAMA3_70B + " --my-own-flag 3 --x.y", world=512)
    assert found.unused["lr"] == "3e-4"
    assert found.unused["my-own-flag"] == "3"
    assert found.unused["overlap-grad-reduce"] is True
    assert "tensor-model-parallel-size" not in found.unused


def test_a_launch_script_gives_deepseek_v3(tmp_path: Path) -> None:
    found = reading(tmp_path, DEEPSEEK, "run.sh")
    assert found.spec() == presets.preset("deepseek-v3")
    assert found.world == 2048
    layout = found.to_layout()
    assert (layout.pp, layout.ep, layout.dp_shard, layout.zero) == (16, 64, 128, 1)
    assert layout.stages == [3, *[4] * 14, 2]
    assert (layout.precision, layout.fp8_scaling) == ("fp8", "block")
    assert layout.recompute_parts == ["mlp"]
    assert found.global_batch == 15360
    assert any("moe_act" in note for note in found.notes)
    assert "sequence-parallel" not in found.unused  # it is commented out


def test_a_yaml_file_of_megatrons_tests_is_read(tmp_path: Path) -> None:
    found = reading(tmp_path, CI_YAML, "model_config.yaml", world=8)
    spec, layout = found.spec(), found.to_layout()
    assert (spec.family, spec.layers, spec.ffn_hidden, spec.tie_embeddings) == (
        "gpt2",
        12,
        2048,
        True,
    )
    assert spec.vocab == 50432  # padded to a multiple of 128 x 2
    assert (layout.tp, layout.pp, layout.dp_replicate, layout.sp) == (2, 2, 2, False)
    assert layout.schedule == "1f1b"
    assert layout.zero_stage == 0
    assert found.unused["data-path"] == "${DATA_PATH}/text/the_pile"


def test_the_chips_may_be_left_open(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAMA3_70B)
    assert "dp_shard" not in found.layout and found.world is None
    assert any("data-parallel size unknown" in note for note in found.notes)


@pytest.mark.parametrize(
    "flags, stage",
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-torch-fsdp2", 3),
    ],
)
def test_ways_to_shard_are_zero_stages(tmp_path: Path, flags: str, stage: int) -> None:
    layout = reading(tmp_path, f"--num-layers 4 {flags}", world=8).to_layout()
    assert layout.zero_stage == stage
    assert (layout.dp_shard, layout.dp_replicate) == ((8, 1) if stage else (1, 8))


def test_instances_of_the_optimizer_are_replicas(tmp_path: Path) -> None:
    flags = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    layout = reading(tmp_path, f"--num-layers 4 {flags}", world=8).to_layout()
    assert (layout.dp_replicate, layout.dp_shard) == (2, 4)


def test_a_gated_layer_without_a_width_is_as_narrow_as_megatron_makes_it(tmp_path: Path) -> None:
    found = reading(tmp_path, "--num-layers 4 --hidden-size 4096 --swiglu")
    assert found.model["ffn_hidden"] == 10880


@pytest.mark.parametrize(
    "freq, dense",
    [("1", 0), ("([0]*2+[1]*2)", 2), ("[0,1,1,1]", 1), ("[0]+[1]*3", 1)],
)
def test_dense_layers_come_first(tmp_path: Path, freq: str, dense: int) -> None:
    text = f"--num-layers 4 --swiglu --num-experts 8 --moe-layer-freq {freq}"
    assert reading(tmp_path, text).model["first_dense_layers"] == dense


@pytest.mark.parametrize(
    "flags, key, says",
    [
        ("--swiglu --num-experts 8 --moe-layer-freq [0,1,0,1]", "moe-layer-freq", "first layers"),
        ("--num-experts 8", "num-experts", "add --swiglu"),
        (
            "--swiglu --num-experts 8 --moe-ffn-hidden-size 96 "
            "--moe-shared-expert-intermediate-size 100",
            "moe-shared-expert-intermediate-size",
            "give a multiple",
        ),
        ("--swiglu --vocab-size 0128x", "vocab-size", "whole number"),
        ("--swiglu", "vocab", "give it yourself"),
    ],
)
def test_models_that_cannot_be_had_name_argument_and_fix(
    tmp_path: Path, flags: str, key: str, says: str
) -> None:
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    with pytest.raises(ConfigError) as caught:
        reading(tmp_path, base + flags).spec()
    assert key in caught.value.key and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_arguments_leave_open_may_be_given(tmp_path: Path) -> None:
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"
    found = reading(tmp_path, text).given(vocab=50304)
    assert found.spec().vocab == 50304
    assert found.origins["model.vocab"] == "given"


@pytest.mark.parametrize(
    "text, key, says",
    [
        ("--num-layers 4 --tensor-model-parallel-size $TP", "tensor-model", "does not set this"),
        ("--num-layers 4 --tensor-model-parallel-size 0", "tensor-model", "at least 1"),
        ("--num-layers 4 --tensor-model-parallel-size 2.5", "tensor-model", "whole number"),
        ("--num-layers 4 --micro-batch-size", "micro-batch-size", "whole number"),
        ("--num-layers 4 --tensor-model-parallel-size 3", "world", "the other axes take 3 chips"),
        (
            "--num-layers 10 --pipeline-model-parallel-size 4 "
            "--num-layers-per-virtual-pipeline-stage 2",
            "num-layers-per-virtual",
            "do not divide 10 layers",
        ),
        (
            "--num-layers 9 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
            "decoder-first",
            "leaves 7 layers for 3 equal stages",
        ),
        ("--num-layers 4 --recompute-granularity some", "recompute-granularity", "full, selective"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    tmp_path: Path, text: str, key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        reading(tmp_path, text, world=8)
    assert key in caught.value.key and says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("run.sh", 'echo "hello', "not a command line"),
        ("run.sh", "echo hello", "no arguments in it"),
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.yaml", "- 1", "must map argument names"),
    ],
)
def test_files_without_arguments_are_refused_in_one_line(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        reading(tmp_path, text, name)
    assert says in str(caught.value) and "\n" not in str(caught.value)
