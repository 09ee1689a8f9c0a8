"""Tables at the ends of a decoder: token embedding, learned positions, output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.passing import Pass


class Embedding(nn.Module):
    """Rows of a table by token. Tokens [batch, seq] to [batch, seq, hidden]; weight [rows, hidden].

    A tensor-parallel slice holds rows `first_row` onwards: tokens it lacks give zero, and `leave`
    adds the slices up.
    """

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.first_row = 0
        self.vocab = vocab
        self.leave: Boundary = stay

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        if rows == self.vocab:
            return self.leave(F.embedding(tokens, self.weight))
        local = tokens - self.first_row
        absent = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(absent, 0), self.weight)
        return self.leave(found.masked_fill(absent[..., None], 0))


class Positions(nn.Module):
    """Learned positions, added to activations [batch, seq, hidden]; weight [max_seq_len, hidden].

    They are places in the document where documents are told apart, else in the sequence. With the
    sequence split over a tp group, this rank's slice is number `slice_index` of `slices`.
    """

    def __init__(self, max_seq_len: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, hidden))
        self.slice_index, self.slices = 0, 1

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        places = about.order if about.places is None else about.places
        mine = places.chunk(self.slices, dim=-1)[self.slice_index]
        return x + F.embedding(mine, self.weight)


class Head(nn.Module):
    """The untied output projection; weight [vocab, hidden]."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
