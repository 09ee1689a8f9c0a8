"""Text from a model in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.base.errors import ConfigError
from meshwright.data.tokenizer import TextTokenizer, check_fits, load_tokenizer
from meshwright.models.hf_folder import TOKENIZER_NAME
from meshwright.ship.hf import read_hf
from meshwright.ship.hf_weights import bias_names
from meshwright.train.nn.decoder import Decoder

_PROMPT_CONTEXT = 8  # tokens; enough for a decoder that treats the first word of a text apart
_INCOMPLETE = "\ufffd"  # what bytes that are not yet a whole character decode to


@dataclass(frozen=True)
class Sampler:
    """How the next token is taken from its logits."""

    temperature: float
    top_k: int
    random: torch.Generator

    def choose(self, logits: Tensor) -> int:
        """A token id, given logits [vocab]."""
        if self.temperature == 0:
            return int(logits.argmax())
        kept = min(self.top_k or logits.numel(), logits.numel())
        values, ids = logits.double().topk(kept)
        # Relative to the largest and in fp64, so that a tiny temperature does not overflow.
        chances = ((values - values[0]) / self.temperature).softmax(0)
        return int(ids[torch.multinomial(chances, 1, generator=self.random)])


class TextStream:
    """Turns tokens into text as they come, holding back bytes that are not yet a character.

    New tokens are decoded behind the ones emitted last, since what a token decodes to may depend
    on whether it begins the text.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = prompt[-_PROMPT_CONTEXT:]
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Text that is complete with `token`; empty while a character is not."""
        self._held.append(token)
        text = self._decode_held()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._emitted, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What is still held, at the end of the text."""
        return self._decode_held()

    def _decode_held(self) -> str:
        before = self._tokenizer.decode(self._emitted)
        return self._tokenizer.decode(self._emitted + self._held)[len(before) :]


class Generator:
    """A model and its tokenizer, in fp32 on the CPU.

    Raises InputError (ConfigError, DataError) if the folder holds no model and tokenizer that fit
    each other, CheckpointError if its weights are damaged.
    """

    def __init__(self, model_folder: Path) -> None:
        spec, read = read_hf(model_folder)
        self._max_seq_len = spec.max_seq_len
        self._tokenizer = load_tokenizer(model_folder / TOKENIZER_NAME)
        check_fits(self._tokenizer, spec.vocab, str(model_folder / TOKENIZER_NAME))
        with torch.device("meta"):
            self._model = Decoder(spec)
        weights = {name: torch.from_numpy(read(name)) for name in self._model.state_dict()}
        self._model.load_state_dict(weights, assign=True)
        buffers = dict(self._model.named_buffers())
        for name in bias_names(spec):
            buffers[name].copy_(torch.from_numpy(read(name)))
        self._model.eval()

    def generate(
        self,
        prompt: str,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Pieces of text that follow `prompt`, each of whole characters, as they are made.

        Ends after `max_tokens` tokens or at the model's end of text. `temperature` 0 takes the most
        likely token; else tokens are drawn from softmax(logits / temperature) over the `top_k` most
        likely (0: all), the same ones for the same `seed`. The model sees the last `max_seq_len`
        tokens. Raises ConfigError on values out of range.
        """
        _check_range("max_tokens", max_tokens)
        _check_range("temperature", temperature)
        _check_range("top_k", top_k)
        _check_range("seed", seed, below=2**63)
        ids: list[int] = self._tokenizer.encode(prompt).tolist()
        random = torch.Generator().manual_seed(seed)
        return self._stream(ids, max_tokens, Sampler(temperature, top_k, random))

    def _stream(self, ids: list[int], max_tokens: int, sampler: Sampler) -> Iterator[str]:
        text = TextStream(self._tokenizer, ids)
        context = ids or [self._tokenizer.end_of_text]
        for _ in range(max_tokens):
            token = sampler.choose(self._next_logits(context))
            if token == self._tokenizer.end_of_text:
                break
            context.append(token)
            if piece := text.push(token):
                yield piece
        if rest := text.flush():
            yield rest

    def _next_logits(self, context: list[int]) -> Tensor:
        """Logits [tokenizer size] of the token that follows; padding of the vocabulary is out."""
        window = torch.tensor([context[-self._max_seq_len :]])
        with torch.inference_mode():
            return self._model.logits(window)[0, -1, : self._tokenizer.size]


def _check_range(key: str, value: float, below: float = float("inf")) -> None:
    if not 0 <= value < below:
        raise ConfigError(key, value, f"must be at least 0 and below {below}")
