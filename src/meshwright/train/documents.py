"""Documents packed into one sequence: which document a token is of, and its place in it."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(tokens: Tensor, end_of_text: int) -> Tensor:
    """The document of each of `tokens` [batch, seq], int64, counted from 0 in each sequence.

    An `end_of_text` belongs to the document that it ends.
    """
    ends = tokens == end_of_text
    return ends.cumsum(1) - ends.long()


def positions_in_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, int64, from `documents` [batch, seq].

    Documents are runs of equal numbers.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    goes_on = torch.zeros_like(documents, dtype=torch.bool)
    goes_on[:, 1:] = documents[:, 1:] == documents[:, :-1]
    starts = places.masked_fill(goes_on, 0).cummax(1).values
    return places - starts
