"""A model folder as the `[model]` of a job: its shape, its tokenizer, what may be set besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.config import to_toml
from meshwright.base.errors import ConfigError, InputError
from meshwright.models import presets
from meshwright.models.hf_config import to_config
from meshwright.plan.job import Job, load_job, resolve_job


@pytest.fixture(params=["qwen3-30b-a3b"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """config.json and tokenizer.json of a preset; a job needs no weights to be resolved."""
    path = tmp_path / "theirs"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_config(presets.preset(request.param), 0)))
    (path / "tokenizer.json").write_text("{}")
    return path


gpt2 = pytest.mark.parametrize("folder", ["gpt2"], indirect=True)


def resolved(folder: Path, model: dict[str, Any] | None = None, **data: Any) -> Job:
    return resolve_job(
        {
            "job": {"steps": 1},
            "model": {"hf": str(folder), **(model or {})},
            "data": {"seq_len": 64, "global_batch": 1, **data},
        }
    )


def test_the_shape_and_the_tokenizer_are_those_of_the_folder(folder: Path) -> None:
    job = resolved(folder)
    expected = presets.preset("qwen3-30b-a3b").model_copy(update={"hf": str(folder)})
    assert job.model == expected
    assert job.data.tokenizer == str(folder / "tokenizer.json")
    assert resolved(folder, tokenizer="bpe").data.tokenizer == "bpe"
    (folder / "tokenizer.json").unlink()
    assert resolved(folder).data.tokenizer == "bpe"


@pytest.mark.parametrize(
    "own",
    [
        {"z_loss": 0.1, "bias_update_rate": 0.01, "aux_loss": 0.0},
        {"dropout": 0.1, "capacity_factor": 1.5},
        {"max_seq_len": 2**17},
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 32768},
        {"layers": 48},
    ],
    ids=str,
)
def test_what_no_weight_depends_on_may_be_set(folder: Path, own: dict[str, Any]) -> None:
    model = resolved(folder, own).model
    assert {key: getattr(model, key) for key in own} == own
    assert model.n_experts == 128


@pytest.mark.parametrize(
    ("key", "value", "has"),
    [("layers", 3, 48), ("norm_top_k", False, True), ("family", "llama", "'qwen3_moe'")],
)
def test_what_the_weights_decide_may_not(folder: Path, key: str, value: Any, has: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, {key: value})
    where = f"model.hf = {str(folder)!r}"
    line = f"model.{key} = {value!r}: {where} has weights for {has}; leave {key} out"
    assert (str(caught.value), caught.value.exit_code) == (line, 2)


@gpt2
def test_learned_positions_are_weights(folder: Path) -> None:
    assert resolved(folder, {"dropout": 0.1}).model.max_seq_len == 1024
    with pytest.raises(ConfigError, match=r"model\.max_seq_len = 2048: .* has weights for 1024"):
        resolved(folder, {"max_seq_len": 2048})


def test_a_resolved_job_needs_the_folder_no_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"job": {"steps": 1}, "data": {"seq_len": 64, "global_batch": 1}}
    path = tmp_path / "job.toml"
    path.write_text(to_toml({**tables, "model": {"hf": "theirs"}}))
    monkeypatch.chdir(tmp_path)
    job = load_job(path)
    assert job.model.hf == str(folder)
    path.write_text(to_toml(job.model_dump()))
    (folder / "config.json").unlink()
    monkeypatch.chdir("/")
    assert load_job(path) == job


def test_a_folder_without_a_model_of_ours_is_refused_in_one_line(tmp_path: Path) -> None:
    for content in (None, "[]", "{", '{"model_type": "bert"}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError) as caught:
            resolved(tmp_path)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{tmp_path}/config.json: ")
