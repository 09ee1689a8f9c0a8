"""Unigram and bigram baselines against a plain dictionary model, and as distributions."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from meshwright.data import baseline
from meshwright.data.baseline import NgramModel, fit_ngrams, ngram_baselines
from meshwright.data.store import TokenStore
from meshwright.data.windows import Windows

VOCAB = 12


def stream(n: int, seed: int, ids: int = 10) -> npt.NDArray[np.uint16]:
    """A Markov chain over `ids` tokens with uneven rows; ids from there on never appear."""
    random = np.random.default_rng(seed)
    rows = np.random.default_rng(99).dirichlet(np.full(ids, 0.2), size=ids)
    tokens = [0]
    for _ in range(n - 1):
        tokens.append(int(random.choice(ids, p=rows[tokens[-1]])))
    return np.array(tokens, np.uint16)


def as_store(tokens: npt.NDArray[np.uint16]) -> TokenStore:
    return TokenStore(Path("made"), tokens, np.array([0, tokens.size]))


def plain_model(tokens: list[int]) -> dict[tuple[int, int], float]:
    """P(w | v) from dictionaries, straight from the formula."""
    unigrams, pairs = Counter(tokens), Counter(pairwise(tokens))
    repeats = Counter(pairs.values())
    discount = repeats[1] / (repeats[1] + 2 * repeats[2])
    table = {}
    for v in range(VOCAB):
        history = sum(count for (first, _), count in pairs.items() if first == v)
        followers = sum(1 for first, _ in pairs if first == v)
        for w in range(VOCAB):
            p = (unigrams[w] + 1) / (len(tokens) + VOCAB)
            if history:
                kept = max(pairs[v, w] - discount, 0)
                p = kept / history + discount * followers / history * p
            table[v, w] = p
    return table


def all_bigrams(model: NgramModel, vocab: int) -> npt.NDArray[np.float64]:
    previous, tokens = np.divmod(np.arange(vocab * vocab), vocab)
    return model.bigram_probability(previous, tokens).reshape(vocab, vocab)


def test_probabilities_are_those_of_the_formula() -> None:
    tokens = stream(400, seed=1)
    expected = plain_model(tokens.tolist())
    actual = all_bigrams(fit_ngrams(tokens, VOCAB), VOCAB)
    assert actual == pytest.approx(np.array(list(expected.values())).reshape(VOCAB, VOCAB))


@pytest.mark.parametrize("n", [2, 3, 50, 5000])
def test_probabilities_sum_to_one_after_every_token(n: int) -> None:
    model = fit_ngrams(stream(n, seed=2), VOCAB)
    table = all_bigrams(model, VOCAB)
    assert table.sum(axis=1) == pytest.approx(np.ones(VOCAB))
    assert table.min() > 0
    assert model.unigram_probability(np.arange(VOCAB)).sum() == pytest.approx(1)


def test_losses_are_means_over_exactly_the_targets_of_the_windows() -> None:
    train, held_out = stream(2000, seed=3), stream(300, seed=4)
    indices = np.array([0, 3, 7])
    result = ngram_baselines(as_store(train), Windows(as_store(held_out), 20), indices, VOCAB)
    table, counts = plain_model(train.tolist()), Counter(train.tolist())
    pairs = [
        (int(held_out[t - 1]), int(held_out[t]))
        for i in indices
        for t in range(20 * i + 1, 20 * i + 21)
    ]
    assert result.targets == len(pairs) == 60
    assert result.bigram_loss == pytest.approx(-sum(math.log(table[p]) for p in pairs) / 60)
    unigram = [math.log((counts[w] + 1) / (2000 + VOCAB)) for _, w in pairs]
    assert result.unigram_loss == pytest.approx(-sum(unigram) / 60)


def test_bigram_comes_close_to_the_entropy_of_a_markov_chain() -> None:
    rows = np.random.default_rng(99).dirichlet(np.full(10, 0.2), size=10)
    held_out = stream(5000, seed=6)
    truth = -np.log(rows[held_out[:-1], held_out[1:]]).mean()
    windows = Windows(as_store(held_out), 4999)
    result = ngram_baselines(as_store(stream(20_000, seed=5)), windows, np.array([0]), VOCAB)
    assert result.bigram_loss == pytest.approx(truth, rel=0.01)
    assert result.bigram_loss < result.unigram_loss - 0.3


def test_large_vocabularies_give_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = stream(5000, seed=7)
    dense = fit_ngrams(tokens, VOCAB)
    monkeypatch.setattr(baseline, "_CHUNK_TOKENS", 617)
    chunked = fit_ngrams(tokens, VOCAB)
    monkeypatch.setattr(baseline, "_DENSE_VOCAB_LIMIT", 1)
    sparse = fit_ngrams(tokens, VOCAB)
    for other in (chunked, sparse):
        assert np.array_equal(other.codes, dense.codes)
        assert np.array_equal(other.pair_counts, dense.pair_counts)
        assert np.array_equal(other.unigram, dense.unigram)
    assert dense.pair_counts.sum() == 4999
