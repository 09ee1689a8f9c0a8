"""Text from an exported model: which tokens are taken, and how they become text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from meshwright.base.errors import ConfigError, InputError
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.models.spec import ModelSpec
from meshwright.ship.generate import Generator, Sampler, TextStream
from meshwright.ship.hf import export_hf
from meshwright.train.nn.decoder import Decoder

Export = Callable[..., Path]
Logits = Callable[[Tensor], Tensor]
one_model = pytest.mark.parametrize("spec", ["llama-gqa"], indirect=True)


DEEPSEEK = {
    "family": "deepseek_v3",
    "head_dim": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "n_experts": 4,
    "top_k": 2,
    "n_shared_experts": 1,
    "expert_ffn_hidden": 24,
    "first_dense_layers": 1,
    "gate": "sigmoid",
    "bias_update_rate": 0.001,
}


def sampler(temperature: float, top_k: int = 0, seed: int = 0) -> Sampler:
    return Sampler(temperature, top_k, torch.Generator().manual_seed(seed))


def text(generator: Generator, prompt: str = "def f", **how: float) -> str:
    return "".join(generator.generate(prompt, max_tokens=40, **how))  # type: ignore[arg-type]


def likeliest(logits: Logits, tokenizer: TextTokenizer, longest: int = 64) -> str:
    """What `text` says at temperature 0, by a model that sees the `longest` last tokens."""
    prompt = tokenizer.encode("def f").tolist()
    ids = list(prompt)
    while len(ids) < len(prompt) + 40 and ids[-1] != tokenizer.end_of_text:
        with torch.inference_mode():
            last = logits(torch.tensor([ids[-longest:]]))[0, -1]
        ids.append(int(last[: tokenizer.size].argmax()))
    assert len(ids) > 24
    return tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]


def test_greedy_follows_transformers_past_the_longest_context(
    spec: ModelSpec, export: Export
) -> None:
    folder = export()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    expected = likeliest(lambda ids: theirs(ids).logits, tokenizer, spec.max_seq_len)
    assert text(Generator(folder)) == expected


def test_routing_biases_choose_the_experts(tokenizer_path: Path, tmp_path: Path) -> None:
    """They are no parameters, so a model that leaves them out loads all the same."""
    shape = {"layers": 2, "hidden": 32, "heads": 4, "max_seq_len": 64, "vocab": 320}
    decoder = Decoder(ModelSpec.model_validate({**shape, **DEEPSEEK})).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.1, 0.3)
    state, texts = {name: value.numpy() for name, value in decoder.state_dict().items()}, []
    for favoured in (slice(0, 2), slice(2, 4)):
        bias = decoder.get_submodule("layers.1.mlp.router").get_buffer("bias").zero_()
        bias[favoured] = 9
        read = {**state, "layers.1.mlp.router.bias": bias.numpy()}.__getitem__
        folder = export_hf(decoder.spec, read, tokenizer_path, 0, tmp_path / str(favoured.start))
        texts.append(text(Generator(folder)))
        assert texts[-1] == likeliest(decoder.logits, load_tokenizer(folder / "tokenizer.json"))
    assert texts[0] != texts[1]


@one_model
def test_a_seed_gives_one_text_and_another_seed_another(export: Export) -> None:
    folder = export()
    texts = [text(Generator(folder), temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@one_model
def test_generation_ends_at_end_of_text(export: Export, decoder: Decoder) -> None:
    # A model that gives the end of text (0) and token 1 one half each, whatever came before.
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        decoder.embed.weight.fill_(1)
        decoder.norm.weight.fill_(1)  # type: ignore[operator]
        decoder.head.weight[:2] = 1
    generator = Generator(export())
    lengths = [len(text(generator, temperature=1.0, seed=seed)) for seed in range(6)]
    assert len(set(lengths)) > 1
    assert max(lengths) < 12  # about 20 of the 40 tokens, if it went on


@one_model
def test_generation_ends_at_max_tokens(export: Export) -> None:
    generator = Generator(export())
    assert list(generator.generate("x", max_tokens=0)) == []
    assert 1 <= len("".join(generator.generate("x", max_tokens=1))) < len(text(generator, "x"))


@one_model
def test_an_empty_prompt_starts_a_text(export: Export) -> None:
    assert text(Generator(export()), prompt="") != ""


@one_model
def test_padding_of_the_vocabulary_is_never_drawn(export: Export, decoder: Decoder) -> None:
    # Rows that pad are by far the most likely, and decode to nothing.
    with torch.no_grad():
        decoder.head.weight[:300] = 0
        decoder.head.weight[300:] *= 100
    assert text(Generator(export()), temperature=1.0) != ""


@one_model
@pytest.mark.parametrize(
    "how",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"seed": -1}],
)
def test_values_out_of_range_are_refused_at_the_call(export: Export, how: dict[str, float]) -> None:
    (key,) = how
    with pytest.raises(ConfigError, match=key):
        Generator(export()).generate("x", **how)  # type: ignore[arg-type]


@one_model
def test_a_folder_that_does_not_fit_together_is_refused(export: Export, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Generator(tmp_path / "absent")
    folder = export()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        Generator(folder)


def test_temperature_zero_takes_the_largest_and_a_tiny_one_does_not_overflow() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, -5.0])
    assert sampler(0.0).choose(logits) == 1
    assert {sampler(1e-310, seed=seed).choose(logits) for seed in range(20)} == {1}


def test_top_k_draws_from_the_k_most_likely_in_proportion() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.1, 0.3]))
    source = sampler(1.0, top_k=2)
    drawn = [source.choose(logits) for _ in range(4000)]
    assert set(drawn) == {1, 3}
    assert drawn.count(1) / len(drawn) == pytest.approx(0.5 / 0.8, abs=0.03)
    hot = sampler(2.0, top_k=9)
    assert {hot.choose(logits) for _ in range(400)} == {0, 1, 2, 3}


@pytest.mark.parametrize("written", ["naïve café 東京 €5 🙂!", "🙂🙂", "plain", "a\ufffdb"])
def test_pieces_are_whole_characters_and_add_up(tokenizer_path: Path, written: str) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    # Byte by byte, so that every character of several bytes arrives in parts.
    alphabet = tokenizer.backend.pre_tokenizer.pre_tokenize_str(written)
    ids = [tokenizer.backend.token_to_id(byte) for word, _ in alphabet for byte in word]
    assert len(ids) == len(written.encode())
    stream = TextStream(tokenizer, [])
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == written
    if "\ufffd" not in written:
        assert [piece for piece in pieces if piece] == list(written)


def test_a_character_cut_off_at_the_end_is_marked(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    word = tokenizer.backend.pre_tokenizer.pre_tokenize_str("é")[0][0]
    stream = TextStream(tokenizer, tokenizer.encode("caf").tolist())
    assert stream.push(tokenizer.backend.token_to_id(word[0])) == ""
    assert stream.flush() == "\ufffd"
