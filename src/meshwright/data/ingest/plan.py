"""What is to be built, how, and the tokenizer it is built with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import ConfigError
from meshwright.data.ingest.filters import Rules
from meshwright.data.ingest.records import Keys
from meshwright.data.tokenizer import load_tokenizer

BYTES = "bytes"
FORMAT = 1


@dataclass(frozen=True)
class BuildOptions:
    """`kind`: "tokens" or "samples". `tokenizer`: "bytes", or a tokenizer.json. `dedup`: "none",
    "exact" or "minhash", which is exact too. `held_out`: share of the documents that become a store
    of their own. `licence`: of what names none; `licences`: those allowed, none is all."""

    kind: str = "tokens"
    tokenizer: str = BYTES
    dedup: str = "exact"
    held_out: float = 0.0
    keys: Keys = field(default_factory=Keys)
    rules: Rules = field(default_factory=Rules)
    licence: str = ""
    licences: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        allowed = {"kind": ("tokens", "samples"), "dedup": ("none", "exact", "minhash")}
        for name, words in allowed.items():
            if (value := getattr(self, name)) not in words:
                raise ConfigError(f"--{name}", value, f"it is one of {', '.join(words)}")
        if not 0 <= self.held_out < 1:
            raise ConfigError("--held-out", self.held_out, "it is a share of at least 0 below 1")
        if self.kind == "samples" and self.dedup == "minhash":
            fix = "compares text; use exact for samples"
            raise ConfigError("--dedup", self.dedup, fix)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document


@dataclass(frozen=True)
class Encoder:
    """Text to ids. `identity` is the hash of the tokenizer; two stores with different ones must
    never meet in a run."""

    identity: str
    end_of_text: int
    vocab: int
    backend: Any = None  # a TextTokenizer; None: bytes are their own ids

    @property
    def about(self) -> tuple[int, int, str]:
        """What a store of its ids is told."""
        return self.vocab, self.end_of_text, self.identity

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.integer]]:
        """Ids of each text, the end of text not among them."""
        if self.backend is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        found: list[npt.NDArray[np.integer]] = self.backend.encode_batch(texts)
        return found


def open_encoder(tokenizer: str) -> Encoder:
    """Raises ConfigError if it cannot be used."""
    if tokenizer == BYTES:
        return Encoder(sha256(b"bytes, end of text 256").hexdigest(), 256, 257)
    path = Path(tokenizer)
    backend = load_tokenizer(path)
    identity = sha256(backend.to_json().encode()).hexdigest()
    return Encoder(identity, backend.end_of_text, backend.size, backend)
