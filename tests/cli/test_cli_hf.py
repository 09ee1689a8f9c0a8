"""A run that starts from a Hugging Face folder: same weights, same tokenizer, and back again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runs import Cli, events, metrics, one_error_line, snapshot

from meshwright.base.events import Kind
from meshwright.checkpoint.store import Store
from meshwright.plan.job import load_job

TOLERANCE = 1e-4  # issue 3, point 8
JOB = """\
[job]
steps = 2

[model]
hf = "{folder}"

[data]
source = "{corpus}"
seq_len = 32
global_batch = 4

[layout]
{layout}

[cluster]
ref = "local:4"

[optimizer]
lr = 1e-30
"""
COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (
        lambda: transformers.LlamaConfig(**COMMON),
        "tp = 2\npp = 2",
    ),
    "qwen3_moe": (
        lambda: transformers.Qwen3MoeConfig(
            **COMMON,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        "dp_replicate = 2\ndp_shard = 2\nep = 2",
    ),
}
one_model = pytest.mark.parametrize("theirs", ["llama"], indirect=True)


@pytest.fixture(params=list(MODELS))
def theirs(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = MODELS[request.param][0]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.05, 0.2)
    return model


@pytest.fixture
def folder(theirs: Any, tokenizer_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "theirs"
    theirs.save_pretrained(path)
    shutil.copy(tokenizer_file, path / "tokenizer.json")
    return path


@pytest.fixture
def hf_job(theirs: Any, folder: Path, corpus: Path, tmp_path: Path) -> Path:
    layout = MODELS[theirs.config.model_type][1]
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=folder, corpus=corpus, layout=layout))
    return path


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(320, (2, 40), generator=torch.manual_seed(0))
    with torch.inference_mode():
        found: torch.Tensor = model(tokens).logits
    return found


def test_weights_come_and_go_unchanged(
    cli: Cli, hf_job: Path, folder: Path, theirs: Any, tokenizer_file: Path
) -> None:
    cli.ok("train", hf_job, "--run-dir", "run")
    run = cli.cwd / "run"
    assert (run / "model" / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        run / "model", attn_implementation="eager"
    ).eval()
    assert type(ours) is type(theirs)
    expected = logits(theirs)
    assert expected.std() > 0.1
    assert (logits(ours) - expected).abs().max() < TOLERANCE
    store = Store.open(run / "checkpoints")
    first, last = map(store.reader, store.commits())
    assert (first.step, last.step) == (0, 2)
    assert not any(name.startswith("adamw") for name in first.names)
    assert last.read("adamw.m/embed.weight").any()
    assert load_job(run / "job.toml").model.hf == str(folder)


@one_model
def test_a_run_that_has_begun_needs_the_weights_no_more(
    cli: Cli, hf_job: Path, folder: Path
) -> None:
    cli.ok("train", hf_job, "--run-dir", "run")
    for path in folder.iterdir():
        if path.name != "tokenizer.json":  # the data is tokenized again if the cache is lost
            path.unlink()
    cli.ok("train", "run", "--resume", "-o", "job.steps=3")
    run = cli.cwd / "run"
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert [start["resumed_from"] for start in events(run, Kind.RUN_STARTED)] == [None, 2]


@one_model
def test_the_check_starts_from_the_folder(cli: Cli, hf_job: Path) -> None:
    lr = ("-o", "optimizer.lr=0.001")
    said = cli.ok("check", hf_job, "--steps", "2", "--json", *lr)
    cli.ok("train", hf_job, "--run-dir", "run", *lr)
    checked = json.loads(said.stdout)["steps"][0]["loss"]
    assert checked == pytest.approx(float(metrics(cli.cwd / "run")[0]["loss"]), rel=1e-5)
    assert checked > math.log(320) + 0.1  # drawn weights know nothing; these know worse


@one_model
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("model.layers=3", ("model.layers = 3", "model.hf", "weights for 2", "leave layers out")),
        ("model.preset=tiny", ("model.preset = 'tiny'", "model.hf", "leave one")),
        ("model.hf=nowhere", ("nowhere/config.json", "cannot be read", "model folder")),
        ("model.hiden=3", ("model.hiden", 'did you mean "hidden"?')),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_contradicts_the_folder_is_refused(
    cli: Cli, hf_job: Path, args: str, words: tuple[str, ...]
) -> None:
    before = snapshot(cli.cwd)
    line = one_error_line(cli.run("train", hf_job, "-o", args), 2)
    assert all(word in line for word in words), line
    assert snapshot(cli.cwd) == before


@one_model
def test_a_folder_without_weights_is_refused_before_anything_is_written(
    cli: Cli, hf_job: Path, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    before = snapshot(cli.cwd)
    for command in ("train", "check"):
        assert "model.safetensors" in one_error_line(cli.run(command, hf_job), 2)
    assert snapshot(cli.cwd) == before
