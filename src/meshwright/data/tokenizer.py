"""Byte-level BPE: training one, loading one, and text to token ids and back.

Whoever uses this must not fork afterwards: the `tokenizers` library keeps a pool of threads.
Trainer ranks never need it, they read ids from a token store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.base.errors import ConfigError
from meshwright.data.corpus import Document, read_pieces, scatter

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 256 + 1  # every byte, and the end of text
SAMPLE_BYTES = 4_000_000  # merges for small vocabularies do not change much beyond

_KNOWN_END_OF_TEXT = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's bars and blanks are not ASCII
)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its end-of-text id. `size` is its highest id + 1."""

    backend: Any  # tokenizers.Tokenizer, which ships no types
    end_of_text: int
    size: int

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of each text, nothing added. A special token's name in a text is plain text."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Text of ids; the end of text leaves no trace."""
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """What a `tokenizer.json` of Hugging Face holds."""
        text: str = self.backend.to_str()
        return text


def train_bpe(documents: tuple[Document, ...], vocab: int) -> TextTokenizer:
    """A byte-level BPE of `vocab` tokens, a pure function of the documents.

    Trained on documents in scattered order up to `SAMPLE_BYTES`. All 256 bytes are tokens, so any
    text comes back from its ids. Text too short for that many merges gives fewer tokens. Raises
    ConfigError as `check_trainable` does.
    """
    check_trainable(vocab)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(documents), trainer)
    return _wrap(backend, END_OF_TEXT)


def byte_tokenizer() -> TextTokenizer:
    """Every byte is its own id, and 256 ends a text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as ByteLevel shows them: itself
    hidden = (byte for byte in range(256) if byte not in shown)
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    backend = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return _wrap(backend, END_OF_TEXT)


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json`. Raises ConfigError on `data.tokenizer`."""
    try:
        backend = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = f"{error.strerror}; name a tokenizer.json, or use 'bpe' to train one"
        raise ConfigError("data.tokenizer", str(path), fix) from error
    except Exception as error:  # the library raises bare Exception for a bad file
        fix = f"not a tokenizer.json of Hugging Face ({error}); or use 'bpe' to train one"
        raise ConfigError("data.tokenizer", str(path), " ".join(fix.split())) from error
    known = backend.get_vocab(with_added_tokens=True)
    for name in _KNOWN_END_OF_TEXT:
        if name in known:
            return _wrap(backend, name)
    fix = f"has no end-of-text token; add one of {', '.join(_KNOWN_END_OF_TEXT)}"
    raise ConfigError("data.tokenizer", str(path), fix)


def check_trainable(vocab: int) -> None:
    """Refuse a vocab that cannot hold the bytes and the end of text. Raises ConfigError."""
    if vocab < SMALLEST_VOCAB:
        fix = f"a byte-level tokenizer has at least {SMALLEST_VOCAB} tokens; raise it"
        raise ConfigError("model.vocab", vocab, fix)


def check_fits(tokenizer: TextTokenizer, vocab: int, name: str) -> None:
    """Refuse a tokenizer with ids that the model has no row for. Raises ConfigError."""
    if tokenizer.size > vocab:
        fix = (
            f"has {tokenizer.size} tokens but model.vocab = {vocab}; "
            f"set model.vocab to {tokenizer.size} or more, or use a smaller tokenizer"
        )
        raise ConfigError("data.tokenizer", name, fix)


def _wrap(backend: Any, end_of_text: str) -> TextTokenizer:
    backend.no_truncation()
    backend.no_padding()
    # Else "<|endoftext|>" inside a text would end its document.
    backend.encode_special_tokens = True
    size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
    return TextTokenizer(backend, backend.token_to_id(end_of_text), size)


def _sample(documents: tuple[Document, ...]) -> Iterator[str]:
    pieces = chain.from_iterable(read_pieces(document) for document in scatter(documents))
    left = SAMPLE_BYTES
    for text, _ in pieces:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
