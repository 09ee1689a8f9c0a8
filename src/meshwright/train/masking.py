"""A self-test at the start of a run on packed documents: attention stays inside each.

Kernels with masks differ by chip, type and library, and a leak raises no error: the loss only falls
sooner than it should (case 10 of the survey: profam#495, nanoVLM#204).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.plan.job import Job
from meshwright.train.documents import document_ids
from meshwright.train.nn.attention import Attend, attend_whole
from meshwright.train.precision.apply import COMPUTE_DTYPES

_FIRST, _TOKENS, _END = 19, 48, 0  # tokens of the first of three documents, and in all
_KV_HEADS = 2
_NOTHING = 1e-2  # a leak changes what is mixed by a tenth and more


def check_apart(job: Job, device: torch.device, attend: Attend = attend_whole) -> None:
    """Raise RunError if what stands in one document changes another's attention on `device`, in the
    type and with heads as those of `job`. Of a sequence over several ranks parity tests say it."""
    if not job.data.inside_documents or job.layout.cp > 1:
        return
    spec, draw = job.model, torch.Generator().manual_seed(0)
    tokens = torch.ones(1, _TOKENS, dtype=torch.int64)
    tokens[0, [_FIRST - 1, _TOKENS - 9]] = _END
    documents = document_ids(tokens, _END).to(device)

    def drawn(heads: int, dim: int) -> Tensor:
        values = torch.randn(1, heads, _TOKENS, dim, generator=draw)
        return values.to(device, COMPUTE_DTYPES[job.layout.precision])

    shared = 1 if spec.latent_attention else spec.heads // spec.kv_heads
    q, k = drawn(_KV_HEADS * shared, spec.head_dim), drawn(_KV_HEADS, spec.head_dim)
    v = drawn(_KV_HEADS, spec.value_head_dim)
    with torch.no_grad():
        before = attend(q, k, v, documents, spec.attention_scale)
        for part in (q, k, v):
            part[:, :, :_FIRST] = part[:, :, :_FIRST].flip(2) + 1
        after = attend(q, k, v, documents, spec.attention_scale)
    moved = float((after - before)[:, :, _FIRST:].abs().max())
    if not moved < _NOTHING:
        raise RunError(
            f"data.packing = {job.data.packing!r}: on {device} attention sees from one document "
            f"into another (another first document changes the second by {moved:.2g}); set it to "
            "'stream', or use another version of torch"
        )
