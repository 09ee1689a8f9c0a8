"""The exported model is the trained one, for transformers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runs import Cli, FinishedRun, write_job

from meshwright.checkpoint.opening import newest
from meshwright.plan.job import load_job
from meshwright.train.nn.decoder import Decoder

TOLERANCE = 1e-4  # issue 2, point 7
GPT2 = ("-o", "model.family=gpt2", "-o", "model.kv_heads=4", "-o", "model.tie_embeddings=true")
TWO_STAGES = ("-o", "layout.dp_replicate=1", "-o", "layout.tp=1", "-o", "cluster.ref=local:2")


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Path:
    home = tmp_path_factory.mktemp("gpt2")
    job_file = write_job(home / "job.toml", corpus, steps=3)
    Cli(home, cache).ok("train", job_file, *GPT2, *TWO_STAGES)
    return home / "runs" / "small-1"


@pytest.fixture(params=["llama", "gpt2"])
def run(request: pytest.FixtureRequest, finished: FinishedRun) -> Path:
    if request.param == "llama":
        return finished.path
    path: Path = request.getfixturevalue("gpt2_run")
    return path


def trained(run: Path) -> Decoder:
    """Our model with the weights of the last checkpoint."""
    reader = newest(run / "checkpoints")
    decoder = Decoder(load_job(run / "job.toml").model)
    weights = {
        name: torch.from_numpy(reader.read(f"param/{name}")) for name in decoder.state_dict()
    }
    decoder.load_state_dict(weights)
    assert {f"param/{name}" for name in weights} == {n for n in reader.names if n[:6] == "param/"}
    return decoder.eval()


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


def test_transformers_computes_our_logits(run: Path) -> None:
    ours, theirs = trained(run), load(run / "model")
    tokens = torch.randint(320, (2, 64), generator=torch.manual_seed(0))
    with torch.inference_mode():
        expected, found = ours.logits(tokens), theirs(tokens).logits
    assert expected.std() > 0.01
    assert (expected - found).abs().max() < TOLERANCE


def test_tokenizer_round_trips(run: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    text = "  def naïve(x):\n\treturn '東京 🙂'  # done .\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 320


def test_trained_text_is_likelier_than_noise(finished: FinishedRun) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.path / "model")
    model = load(finished.path / "model")

    def loss(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            return float(model(ids, labels=ids).loss)

    assert (
        loss("def alpha_beta(gamma):\n    return value + 7\n")
        < loss("zq;}ZQ%@#!~ kkwwjj<<>>??") - 1
    )
