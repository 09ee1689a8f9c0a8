"""Models as Hugging Face folders: what `transformers` loads, written from and read back as ours.

    config.json  generation_config.json  tokenizer.json  tokenizer_config.json
    model.safetensors, or model-00001-of-00002.safetensors ... + model.safetensors.index.json

Format: https://huggingface.co/docs/transformers (sharded checkpoints) and safetensors.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.base.errors import CheckpointError, ConfigError, DataError, InputError
from meshwright.data.tokenizer import check_fits, load_tokenizer
from meshwright.models.hf_config import to_config
from meshwright.models.hf_folder import CONFIG_NAME, TOKENIZER_NAME, folder_spec, read_json
from meshwright.models.spec import ModelSpec
from meshwright.ship.hf_weights import Array, Read, Weight, hf_weights
from meshwright.ship.lying import Lies
from meshwright.ship.tensor_file import INDEX_NAME, SINGLE_NAME, Entry, write_shards


def export_hf(
    spec: ModelSpec,
    read: Read,
    tokenizer_path: Path,
    end_of_text: int,
    out_dir: Path,
    max_shard_bytes: int = 5_000_000_000,
    lies: Lies | None = None,
) -> Path:
    """Write the model as a folder that `transformers` loads, in fp32; returns `out_dir`.

    `read(name)` gives a parameter by our name, whole, fp32, and routing biases (`bias_names` of
    `hf_weights`); one tensor at a time is held in memory, and what it is part of. What `lies` says
    to lie in a store as it is needed is copied from there instead.
    The folder appears by one rename; a model that `out_dir` holds already is replaced. Raises
    InputError (ConfigError, DataError) before anything is written, CheckpointError if a parameter
    has another shape than the model or the folder cannot be written.
    """
    config = to_config(spec, end_of_text)
    token = _end_token(tokenizer_path, end_of_text, spec.vocab)
    if max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "at least 1")
    if out_dir.exists() and not _is_replaceable(out_dir):
        raise InputError(f"{out_dir}: exists and holds no model; name a new folder")
    tmp = _sibling(out_dir, ".tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        _write_json(tmp / CONFIG_NAME, config)
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        _write_json(tmp / "generation_config.json", ends)
        shutil.copyfile(tokenizer_path, tmp / TOKENIZER_NAME)
        _write_json(tmp / "tokenizer_config.json", _tokenizer_config(spec, token))
        entries = list(_entries(hf_weights(spec), _holding_last(read), lies))
        write_shards(tmp, entries, max_shard_bytes, lies.holding if lies else None)
        _publish(tmp, out_dir)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out_dir}: cannot be written ({error}); free space") from error
    return out_dir


def read_hf(folder: Path) -> tuple[ModelSpec, Read]:
    """The model in a Hugging Face folder, and a function that gives a parameter by our name, fp32.

    All families, one file or sharded, weights in fp32, bf16 or fp16. Raises InputError if the
    folder holds no such model or lacks a tensor; the function raises CheckpointError if a tensor
    cannot be read or has another shape than config.json says.
    """
    spec = folder_spec(folder)
    weights = hf_weights(spec)
    files = _weight_files(folder)
    # The GPT-2 files that OpenAI's weights are published in leave the prefix out.
    prefix = "transformer." if spec.family == "gpt2" and "wte.weight" in files else ""
    holders = defaultdict(list)
    for weight in weights:
        for part in weight.parts:
            holders[part.name].append(weight)
        if weight.hf_name.removeprefix(prefix) not in files:
            raise InputError(f"{folder}: tensor {weight.hf_name} is missing; fetch it again")

    def read(name: str) -> Array:
        if name not in holders:
            raise CheckpointError(f"{folder}: this model has no parameter {name}")
        entries = [unpacked(weight, name) for weight in holders[name]]
        return np.stack(entries) if holders[name][0].holds_entry else entries[0]

    def unpacked(weight: Weight, name: str) -> Array:
        hf_name = weight.hf_name.removeprefix(prefix)
        return weight.unpack(_read_tensor(folder / files[hf_name], hf_name, weight), name)

    return spec, read


def _holding_last(read: Read) -> Read:
    """`read` that does not read again what it was asked for last: a stacked parameter is taken
    apart one entry at a time."""
    last: dict[str, Array] = {}

    def held(name: str) -> Array:
        if name not in last:
            last.clear()
            last[name] = read(name)
        return last[name]

    return held


def _end_token(tokenizer_path: Path, end_of_text: int, vocab: int) -> str:
    """The token of id `end_of_text`, after checking that the tokenizer fits the model."""
    tokenizer = load_tokenizer(tokenizer_path)
    check_fits(tokenizer, vocab, str(tokenizer_path))
    token: str | None = tokenizer.backend.id_to_token(end_of_text)
    if token is None:
        raise DataError(
            f"{tokenizer_path}: no token has id {end_of_text}, the end of text; "
            f"its own is {tokenizer.end_of_text}"
        )
    return token


def _tokenizer_config(spec: ModelSpec, end_token: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_token,
        "eos_token": end_token,
        "model_max_length": spec.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }


def _entries(weights: list[Weight], read: Read, lies: Lies | None) -> Iterator[Entry]:
    for weight in weights:
        spans = lies(weight) if lies else None
        array = partial(weight.pack, read)
        yield Entry(weight.hf_name, "float32", weight.shape, array, spans)


def _is_replaceable(folder: Path) -> bool:
    """Only a model, or an empty folder: never something else that lies at this path."""
    return folder.is_dir() and ((folder / CONFIG_NAME).is_file() or not any(folder.iterdir()))


def _sibling(folder: Path, suffix: str) -> Path:
    resolved = folder.resolve()
    return resolved.with_name(resolved.name + suffix)


def _publish(tmp: Path, out_dir: Path) -> None:
    """Rename into place; what was there before goes only after that."""
    old = _sibling(out_dir, ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(old)
    tmp.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _weight_files(folder: Path) -> dict[str, str]:
    """File of each tensor."""
    if (folder / INDEX_NAME).is_file():
        return dict(read_json(folder / INDEX_NAME)["weight_map"])
    path = folder / SINGLE_NAME
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_NAME)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error}); fetch the model again") from error


def _read_tensor(path: Path, hf_name: str, weight: Weight) -> Array:
    try:
        # Through torch, since numpy has no bf16.
        with safe_open(path, framework="pt") as file:
            tensor: Array = file.get_tensor(hf_name).float().numpy()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: {hf_name} cannot be read ({error}); export or fetch the model again"
        ) from error
    if tensor.shape != weight.shape:
        raise CheckpointError(
            f"{path}: {hf_name} has shape {tensor.shape}, config.json says {weight.shape}; "
            "export or fetch the model again"
        )
    return tensor


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
