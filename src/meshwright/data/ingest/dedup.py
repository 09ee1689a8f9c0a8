"""Which documents are copies of earlier ones: exactly, or nearly by MinHash.

MinHash (Broder 1997) over shingles of five words: two documents agree in each of `HASHES` numbers
with the probability that is the Jaccard similarity of their shingles. Candidates are those that
agree in all rows of one of `BANDS` bands, 14 of 8 as for FineWeb (Penedo et al. 2024), and count as
copies where at least `SIMILAR` of all numbers agree.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASHES = 112
BANDS = 14
SIMILAR = 0.7
KEY_BYTES = 16
_SHINGLE = 5  # words
_WORDS = re.compile(r"\w+")

Signatures = npt.NDArray[np.uint32]


def key_of(content: bytes) -> bytes:
    """What two exact copies have in common, 16 bytes."""
    return blake2b(content, digest_size=KEY_BYTES).digest()


def signature(text: str) -> Signatures:
    """uint32 [HASHES]. Case and punctuation count for nothing."""
    words = _WORDS.findall(text.lower()) or [""]
    codes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
    codes = np.concatenate([codes, np.zeros(max(0, _SHINGLE - codes.size), np.uint64)])
    shingles = np.zeros(codes.size - _SHINGLE + 1, dtype=np.uint64)
    for offset in range(_SHINGLE):
        shingles = shingles * np.uint64(0x100000001B3) + codes[offset : offset + shingles.size]
    shingles = np.unique(shingles)
    lowest = np.full(HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    factors, terms = _family()
    for start in range(0, shingles.size, 4096):  # so that a book needs no more memory than a page
        part = shingles[start : start + 4096]
        hashed = (part[:, None] * factors + terms) >> np.uint64(32)
        lowest = np.minimum(lowest, hashed.min(axis=0).astype(np.uint32))
    return lowest


def exact_copies(keys: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which documents have the key [n] of an earlier one."""
    copies = np.ones(keys.size, dtype=bool)
    copies[np.unique(keys, return_index=True)[1]] = False
    return copies


def near_copies(signatures: Signatures) -> npt.NDArray[np.bool_]:
    """Which of the documents [n, HASHES] are like an earlier one, or like a copy of that."""
    count = len(signatures)
    first = np.arange(count)
    rows = HASHES // BANDS
    for band in range(BANDS):
        part = np.ascontiguousarray(signatures[:, band * rows : (band + 1) * rows])
        codes = part.view(np.dtype((np.void, part.itemsize * rows))).ravel()
        _, heads, inverse = np.unique(codes, return_index=True, return_inverse=True)
        like = heads[inverse.ravel()]
        for document in np.flatnonzero(like != np.arange(count)).tolist():
            other = int(like[document])
            if (signatures[document] == signatures[other]).mean() >= SIMILAR:
                _join(first, document, other)
    return np.array([_root(first, document) != document for document in range(count)], dtype=bool)


def _root(first: npt.NDArray[np.int64], document: int) -> int:
    while first[document] != document:
        first[document] = first[first[document]]
        document = int(first[document])
    return document


def _join(first: npt.NDArray[np.int64], a: int, b: int) -> None:
    a, b = _root(first, a), _root(first, b)
    first[max(a, b)] = min(a, b)


def _family() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Multiply-add-shift hashes (Dietzfelbinger 1996), always the same."""
    drawn = np.random.Generator(np.random.PCG64(112)).integers(
        0, 2**64, size=(2, HASHES), dtype=np.uint64
    )
    return drawn[0] | np.uint64(1), drawn[1]
