"""Documents packed into one sequence."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.documents import document_ids, positions_in_documents

END = 0


def test_an_end_of_text_belongs_to_the_document_it_ends() -> None:
    tokens = torch.tensor([[5, 6, END, 7, END, 8], [END, END, 1, 2, 3, END]])
    documents = document_ids(tokens, END)
    assert documents.dtype == torch.int64
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]


def test_places_start_again_in_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [3, 3, 3, 3, 3, 3]])
    places = positions_in_documents(documents)
    assert places.dtype == torch.int64
    assert places.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_they_agree_with_a_walk_through_the_tokens(tokens: list[int]) -> None:
    document, place, walked = 0, 0, []
    for token in tokens:
        walked.append((document, place))
        document, place = (document + 1, 0) if token == END else (document, place + 1)
    documents = document_ids(torch.tensor([tokens]), END)
    places = positions_in_documents(documents)
    assert list(zip(documents[0].tolist(), places[0].tolist(), strict=True)) == walked
