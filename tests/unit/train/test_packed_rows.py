"""Packed rows leak nothing: the trainer's attention sees documents as the packer meant them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_groups import mesh_of

from meshwright.data.packing import PackedRows
from meshwright.data.store import TokenStore
from meshwright.models import presets
from meshwright.plan.job import resolve_job
from meshwright.train.documents import document_ids, positions_in_documents
from meshwright.train.gradients import Vote
from meshwright.train.init import initial_values
from meshwright.train.nn.attention import attend_whole
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.passing import Pass
from meshwright.train.trainer import Trainer

EOT, VOCAB, LENGTH, COPIES = 0, 21, 30, 20


def rows_of(documents: list[np.ndarray], seq_len: int) -> PackedRows:
    starts = np.cumsum([0, *(document.size for document in documents)])
    return PackedRows(TokenStore(Path("none"), np.concatenate(documents), starts), seq_len)


def document(seed: int, length: int = LENGTH) -> np.ndarray:
    """Random ids and the end of text."""
    drawn = np.random.default_rng(seed).integers(1, VOCAB, length - 1)
    return np.append(drawn, EOT)


def best_copier(tokens: Tensor, documents: Tensor | None) -> float:
    """Share of the tokens after the first document that attention foretells when it looks where a
    copy of the next token stands: the best that any trained model could do by copying."""
    seq = tokens.shape[1]
    places, wanted = torch.eye(seq), torch.zeros(seq, seq)
    wanted[torch.arange(LENGTH - 1, seq), torch.arange(seq - LENGTH + 1)] = 1.0
    values = F.one_hot(tokens, VOCAB).float()
    q, k, v = (x[None, None] for x in (wanted, places, values[0]))
    seen = attend_whole(q, k, v, documents, 1e3)[0, 0].argmax(-1)
    inside = torch.arange(seq - 1) % LENGTH < LENGTH - 1  # the next is of the same document
    inside &= torch.arange(seq - 1) >= LENGTH
    return float((seen[:-1] == tokens[0, 1:])[inside].float().mean())


def test_copies_of_a_document_stay_at_chance() -> None:
    """profam#495: twenty copies packed together gave 95 % where 5 % is chance."""
    rows = rows_of([document(0)] * COPIES, LENGTH * COPIES - 1)
    tokens = torch.from_numpy(rows.read(np.array([0])))
    documents = document_ids(tokens, EOT)
    assert documents.max() == COPIES - 1
    assert best_copier(tokens, None) > 0.95  # the probe finds the leak where there is one
    assert best_copier(tokens, documents) < 0.2


def logits(model: Decoder, tokens: Tensor, masked: bool) -> Tensor:
    documents = document_ids(tokens, EOT) if masked else torch.zeros_like(tokens)
    places = positions_in_documents(documents)
    about = Pass(
        model.rope_at(places), torch.arange(tokens.shape[1]), documents=documents, places=places
    )
    return F.linear(model(tokens, about), model.head_weight)


def test_another_first_document_changes_no_bit_of_the_logits_of_the_second() -> None:
    """nanoVLM#204: 0.46 where only positions had been reset."""
    spec = presets.preset("tiny")
    model = Decoder(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = initial_values(spec, 0, name, torch.arange(parameter.numel()))
            parameter.copy_(values.view_as(parameter))
    found = []
    for seed in (2, 3):
        first = document(seed, 34)  # the longer goes first
        rows = rows_of([document(1), first], 63)
        tokens = torch.from_numpy(rows.read(np.array([0])))
        assert tokens[0, :34].tolist() == first.tolist()
        with torch.no_grad():
            found.append([logits(model, tokens, masked)[0, 34:] for masked in (True, False)])
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() > 1e-3  # as it is without the mask


def trained(tokens: list[int], packing: str) -> Vote:
    """What a step on one row of `tokens` comes to."""
    job = resolve_job(
        {
            "job": {"steps": 1},
            "model": {"preset": "tiny", "layers": 1, "vocab": VOCAB},
            "data": {"seq_len": len(tokens) - 1, "global_batch": 1, "packing": packing},
        }
    )
    trainer = Trainer(job, mesh_of(job.layout, 0), torch.device("cpu"), EOT)
    trainer.initialise()
    return trainer.gradients(torch.tensor(tokens)[None, None])


@pytest.mark.parametrize("packing", ["documents", "best-fit"])
def test_what_begins_a_document_is_no_target_of_the_one_before(packing: str) -> None:
    row = [1, 2, 3, EOT, 4, 5, EOT, 6]
    found, other = trained(row, packing), trained([*row[:-1], 7], packing)
    assert found.tokens == len(row) - 1 - 2
    assert found == other  # the last one only ever was a target
    alone = trained(row[:4], packing)
    assert alone.tokens == 3
    stream = [trained(tokens, "stream") for tokens in (row, [*row[:-1], 7])]
    assert stream[0].tokens == len(row) - 1
    assert stream[0].loss != stream[1].loss


def test_documents_of_a_row_are_trained_on_as_if_alone() -> None:
    """The mean loss of a row is that of its documents, each weighted by its targets."""
    first, second = [1, 2, 3, 9, EOT], [4, 5, EOT]
    together = trained([*first, *second], "best-fit")
    alone = [trained(tokens, "best-fit") for tokens in (first, second)]
    mean = sum(one.loss * one.tokens for one in alone) / sum(one.tokens for one in alone)
    assert together.tokens == sum(one.tokens for one in alone)
    assert abs(together.loss - mean) < 1e-5
