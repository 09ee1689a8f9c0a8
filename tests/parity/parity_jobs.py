"""The jobs, layouts and data of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.store import write_store
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout

VOCAB, SEQ_LEN, BATCH = 96, 32, 16

# Six layers so that four stages get 1, 2, 2 and 1 of them.
LLAMA = {
    "family": "llama",
    "layers": 6,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 48,
    "vocab": VOCAB,
}
GPT2 = {
    "family": "gpt2",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "vocab": VOCAB,
    "max_seq_len": 48,
}
MODELS = {
    "untied": LLAMA,
    "tied": {**LLAMA, "tie_embeddings": True},
    "gpt2-tied": {**GPT2, "tie_embeddings": True},
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "fsdp4": {"dp_shard": 4},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2, "sp": False},
    "tp2+sp": {"tp": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp2xtp2": {"dp_replicate": 2, "tp": 2},
    "fsdp2xtp2+sp": {"dp_shard": 2, "tp": 2},
    "tp2xpp2": {"tp": 2, "pp": 2, "sp": False},
    "tp2+spxpp2": {"tp": 2, "pp": 2},
    "dp2xpp2": {"dp_replicate": 2, "pp": 2},
    "fsdp2xpp2": {"dp_shard": 2, "pp": 2},
    "dp2xtp2xpp2": {"dp_replicate": 2, "tp": 2, "pp": 2},
    "fsdp2xtp2xpp2": {"dp_shard": 2, "tp": 2, "pp": 2},
    "hsdp2x2xpp2": {"dp_replicate": 2, "dp_shard": 2, "pp": 2},
}


def layout(axes: dict[str, Any], accumulation: int) -> Layout:
    """`axes` with the micro-batch that gives `accumulation` micro-batches a step."""
    dp = int(axes.get("dp_replicate", 1)) * int(axes.get("dp_shard", 1))
    return Layout(**axes, micro_batch=BATCH // (dp * accumulation))


def job(model: dict[str, Any], **sections: dict[str, Any]) -> Job:
    """A job on one process; the tests put layouts in its place."""
    tables: dict[str, Any] = {
        "job": {"steps": 4},
        "model": model,
        "data": {"seq_len": SEQ_LEN, "global_batch": BATCH},
        "layout": {"micro_batch": BATCH},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1, "grad_clip": 0.1},
    }
    return resolve_job({**tables, **sections})


def write_tokens(prefix: Path) -> Path:
    """A token store with something to learn in it: a noisy walk over the vocabulary."""
    random = np.random.default_rng(7)
    steps = random.integers(1, 5, size=6000)
    with write_store(prefix, VOCAB, end_of_text=0) as writer:
        for document in np.split((np.cumsum(steps) % (VOCAB - 1)) + 1, 6):
            writer.add(document)
            writer.end_document()
    return prefix
