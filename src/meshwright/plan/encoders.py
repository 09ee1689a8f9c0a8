"""Encoders of images and sound: their shapes, by name or from a file, and what was asked of one."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.base.config import parse, read_toml
from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.models.spec import ModelSpec

ITEM_BYTES = 100e3  # assumed: a JPEG of a few hundred thousand pixels


class Encoder(BaseModel):
    """A transformer without a causal mask that turns an item, an image say, into embeddings; keys
    as in `encoders.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    ffn_hidden: int = Field(gt=0)
    tokens: int = Field(gt=0)
    sequence_tokens: int = Field(default=0, ge=0, description="0: as many as tokens")
    inputs: int = Field(default=588, gt=0)
    item_bytes: float = Field(default=ITEM_BYTES, gt=0)
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"heads ({self.heads}) does not divide hidden ({self.hidden})")
        return self

    @property
    def spec(self) -> ModelSpec:
        """As the cost model has it: GPT-2's layers (LayerNorm, learned positions, GELU, biases) are
        those of a ViT. There is no vocabulary; in its place stands the product that makes a token
        of `inputs` values, which has the weights and the FLOPs of a tied head over as many rows."""
        return ModelSpec(
            family="gpt2",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn_hidden=self.ffn_hidden,
            vocab=self.inputs,
            max_seq_len=self.tokens,
            tie_embeddings=True,
        )


@dataclass(frozen=True)
class Wanted:
    """What `plan` was asked about an encoder; None: to be filled in. `images` are items in a
    sequence, `image_tokens` what each takes of it, `image_bytes` what each takes on storage."""

    encoder: str
    images: int | None = None
    image_tokens: int | None = None
    image_bytes: float | None = None
    frozen: bool = False


@dataclass(frozen=True)
class Beside:
    """An encoder beside a language model, everything filled in; `notes` say what was."""

    name: str
    encoder: Encoder
    images: int
    image_tokens: int
    image_bytes: float
    frozen: bool
    notes: tuple[str, ...]

    @property
    def trained_params(self) -> int:
        """Weights that are trained, and kept in checkpoints with their optimizer state."""
        return 0 if self.frozen else self.encoder.spec.params


def names() -> list[str]:
    """All encoders that are known by name, in the order of the file."""
    return list(_table())


def encoder(name: str) -> Encoder:
    """The encoder called `name`, or that of a TOML file. Raises ConfigError."""
    if name in _table():
        return parse(Encoder, _table()[name], "encoder")
    if Path(name).expanduser().is_file():
        return parse(Encoder, read_toml(Path(name).expanduser()), "encoder")
    hint = did_you_mean(name.lower(), names()) or f"; known: {', '.join(names())}"
    raise ConfigError("encoder", name, "neither an encoder nor a file" + hint)


def beside(wanted: Wanted, seq_len: int) -> Beside:
    """`wanted` beside a language model with sequences of `seq_len` tokens. Raises ConfigError where
    the items do not fit into one."""
    found = encoder(wanted.encoder)
    images = wanted.images or 1
    each = wanted.image_tokens or found.sequence_tokens or found.tokens
    if images * each > seq_len:
        fix = (
            f"of {each} tokens each do not fit into a sequence of {seq_len}; at most "
            f"{seq_len // each} do, or set --seq-len or --image-tokens"
        )
        raise ConfigError("images", images, fix)
    size = wanted.image_bytes or found.item_bytes
    notes = [f"images in a sequence of {seq_len} tokens: {images}, of {each} tokens each"]
    if wanted.images is None:
        notes.append("images = 1: not given")
    if wanted.image_bytes is None:
        notes.append(f"image_bytes = {size:g}: assumed")
    return Beside(wanted.encoder, found, images, each, size, wanted.frozen, tuple(notes))


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("meshwright.plan").joinpath("encoders.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
