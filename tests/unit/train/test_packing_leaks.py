"""Packing leaks nothing, by what a model learns: the copied-document probe in the real trainer.

profam#495 packed twenty copies of one random document together and saw 95 % where 5 % is chance.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from train_groups import mesh_of

from meshwright.plan.job import resolve_job
from meshwright.train.trainer import Trainer

EOT, VOCAB, LENGTH, COPIES, ROWS, STEPS = 0, 16, 4, 8, 32, 120
# A document is LENGTH - 1 random ids and the end of text; the first of them is no target, and the
# end is told by its place. So this is left to guess, of the mean target of a document alone:
CHANCE = math.log(VOCAB - 1) * (LENGTH - 2) / (LENGTH - 1)


def copies(seed: int) -> Tensor:
    """Rows of copies of a random document, another for each row [1, ROWS, tokens]."""
    draw = np.random.default_rng(seed)
    documents = draw.integers(1, VOCAB, (ROWS, LENGTH))
    documents[:, -1] = EOT
    return torch.from_numpy(np.tile(documents, COPIES))[None]


def learnt(packing: str) -> float:
    """The loss on new rows after some steps."""
    job = resolve_job(
        {
            "job": {"steps": STEPS},
            "model": {"preset": "tiny", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4}
            | {"head_dim": 16, "ffn_hidden": 128, "vocab": VOCAB},
            "data": {"seq_len": LENGTH * COPIES - 1, "global_batch": ROWS, "packing": packing},
            "layout": {"micro_batch": ROWS},
            "optimizer": {"lr": 1e-2, "warmup_steps": 10, "weight_decay": 0.0},
        }
    )
    trainer = Trainer(job, mesh_of(job.layout, 0), torch.device("cpu"), EOT)
    trainer.initialise()
    for step in range(STEPS):
        trainer.update(step, trainer.gradients(copies(step), step=step))
    return trainer.evaluate(copies(STEPS)).loss


def test_what_copies_tell_is_not_learnt() -> None:
    assert learnt("best-fit") > 0.97 * CHANCE


def test_it_would_be_without_the_mask() -> None:
    """The probe finds a leak where there is one."""
    assert learnt("stream") < 0.5 * CHANCE
