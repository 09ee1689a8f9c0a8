"""Codecs give back every bit, leave their inputs alone, and refuse what is not theirs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.codec import (
    Moments,
    Update,
    decode,
    decode_change,
    decode_update,
    encode,
    encode_change,
    encode_update,
)

STEP = Update(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7)
# Both zeros, denormals, the ends of the range, infinities, quiet and signalling NaNs.
CORNERS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800001),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
    *(0xFFFFFFFF, 0x7FFFFFFF),
)
Patterns = NDArray[np.uint32]
SIZES = (0, 1, 2, 3, 4095, 65535, 65536, 65537, 150_001)
DTYPES = ("f2", "f4", "f8", "i1", "u2", "i4", "i8", "?", "c16", "V3")


def patterns(size: int) -> st.SearchStrategy[Patterns]:
    """Any float32 bit patterns, the corners often."""
    words = st.sampled_from(CORNERS) | st.integers(0, 2**32 - 1)
    return arrays(np.uint32, size, elements=words, fill=st.nothing())


@st.composite
def six(draw: st.DrawFn) -> tuple[Moments, Moments]:
    size = draw(st.integers(0, 40))
    made = [draw(patterns(size)).view(np.float32) for _ in range(6)]
    return Moments(*made[:3]), Moments(*made[3:])


def any_update() -> st.SearchStrategy[Update]:
    number = st.floats(width=64)
    return st.builds(Update, number, number, number, number, number, st.integers(-3, 10**6))


def trained(size: int, seed: int = 0, how: Update = STEP) -> tuple[Moments, Moments]:
    """The moments before and after one of torch's own steps."""
    random = np.random.default_rng(seed)
    weight, m, gradient = random.normal(0, [[0.02], [1e-3], [4e-3]], (3, size)).astype(np.float32)
    v = np.square(random.normal(0, 4e-3, size)).astype(np.float32)
    old = Moments(weight, m, v)
    held = [torch.tensor(array) for array in vars(old).values()]
    torch._fused_adamw_(
        [held[0]],
        [torch.tensor(gradient)],
        [held[1]],
        [held[2]],
        [],
        [torch.tensor(float(how.step))],
        lr=how.lr,
        beta1=how.beta1,
        beta2=how.beta2,
        weight_decay=how.weight_decay,
        eps=how.eps,
        amsgrad=False,
        maximize=False,
    )
    return Moments(*(tensor.numpy() for tensor in held)), old


def same(one: Moments, other: Moments) -> bool:
    return all(
        a.tobytes() == b.tobytes()
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def frozen(moments: Moments) -> Moments:
    """Its arrays cannot be written."""
    for array in vars(moments).values():
        array.flags.writeable = False
    return moments


@settings(deadline=None, max_examples=100)
@given(six(), any_update())
def test_an_update_gives_back_every_bit_pattern(
    pair: tuple[Moments, Moments], update: Update
) -> None:
    new, old = map(frozen, pair)
    body = encode_update(new, old, update)
    assert body == encode_update(new, old, update)
    assert same(decode_update(body, old), new)


@pytest.mark.parametrize("size", SIZES)
def test_an_update_of_any_length_is_whole(size: int) -> None:
    new, old = map(frozen, trained(size))
    body = encode_update(new, old, STEP)
    assert same(decode_update(body, old), new)


@settings(deadline=None, max_examples=80)
@given(patterns(30), patterns(30))
def test_planes_and_changes_give_back_every_bit_pattern(new: Patterns, old: Patterns) -> None:
    for dtype in (np.float32, np.uint32, np.float64, np.uint16, np.uint8):
        now, before = new.view(dtype), old.view(dtype)
        body = encode("planes", now)
        assert decode("planes", body, now.dtype, len(now)).tobytes() == now.tobytes()
        change = encode_change(now, before)
        assert decode_change(change, before).tobytes() == now.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_any_dtype_and_length(dtype: str, size: int) -> None:
    kind = np.dtype(dtype)
    data = np.random.default_rng(size).integers(0, 2, size * kind.itemsize, np.uint8)
    array = data.view(kind)
    for codec in ("raw", "planes"):
        back = decode(codec, encode(codec, array), kind, size)
        assert back.dtype == kind
        assert back.tobytes() == data.tobytes()
    base = data[::-1].copy().view(kind)
    assert decode_change(encode_change(array, base), base).tobytes() == data.tobytes()


def test_arrays_with_gaps_are_read_as_they_are() -> None:
    new, old = trained(1000)
    sparse = Moments(*(np.repeat(array, 2)[::2] for array in vars(new).values()))
    assert encode_update(sparse, old, STEP) == encode_update(new, old, STEP)
    assert encode("planes", sparse.m) == encode("planes", new.m)


def test_a_step_of_torch_is_predicted() -> None:
    """Weight and v cost next to nothing, so all of it little more than m by itself."""
    new, old = trained(200_000)
    body = encode_update(new, old, STEP)
    assert len(body) < 1.09 * len(encode_change(new.m, old.m))


@pytest.mark.parametrize(
    "wrong", [{"lr": 2e-3}, {"step": 8}, {"weight_decay": 0.0}, {"beta2": 0.9}, {"eps": 1e-3}]
)
def test_wrong_settings_cost_bytes_and_nothing_else(wrong: dict[str, Any]) -> None:
    new, old = trained(20_000)
    right, body = encode_update(new, old, STEP), encode_update(new, old, replace(STEP, **wrong))
    assert len(body) > len(right)
    assert same(decode_update(body, old), new)


def test_a_thread_that_flushes_denormals_writes_what_others_read() -> None:
    tiny = np.arange(1, 1001, dtype=np.uint32).view(np.float32)
    new, old = Moments(tiny, tiny, tiny), Moments(tiny[::-1], tiny[::-1], tiny[::-1])
    torch.set_flush_denormal(True)
    try:
        body = encode_update(new, old, STEP)
    finally:
        torch.set_flush_denormal(False)
    assert same(decode_update(body, old), new)


def _decoders() -> dict[str, tuple[bytes, Callable[[bytes], Any]]]:
    new, old = trained(5000)
    return {
        "raw": (encode("raw", new.m), lambda b: decode("raw", b, new.m.dtype, 5000)),
        "planes": (encode("planes", new.m), lambda b: decode("planes", b, new.m.dtype, 5000)),
        "adamw": (encode_update(new, old, STEP), lambda b: decode_update(b, old)),
        "change": (encode_change(new.m, old.m), lambda b: decode_change(b, old.m)),
    }


@pytest.mark.parametrize("codec", ["raw", "planes", "adamw", "change"])
def test_a_torn_body_is_refused(codec: str) -> None:
    body, back = _decoders()[codec]
    for end in {0, 1, 3, 19, 20, 24, 50, len(body) // 2, len(body) - 9, len(body) - 1}:
        with pytest.raises(CheckpointError):
            back(body[:end])
    with pytest.raises(CheckpointError):
        back(body + b"\0")


@pytest.mark.parametrize("codec", ["planes", "adamw", "change"])
def test_a_foreign_body_is_refused(codec: str) -> None:
    decoders = _decoders()
    for name, (body, _) in decoders.items():
        if name != codec:
            with pytest.raises(CheckpointError):
                decoders[codec][1](body)
    with pytest.raises(CheckpointError):
        decoders[codec][1](zstandard.compress(b"other" * 1000))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_an_altered_body_is_refused_or_harmless(data: st.DataObject) -> None:
    """No bit of it crashes the decoder; those with a digest never give other values."""
    new, old = trained(300)
    body = bytearray(encode_update(new, old, STEP))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = decode_update(bytes(body), old)
    except CheckpointError:
        return
    assert same(back, new)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 100))
def test_noise_is_refused(noise: bytes, count: int) -> None:
    body = encode("planes", np.zeros(count, np.float32))[:20] + noise
    try:
        back = decode("planes", body, np.dtype(np.float32), count)
    except CheckpointError:
        return
    assert len(back) == count


def test_a_plane_that_announces_more_takes_no_memory() -> None:
    """A frame of a few bytes may stand for gigabytes of zeros."""
    whole = encode("planes", np.full(3, 1, np.uint8))
    head = whole[:20]
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(CheckpointError, match="268435456"):
        decode("planes", head + struct.pack("<BI", 2, len(bomb)) + bomb, np.dtype(np.uint8), 3)


def test_an_update_against_another_step_is_refused() -> None:
    new, old = trained(100)
    body = encode_update(new, old, STEP)
    for name, array in vars(old).items():
        other = array.copy()
        other.view(np.uint32)[50] ^= 1 << 12
        with pytest.raises(CheckpointError):
            decode_update(body, replace(old, **{name: other}))
    change = encode_change(new.m, old.m)
    with pytest.raises(CheckpointError):
        decode_change(change, new.m)


def test_arrays_that_do_not_fit_are_refused() -> None:
    new, old = trained(10)
    short, _ = trained(9)
    double: Any = new.m.astype(np.float64)
    with pytest.raises(CheckpointError, match="9"):
        encode_update(short, old, STEP)
    with pytest.raises(CheckpointError, match="float64"):
        encode_update(replace(new, m=double), old, STEP)
    with pytest.raises(CheckpointError, match="full commit"):
        encode_change(new.m, short.m)
    with pytest.raises(CheckpointError, match="1-D"):
        encode("planes", new.m.reshape(2, 5))
    with pytest.raises(CheckpointError, match="object"):
        encode("raw", np.array([None]))
    for call in (lambda: encode("zip", new.m), lambda: decode("zip", b"", new.m.dtype, 0)):
        with pytest.raises(CheckpointError, match="zip"):
            call()


@pytest.mark.parametrize("size", SIZES)
def test_an_update_may_take_the_place_of_the_step_before(size: int) -> None:
    """A chain of them then needs no memory of its own."""
    first, base = trained(size)
    second, _ = trained(size, seed=1)
    bodies = [encode_update(first, base, STEP), encode_update(second, first, STEP)]
    for body in bodies:
        assert decode_update(body, base, into=base) is base
    assert same(base, second)
