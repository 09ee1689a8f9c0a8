"""Codec "adamw": one optimizer step as what AdamW's own formula leaves unexplained.

With weight, m and v of the step before, m of this step gives the gradient, that gives v, and both
give the weight (arXiv 1711.05101), in the order of operations of torch's fused kernel. Stored are
the integer differences of the bit patterns to these predictions: those of m are all but as long as
m, those of v and of the weight are nearly all zero. Wrong settings make them longer, never wrong.

Every operation is one that IEEE 754 rounds correctly, so a body decodes to the same bits on any
machine. A digest of what went in stands at the end: a wrong base cannot pass for a right one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.codec.body import Cursor, Header, torn
from meshwright.checkpoint.codec.planes import TILE_WORDS, PlaneReader, PlaneWriter, Words
from meshwright.checkpoint.codec.residual import add_residual, to_residual

FloatArray = NDArray[np.float32]

_SCALARS = struct.Struct("<7f")
_DIGEST = struct.Struct("<Q")
_UNPREDICTED = 2  # flag: the values of the step before stand for the predictions
_F32 = np.dtype("<f4")


@dataclass(frozen=True)
class Moments:
    """Weight and both moments of the same parameters: float32, 1-D, of one length."""

    weight: FloatArray
    m: FloatArray
    v: FloatArray


@dataclass(frozen=True)
class Update:
    """AdamW's settings of the step that led from the old moments to the new ones. `step` counts
    updates from 1, as bias correction does; `weight_decay` is 0 where a tensor takes none."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class _Scalars:
    """What the formula needs, in the precision that the kernel has them in."""

    rest1: np.float32  # 1 - beta1
    beta2: np.float32
    rest2: np.float32
    kept: np.float32  # 1 - lr * decay
    size: np.float32  # lr / (1 - beta1 ** step)
    correction: np.float32  # sqrt(1 - beta2 ** step)
    eps: np.float32

    @classmethod
    def of(cls, update: Update) -> _Scalars:
        """Whatever the settings are: nonsense gives infinities, which predict badly."""
        lr, beta1, beta2 = map(np.float64, (update.lr, update.beta1, update.beta2))
        return cls(
            np.float32(1 - beta1),
            np.float32(beta2),
            np.float32(1 - beta2),
            np.float32(1 - lr * update.weight_decay),
            np.float32(lr / (1 - beta1**update.step)),
            np.float32(np.sqrt(1 - beta2**update.step)),
            np.float32(update.eps),
        )

    def pack(self) -> bytes:
        """As they stand in the body: a power may differ between machines in its last bit."""
        return _SCALARS.pack(*vars(self).values())


class _Predictor:
    """Predictions for a tile, in memory that the next one overwrites."""

    def __init__(self, scalars: _Scalars, tile: int) -> None:
        self._with = scalars
        self._gradient, self._guess = np.empty((2, tile), _F32)

    def v(self, new_m: FloatArray, old: Moments) -> Words:
        """v from the gradient that moved m."""
        gradient, guess = self._gradient[: len(new_m)], self._guess[: len(new_m)]
        np.subtract(new_m, old.m, out=gradient)
        np.divide(gradient, self._with.rest1, out=gradient)
        np.add(gradient, old.m, out=gradient)
        np.multiply(gradient, self._with.rest2, out=guess)
        np.multiply(guess, gradient, out=guess)
        np.multiply(old.v, self._with.beta2, out=gradient)
        np.add(guess, gradient, out=guess)
        return _bits(guess)

    def weight(self, new_m: FloatArray, new_v: FloatArray, old: Moments) -> Words:
        """The weight from both moments."""
        move, guess = self._gradient[: len(new_m)], self._guess[: len(new_m)]
        np.sqrt(new_v, out=guess)
        np.divide(guess, self._with.correction, out=guess)
        np.add(guess, self._with.eps, out=guess)
        np.multiply(new_m, self._with.size, out=move)
        np.divide(move, guess, out=move)
        np.multiply(old.weight, self._with.kept, out=guess)
        np.subtract(guess, move, out=guess)
        return _bits(guess)


class _Unpredicted(_Predictor):
    """The values of the step before, in place of predictions."""

    def v(self, new_m: FloatArray, old: Moments) -> Words:
        del new_m
        return old.v.view("<u4")

    def weight(self, new_m: FloatArray, new_v: FloatArray, old: Moments) -> Words:
        del new_m, new_v
        return old.weight.view("<u4")


def _bits(guess: FloatArray) -> Words:
    """The patterns, without NaNs, whose bits are the machine's own choice."""
    if np.isnan(guess.max()):
        guess[np.isnan(guess)] = 0
    return guess.view("<u4")


def encode_update(new: Moments, old: Moments, update: Update) -> bytes:
    """What `decode_update` needs to make `new` from `old`, to the bit and whatever the values.

    Neither is modified. Raises CheckpointError if the six arrays are not float32 of one length.
    """
    new, old = _checked(new), _checked(old)
    count = _length(new, old)
    flags = _UNPREDICTED if _flushes_denormals() else 0
    with np.errstate(all="ignore"):
        scalars = _Scalars.of(update)
        writer, digest = PlaneWriter(TILE_WORDS), xxhash.xxh3_64()
        writer.parts += (Header(b"a", 4, flags, TILE_WORDS, count).pack(), scalars.pack())
        predictor = _predictor(flags, scalars, min(TILE_WORDS, count))
        out, scratch = np.empty((2, min(TILE_WORDS, count)), "<u4")

        def put(values: FloatArray, predicted: Words) -> None:
            size = len(values)
            writer.put(to_residual(values.view("<u4"), predicted, out[:size], scratch[:size]))
            digest.update(values.data)

        for now, before in zip(_tiles(new, TILE_WORDS), _tiles(old, TILE_WORDS), strict=True):
            put(now.m, before.m.view("<u4"))
            put(now.v, predictor.v(now.m, before))
            put(now.weight, predictor.weight(now.m, now.v, before))
    writer.parts.append(_DIGEST.pack(digest.intdigest()))
    return b"".join(writer.parts)


def decode_update(body: bytes | memoryview, old: Moments, into: Moments | None = None) -> Moments:
    """The moments that `body` was made from; `old` is those it was made against, not modified.

    They are put into `into` if that is given, contiguous, and perhaps `old` itself. Raises
    CheckpointError if `body` is torn or foreign, or was made against other moments; `into` is
    spoilt then.
    """
    old, count = _checked(old), len(old.m)
    new = into or Moments(*(np.empty(count, _F32) for _ in range(3)))
    _length(new, old)
    cursor = Cursor(body)
    header = cursor.header(b"a", 4, count)
    scalars = _Scalars(*map(np.float32, cursor.unpack(_SCALARS)))
    reader, digest = PlaneReader(cursor), xxhash.xxh3_64()
    with np.errstate(all="ignore"):
        tile = min(header.tile, count)
        predictor = _predictor(header.flags, scalars, tile)
        m, v, weight = np.empty((3, tile), "<u4")
        scratch = np.empty(tile, "<u4")

        def get(words: Words, predicted: Words) -> FloatArray:
            words = words[: len(predicted)]
            if reader.get(words):
                add_residual(words, predicted, scratch[: len(words)])
            else:
                words[...] = predicted
            digest.update(words.data)
            return words.view(_F32)

        for now, before in zip(_tiles(new, header.tile), _tiles(old, header.tile), strict=True):
            new_m = get(m, before.m.view("<u4"))
            new_v = get(v, predictor.v(new_m, before))
            now.weight[...] = get(weight, predictor.weight(new_m, new_v, before))
            now.m[...], now.v[...] = new_m, new_v
    if cursor.unpack(_DIGEST) != (digest.intdigest(),):
        raise torn("it does not follow from the step before as read, or was altered")
    cursor.end()
    return new


def _predictor(flags: int, scalars: _Scalars, tile: int) -> _Predictor:
    return (_Unpredicted if flags & _UNPREDICTED else _Predictor)(scalars, tile)


def _flushes_denormals() -> bool:
    """Whether this thread takes tiny numbers for zero (torch.set_flush_denormal), which another
    that decodes may not."""
    tiny = np.ones(1, np.uint32).view(np.float32)
    return not np.add(tiny, tiny)[0] > 0


def _tiles(moments: Moments, size: int) -> Iterator[Moments]:
    for start in range(0, len(moments.m), size):
        run = slice(start, start + size)
        yield Moments(moments.weight[run], moments.m[run], moments.v[run])


def _checked(moments: Moments) -> Moments:
    """The same, each contiguous."""
    arrays = vars(moments)
    if any(array.dtype != _F32 or array.shape != moments.m.shape[:1] for array in arrays.values()):
        found = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
        raise CheckpointError(f"{found}: all of an update must be float32, 1-D, of one length")
    return Moments(*(np.ascontiguousarray(array) for array in arrays.values()))


def _length(new: Moments, old: Moments) -> int:
    if len(new.m) != len(old.m):
        raise CheckpointError(
            f"an update from {len(old.m)} to {len(new.m)} elements; write a full commit instead"
        )
    return len(new.m)
