"""Losses that a trained model must beat: those of a unigram and a bigram model on the same split.

Unigram: P(w) = (c(w) + 1) / (N + V). Bigram: absolute discounting, interpolated with the unigram
(Ney, Essen & Kneser 1994; Chen & Goodman 1999, section 2.7):
P(w | v) = max(c(v, w) - D, 0) / c(v) + D · T(v) / c(v) · P(w), T(v) the number of distinct
followers of v and D = n1 / (n1 + 2 n2) from the pairs seen once and twice. Pairs are counted over
the whole stream, across ends of documents, which is how windows read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.data.held_out import HeldOut
from meshwright.data.store import TokenStore

Ids = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

_DENSE_VOCAB_LIMIT = 4096  # a table of all pairs takes 128 MiB here
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Baselines:
    """Mean losses over `targets` tokens, in nats per token."""

    unigram_loss: float
    bigram_loss: float
    targets: int


@dataclass(frozen=True)
class NgramModel:
    """Counts of a token stream over a vocabulary of V ids.

    `codes` are the distinct pairs v·V + w, ascending, and `pair_counts` how often each was seen;
    `history` is c(v) and `followers` T(v), both [V].
    """

    unigram: Floats
    codes: npt.NDArray[np.int64]
    pair_counts: npt.NDArray[np.int64]
    history: npt.NDArray[np.int64]
    followers: npt.NDArray[np.int64]
    discount: float

    def unigram_probability(self, tokens: Ids) -> Floats:
        """P(w), the shape of `tokens`."""
        return self.unigram[tokens]

    def bigram_probability(self, previous: Ids, tokens: Ids) -> Floats:
        """P(w | v) of the pairs (previous, tokens) of equal shape; P(w) after an unseen v."""
        unigram = self.unigram_probability(tokens)
        codes = previous.astype(np.int64) * self.unigram.size + tokens
        at = np.minimum(np.searchsorted(self.codes, codes), self.codes.size - 1)
        seen = np.where(self.codes[at] == codes, self.pair_counts[at], 0)
        history = self.history[previous]
        kept = np.maximum(seen - self.discount, 0.0)
        mixed = kept + self.discount * self.followers[previous] * unigram
        return np.where(history > 0, mixed / np.maximum(history, 1), unigram)


def fit_ngrams(tokens: Ids, vocab: int) -> NgramModel:
    """Count a stream of at least two ids below `vocab`.

    Memory: V**2 counts up to a vocabulary of 4,096, then the distinct pairs of the stream.
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab)
    count_pairs = _count_pairs_dense if vocab <= _DENSE_VOCAB_LIMIT else _count_pairs_sparse
    codes, pair_counts = count_pairs(tokens, vocab)
    first = codes // vocab
    return NgramModel(
        unigram=(counts + 1) / (tokens.size + vocab),
        codes=codes,
        pair_counts=pair_counts,
        history=np.bincount(first, weights=pair_counts, minlength=vocab).astype(np.int64),
        followers=np.bincount(first, minlength=vocab),
        discount=_discount(pair_counts),
    )


def ngram_baselines(
    train: TokenStore,
    held_out: HeldOut,
    indices: npt.NDArray[np.int64],
    vocab: int,
    inside: int | None = None,
) -> Baselines:
    """Losses on all targets of windows `indices` [m] of `held_out`, counted on `train`; without
    those that follow the end of text `inside`, as a model does that stays inside documents."""
    model = fit_ngrams(train.tokens, vocab)
    windows = held_out.read(indices)
    previous, targets = windows[:, :-1], windows[:, 1:]
    if inside is not None:
        counts = previous != inside
        previous, targets = previous[counts], targets[counts]
    return Baselines(
        unigram_loss=float(-np.log(model.unigram_probability(targets)).mean()),
        bigram_loss=float(-np.log(model.bigram_probability(previous, targets)).mean()),
        targets=targets.size,
    )


def _discount(pair_counts: npt.NDArray[np.int64]) -> float:
    """D = n1 / (n1 + 2 n2); 0.5 where no pair was seen once, so that unseen ones keep a share."""
    once, twice = int((pair_counts == 1).sum()), int((pair_counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _pair_codes(tokens: Ids, start: int, vocab: int) -> npt.NDArray[np.int64]:
    chunk = tokens[start : start + _CHUNK_TOKENS + 1].astype(np.int64)
    return chunk[:-1] * vocab + chunk[1:]


def _count_pairs_dense(
    tokens: Ids, vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    for start in range(0, tokens.size - 1, _CHUNK_TOKENS):
        counts += np.bincount(_pair_codes(tokens, start, vocab), minlength=vocab * vocab)
    codes = np.flatnonzero(counts)
    return codes, counts[codes]


def _count_pairs_sparse(
    tokens: Ids, vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    codes = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, tokens.size - 1, _CHUNK_TOKENS):
        new_codes, new_counts = np.unique(_pair_codes(tokens, start, vocab), return_counts=True)
        both, slots = np.unique(np.concatenate([codes, new_codes]), return_inverse=True)
        merged = np.zeros(both.size, dtype=np.int64)
        np.add.at(merged, slots, np.concatenate([counts, new_counts]))
        codes, counts = both, merged
    return codes, counts
