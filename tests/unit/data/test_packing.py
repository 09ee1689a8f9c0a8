"""Packing: every token in one row, rows full, documents whole where they can be, nothing leaks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.packing import PAD, WINDOW_ROWS, PackedRows
from meshwright.data.store import TokenStore
from meshwright.train.documents import document_ids

EOT = 0
TEXTS = Path(__file__).parents[4] / "shared" / "data" / "text"


@st.composite
def lengths_of_documents(draw: st.DrawFn) -> list[int]:
    """Enough of them for several windows: hypothesis itself hardly ever draws long lists."""
    seed, longest = draw(st.integers(0, 2**32)), draw(st.sampled_from([3, 20, 90]))
    count = draw(st.sampled_from([1, 7, 200, 700]))
    drawn: list[int] = np.random.default_rng(seed).integers(1, longest + 1, count).tolist()
    return drawn


LENGTHS = lengths_of_documents()


def store_of(lengths: list[int]) -> TokenStore:
    """Documents of these lengths, of ids that are all different but for the end of text."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, starts[-1] + 1)
    tokens[starts[1:] - 1] = EOT
    return TokenStore(Path("none"), tokens, starts)


def all_pieces(rows: PackedRows) -> list[tuple[int, int]]:
    return sorted(
        (piece.start, piece.length) for row in range(len(rows)) for piece in rows.pieces(row)
    )


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_every_token_is_in_one_row(lengths: list[int], seq_len: int) -> None:
    rows = PackedRows(store_of(lengths), seq_len)
    at = 0
    for start, length in all_pieces(rows):
        assert start == at
        at += length
    assert at == sum(lengths)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_rows_are_full_but_in_the_last_window(lengths: list[int], seq_len: int) -> None:
    rows = PackedRows(store_of(lengths), seq_len)
    filled = [sum(piece.length for piece in rows.pieces(row)) for row in range(len(rows))]
    full = len(rows) // WINDOW_ROWS * WINDOW_ROWS
    assert max(filled) <= rows.row
    assert set(filled[: full - WINDOW_ROWS if full == len(rows) else full]) <= {rows.row}


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_documents_follow_from_the_end_of_text_tokens(lengths: list[int], seq_len: int) -> None:
    """The trainer masks attention by them, so a piece that lacks one must be a row's last."""
    rows = PackedRows(store_of(lengths), seq_len)
    batch = rows.read_packed(np.arange(len(rows)))
    by_tokens = document_ids(torch.from_numpy(batch.tokens), EOT).numpy()
    real = batch.documents >= 0
    assert np.array_equal(by_tokens[real], batch.documents[real])
    assert (batch.tokens[~real] == PAD).all()


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_a_document_of_a_row_holds_tokens_of_one_document(lengths: list[int], seq_len: int) -> None:
    store = store_of(lengths)
    for row in range(len(rows := PackedRows(store, seq_len))):
        for piece in rows.pieces(row):
            first, last = np.searchsorted(
                store.starts, [piece.start, piece.start + piece.length - 1], side="right"
            )
            assert first == last


def test_a_row_does_not_depend_on_what_was_read_before() -> None:
    store = store_of([7, 30, 12, 3] * 300)
    backwards, forwards = PackedRows(store, 31), PackedRows(store, 31)
    order = np.arange(len(forwards))
    assert np.array_equal(forwards.read(order), backwards.read(order[::-1])[::-1])


def test_cu_seqlens_say_where_documents_begin() -> None:
    rows = PackedRows(store_of([3, 5, 4]), 7)
    batch = rows.read_packed(np.arange(2))
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 12, 16]
    assert batch.documents.tolist() == [[0] * 5 + [1] * 3, [0] * 4 + [-1] * 4]


def test_rows_outside_are_refused() -> None:
    rows = PackedRows(store_of([3]), 7)
    with pytest.raises(IndexError, match="row 1 of 1"):
        rows.read(np.array([1]))


@pytest.mark.skipif(not TEXTS.is_dir(), reason="no corpora beside the repository")
@pytest.mark.parametrize("name", ["alice29", "lcet10", "plrabn12", "tinyshakespeare"])
@pytest.mark.parametrize("seq_len", [256, 1024])
def test_real_corpora_pack_well(name: str, seq_len: int) -> None:
    """By paragraph and by byte: at least 98 % full, and few documents cut that need not be."""
    text = (TEXTS / f"{name}.txt").read_bytes().replace(b"\r\n", b"\n")
    lengths = [len(part) + 1 for part in text.split(b"\n\n") if part.strip()]
    rows = PackedRows(store_of(lengths), seq_len)
    assert rows.efficiency >= 0.98
    assert rows.whole_share() >= 0.9
