"""Small models with random weights, and the tokenizer that goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.models.spec import ModelSpec
from meshwright.ship.hf import export_hf
from meshwright.train.nn.decoder import Decoder

TEXT = ["def f(x):\n    return x + 1\n", "naïve café, 東京 €5 🙂\n"] * 20
END_OF_TEXT = "<|endoftext|>"
VOCAB = 320  # of the models; the tokenizer has fewer tokens, the rest is padding

SPECS = {
    "llama-gqa": {"family": "llama", "kv_heads": 2, "rope_theta": 50_000.0, "norm_eps": 1e-3},
    "llama-tied": {"family": "llama", "head_dim": 12, "tie_embeddings": True},
    "gpt2-tied": {"family": "gpt2", "tie_embeddings": True, "norm_eps": 1e-3},
    "gpt2-untied": {"family": "gpt2", "ffn_hidden": 40},
}


def random_decoder(spec: ModelSpec) -> Decoder:
    """Weights of a size at which every part of the model shows in the logits."""
    torch.manual_seed(0)
    decoder = Decoder(spec).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.1, 0.3)
    return decoder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "ffn_hidden": 48, "max_seq_len": 24}
    return ModelSpec.model_validate({**shape, "vocab": VOCAB, **SPECS[request.param]})


@pytest.fixture
def decoder(spec: ModelSpec) -> Decoder:
    return random_decoder(spec)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture
def export(
    spec: ModelSpec, decoder: Decoder, tokenizer_path: Path, tmp_path: Path
) -> Callable[..., Path]:
    """Writes the model of the test; keywords override those of `export_hf`."""

    def run(**overrides: object) -> Path:
        weights = {name: value.numpy() for name, value in decoder.state_dict().items()}
        arguments = {
            "spec": spec,
            "read": weights.__getitem__,
            "tokenizer_path": tokenizer_path,
            "end_of_text": 0,
            "out_dir": tmp_path / "model",
        }
        return export_hf(**{**arguments, **overrides})  # type: ignore[arg-type]

    return run
