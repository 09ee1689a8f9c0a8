"""The self-test at the start of a run: it passes here, and finds a leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.plan.job import Job, resolve_job
from meshwright.train.masking import check_apart
from meshwright.train.nn.attention import attend_whole

CPU = torch.device("cpu")


def job(packing: str = "best-fit", preset: str = "tiny", **layout: Any) -> Job:
    return resolve_job(
        {
            "job": {"steps": 1},
            "model": {"preset": preset},
            "data": {"seq_len": 64, "global_batch": 2, "packing": packing},
            "layout": layout,
        }
    )


def leaking(q: Tensor, k: Tensor, v: Tensor, _documents: Tensor | None, scale: float) -> Tensor:
    """Positions reset, and the mask forgotten."""
    return attend_whole(q, k, v, None, scale)


def off_by_one(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, scale: float) -> Tensor:
    """A document that begins with the end of the one before it."""
    assert ids is not None
    return attend_whole(q, k, v, torch.cat((ids[:, 1:], ids[:, -1:]), 1), scale)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("packing", ["documents", "best-fit"])
def test_attention_stays_inside_documents_on_this_machine(packing: str, precision: str) -> None:
    check_apart(job(packing, precision=precision), CPU)


def test_latent_attention_has_heads_of_its_own_sizes() -> None:
    check_apart(job(preset="deepseek-v3"), CPU)


@pytest.mark.parametrize("attend", [leaking, off_by_one])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_leak_ends_the_run_before_it_begins(attend: Any, precision: str) -> None:
    with pytest.raises(RunError, match=r"data\.packing = 'best-fit': on cpu attention sees from"):
        check_apart(job(precision=precision), CPU, attend)
    check_apart(job("stream"), CPU, attend)  # where none is meant to be apart
