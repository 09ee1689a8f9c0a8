"""Exported models load in transformers, compute what ours compute, and come back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.base.errors import CheckpointError, ConfigError, DataError, InputError
from meshwright.models.spec import ModelSpec
from meshwright.ship.hf import read_hf
from meshwright.train.nn.decoder import Decoder

Export = Callable[..., Path]
llama_only = pytest.mark.parametrize("spec", ["llama-gqa"], indirect=True)
gpt2_only = pytest.mark.parametrize("spec", ["gpt2-tied"], indirect=True)
LOGIT_TOLERANCE = 1e-4  # issue 2, point 7


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same_parameters(folder: Path, decoder: Decoder) -> None:
    _, read = read_hf(folder)
    for name, value in decoder.state_dict().items():
        ours = read(name)
        assert ours.dtype == np.float32
        assert ours.tobytes() == value.numpy().tobytes(), name


def test_transformers_loads_it_and_computes_our_logits(
    spec: ModelSpec, decoder: Decoder, export: Export
) -> None:
    theirs = load(export())
    kind = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[spec.family]
    assert type(theirs).__name__ == kind
    tokens = torch.randint(spec.vocab, (3, spec.max_seq_len), generator=torch.manual_seed(1))
    with torch.inference_mode():
        ours, reference = decoder.logits(tokens), theirs(tokens).logits
    assert ours.std() > 0.2
    assert (ours - reference).abs().max() < LOGIT_TOLERANCE


def test_parameters_come_back_bit_for_bit(
    spec: ModelSpec, decoder: Decoder, export: Export
) -> None:
    folder = export()
    assert read_hf(folder)[0] == spec
    assert_same_parameters(folder, decoder)


def test_what_transformers_saves_again_is_read_too(
    spec: ModelSpec, decoder: Decoder, export: Export, tmp_path: Path
) -> None:
    load(export()).save_pretrained(tmp_path / "again")
    assert read_hf(tmp_path / "again")[0] == spec
    assert_same_parameters(tmp_path / "again", decoder)


def test_shards_stay_below_their_limit(spec: ModelSpec, decoder: Decoder, export: Export) -> None:
    limit = 4 * spec.vocab * spec.hidden + 1000
    folder = export(max_shard_bytes=limit)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = []
    for name in files:
        with safe_open(folder / name, framework="np") as file:
            sizes.append(sum(file.get_tensor(key).nbytes for key in file.keys()))  # noqa: SIM118
    assert max(sizes) <= limit
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) == 4 * spec.params
    assert_same_parameters(folder, decoder)
    load(folder)


@llama_only
def test_tokenizer_loads_and_round_trips(export: Export, tokenizer_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(export())
    ours = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_path))
    text = "  def f(x):\n\treturn 'naïve 東京 🙂'  # done .\n"
    assert tokenizer.encode(text) == ours.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert tokenizer.model_max_length == 24


@llama_only
def test_end_of_text_is_what_generation_stops_at(export: Export) -> None:
    model = load(export(end_of_text=5))
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 5


@llama_only
def test_a_model_is_replaced_but_nothing_else(export: Export, tmp_path: Path) -> None:
    export()
    export(end_of_text=5)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(InputError, match="thesis: exists and holds no model"):
        export(out_dir=tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


@llama_only
def test_a_failed_export_leaves_the_model_that_was_there(export: Export, tmp_path: Path) -> None:
    before = (export() / "model.safetensors").read_bytes()

    def read(name: str) -> np.ndarray:
        raise CheckpointError(f"{name}: torn")

    with pytest.raises(CheckpointError, match="torn"):
        export(read=read)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


@llama_only
def test_the_model_before_goes_only_once_the_new_one_is_in_place(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (export() / "model.safetensors").read_bytes()
    rename = Path.rename

    def fail_to_publish(source: Path, target: Path) -> Path:
        if source.name == "model.tmp":
            raise OSError("disk gone")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_to_publish)
    with pytest.raises(CheckpointError, match=r"cannot be written \(disk gone\)"):
        export()
    assert (tmp_path / "model.old" / "model.safetensors").read_bytes() == before


@llama_only
def test_wrong_input_is_refused_before_anything_is_written(
    spec: ModelSpec, export: Export, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"absent\.json"):
        export(tokenizer_path=tmp_path / "absent.json")
    with pytest.raises(DataError, match="no token has id 319"):
        export(end_of_text=319)
    with pytest.raises(InputError, match=r"tokens but model\.vocab = 290"):
        export(spec=spec.model_copy(update={"vocab": 290}))
    with pytest.raises(ConfigError, match="max_shard_bytes = 0"):
        export(max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


@gpt2_only
def test_a_gpt2_that_transformers_cannot_express_is_refused(
    spec: ModelSpec, export: Export, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.head_dim = 4: .*hidden = 32"):
        export(spec=spec.model_copy(update={"head_dim": 4}))
    assert list(tmp_path.iterdir()) == []


@llama_only
def test_a_parameter_of_another_shape_is_named(export: Export) -> None:
    with pytest.raises(CheckpointError, match=r"embed\.weight: shape \(2, 2\)"):
        export(read=lambda _: np.zeros((2, 2), np.float32))


@gpt2_only
def test_published_gpt2_names_without_prefix_are_read(decoder: Decoder, export: Export) -> None:
    path = export() / "model.safetensors"
    bare = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
    save_file(bare, path, metadata={"format": "pt"})
    assert_same_parameters(path.parent, decoder)


@llama_only
def test_bf16_weights_are_read_as_their_exact_fp32(decoder: Decoder, export: Export) -> None:
    path = export() / "model.safetensors"
    halved = {key: value.bfloat16() for key, value in load_file(path).items()}
    save_file(halved, path, metadata={"format": "pt"})
    _, read = read_hf(path.parent)
    expected = decoder.state_dict()["layers.1.mlp.down.weight"].bfloat16().float().numpy()
    assert read("layers.1.mlp.down.weight").tobytes() == expected.tobytes()


@llama_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'; can be read: llama, gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not what our decoder computes"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
        ({"num_key_value_heads": 3}, r"kv_heads \(3\) does not divide heads \(4\)"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_models_that_ours_would_compute_wrongly_are_refused(
    export: Export, change: dict[str, object], message: str
) -> None:
    folder = export()
    edit_config(folder, **change)
    with pytest.raises(InputError, match=message):
        read_hf(folder)


@llama_only
def test_an_incomplete_folder_is_refused(export: Export, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.config\.json: cannot be read"):
        read_hf(tmp_path / "absent")
    folder = export()
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="hidden_size is missing"):
        read_hf(folder)
    edit_config(folder, hidden_size=32)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read"):
        read_hf(folder)


@llama_only
def test_a_tensor_that_contradicts_the_config_is_named(export: Export) -> None:
    folder = export()
    edit_config(folder, intermediate_size=44)
    _, read = read_hf(folder)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \(48, 32\)"):
        read("layers.0.mlp.gate.weight")
    with pytest.raises(CheckpointError, match=r"no parameter layers\.9\.nothing"):
        read("layers.9.nothing")
