"""Mixtures of experts from the command line: routing biases reach the exported model, and a model
that no class of transformers computes trains all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cli_runs import Cli, events, metrics, one_error_line

from meshwright.base.events import Kind
from meshwright.checkpoint.opening import newest
from meshwright.plan.job import load_job
from meshwright.ship.start import commit_read
from meshwright.train.nn.decoder import Decoder

TOLERANCE = 1e-4  # issue 3, point 8
JOB = """\
[job]
name = "moe"
steps = 3

[model]
family = "deepseek_v3"
layers = 2
hidden = 32
heads = 4
head_dim = 12
vocab = 320
max_seq_len = 64
kv_lora_rank = 16
qk_rope_head_dim = 4
n_experts = 4
top_k = 2
n_shared_experts = 1
expert_ffn_hidden = 24
gate = "{gate}"
bias_update_rate = 0.5

[data]
source = "{corpus}"
seq_len = 32
global_batch = 4

[layout]
dp_replicate = 2
ep = 2

[cluster]
ref = "local:2"
"""


def write_moe_job(path: Path, corpus: Path, gate: str) -> Path:
    path.write_text(JOB.format(corpus=corpus, gate=gate))
    return path


def test_routing_biases_are_exported_with_the_weights(
    cli: Cli, corpus: Path, tmp_path: Path
) -> None:
    cli.ok("train", write_moe_job(tmp_path / "job.toml", corpus, "sigmoid"), "--run-dir", "run")
    run = cli.cwd / "run"
    read = commit_read(newest(run / "checkpoints"))
    biases = [read(f"layers.{layer}.mlp.router.bias") for layer in range(2)]
    assert all(np.abs(bias).max() >= 0.5 for bias in biases), "one that chooses"
    ours = Decoder(load_job(run / "job.toml").model).eval()
    ours.load_state_dict({name: torch.from_numpy(read(name)) for name in ours.state_dict()})
    buffers = dict(ours.named_buffers())
    for layer, bias in enumerate(biases):
        buffers[f"layers.{layer}.mlp.router.bias"].copy_(torch.from_numpy(bias))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        run / "model", attn_implementation="eager"
    ).eval()
    tokens = torch.randint(320, (2, 64), generator=torch.manual_seed(0))
    with torch.inference_mode():
        expected, found = ours.logits(tokens), theirs(tokens).logits
    assert expected.std() > 0.01
    assert (expected - found).abs().max() < TOLERANCE
    assert cli.ok("generate", "run", "--prompt", "def ").stdout.startswith("def ")


@pytest.fixture
def without_export(cli: Cli, corpus: Path, tmp_path: Path) -> Path:
    """A finished run whose gate no class of transformers computes."""
    said = cli.ok(
        "train", write_moe_job(tmp_path / "job.toml", corpus, "softmax"), "--run-dir", "run"
    )
    (note,) = [line for line in said.stderr.splitlines() if "no model folder" in line]
    assert "model.gate = 'softmax': DeepseekV3ForCausalLM" in note
    assert "generate" not in said.stderr
    return cli.cwd / "run"


def test_what_cannot_be_exported_trains_all_the_same(cli: Cli, without_export: Path) -> None:
    run = without_export
    assert len(metrics(run)) == 3
    assert not (run / "model").exists()
    assert events(run, Kind.MODEL_EXPORTED) == []
    assert len(events(run, Kind.RUN_FINISHED)) == 1
    assert "job.steps" in one_error_line(cli.run("train", run, "--resume"), 2)
    assert "holds no model" in one_error_line(cli.run("generate", run, "--prompt", "x"), 2)
