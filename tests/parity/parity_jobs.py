"""The jobs, layouts and data of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.store import write_store
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout

VOCAB, SEQ_LEN, BATCH = 96, 32, 16


@dataclass(frozen=True)
class Tokens:
    """The store of `write_tokens`."""

    train_prefix: Path
    end_of_text: int = 0


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
EXPERTS = {
    **LLAMA,
    "layers": 4,
    "first_dense_layers": 1,
    "n_experts": 8,
    "top_k": 2,
    "expert_ffn_hidden": 16,
    "n_shared_experts": 1,
}
DEEPSEEK = {
    **EXPERTS,
    "family": "deepseek_v3",
    "kv_heads": 4,
    "head_dim": 16,
    "v_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "gate": "sigmoid",
    "expert_groups": 4,
    "top_k_groups": 2,
    "bias_update_rate": 0.01,
    "seq_aux_loss": 1e-3,
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": LLAMA,
    "tied": {**LLAMA, "tie_embeddings": True},
    "gpt2-tied": {**GPT2, "tie_embeddings": True},
    "packed": LLAMA,
    "moe-aux": {**EXPERTS, "aux_loss": 1e-2, "z_loss": 1e-3},
    "moe-bias": {**EXPERTS, "gate": "sigmoid", "bias_update_rate": 0.01, "tie_embeddings": True},
    "moe-capacity": {**EXPERTS, "capacity_factor": 1.0, "seq_aux_loss": 1e-2},
    "deepseek": DEEPSEEK,
    "qwen3": {**LLAMA, "family": "qwen3"},
}
MATRIX_MODELS = ("tied", "untied", "moe-aux", "moe-bias", "packed")

# Every axis alone, every schedule, and products of up to all five.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero2": {"dp_shard": 2, "zero": 2},
    "fsdp2": {"dp_shard": 2},
    "fsdp4": {"dp_shard": 4},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2, "sp": False, "etp": 2},
    "tp2+sp": {"tp": 2, "etp": 2},
    "gpipe2": {"pp": 2, "schedule": "gpipe"},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "interleaved2": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "zbv2": {"pp": 2, "schedule": "zbv"},
    "dualpipev2": {"pp": 2, "schedule": "dualpipev"},
    "ring2": {"cp": 2},
    "ring4": {"cp": 4},
    "ulysses2": {"cp": 2, "cp_method": "ulysses"},
    "ep2": {"dp_replicate": 2, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "zero1xep2": {"dp_shard": 2, "zero": 1, "ep": 2},
    "zero2xep2": {"dp_shard": 4, "zero": 2, "ep": 2},
    "hsdp2x2xep4": {"dp_replicate": 2, "dp_shard": 2, "ep": 4},
    "ep2+etp2": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    "ep2+etp1": {"tp": 2, "ep": 2},
    "dp2xtp2": {"dp_replicate": 2, "tp": 2, "etp": 2},
    "fsdp2xtp2+sp": {"dp_shard": 2, "tp": 2, "etp": 2},
    "tp2xpp2": {"tp": 2, "pp": 2, "sp": False, "etp": 2},
    "tp2+spxpp2": {"tp": 2, "pp": 2, "etp": 2},
    "tp2xzbv2": {"tp": 2, "pp": 2, "etp": 2, "schedule": "zbv"},
    "dp2xpp2": {"dp_replicate": 2, "pp": 2},
    "fsdp2xpp2": {"dp_shard": 2, "pp": 2},
    "fsdp2xzbv2": {"dp_shard": 2, "pp": 2, "schedule": "zbv"},
    "pp2xep2": {"dp_shard": 2, "pp": 2, "ep": 2},
    "dualpipev2xep2": {"dp_shard": 2, "pp": 2, "ep": 2, "schedule": "dualpipev"},
    "cp2xep2": {"cp": 2, "ep": 2},
    "tp2xcp2": {"tp": 2, "cp": 2, "etp": 2},
    "tp2xulysses2": {"tp": 2, "cp": 2, "etp": 2, "cp_method": "ulysses"},
    "zero1xcp2": {"dp_shard": 2, "cp": 2, "zero": 1},
    "dp2xtp2xpp2": {"dp_replicate": 2, "tp": 2, "pp": 2, "etp": 2},
    "fsdp2xtp2xpp2": {"dp_shard": 2, "tp": 2, "pp": 2, "etp": 2},
    "hsdp2x2xpp2": {"dp_replicate": 2, "dp_shard": 2, "pp": 2},
    "dp2xcp2xep2": {"dp_replicate": 2, "cp": 2, "ep": 2},
    "fsdp2xcp2xep4": {"dp_shard": 2, "cp": 2, "ep": 4},
    "hsdp2x2xcp2xtp2xep4": {
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 2,
        "tp": 2,
        "ep": 4,
        "etp": 2,
    },
    "all five on 8": {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
    "all five on 32": {"dp_shard": 4, "tp": 2, "cp": 2, "pp": 2, "ep": 8},
}


def matrix() -> Iterator[tuple[str, str, int]]:
    """Every (model, layout, accumulation) of the acceptance matrix that makes sense: experts are
    shared out only where there are some."""
    for model in MATRIX_MODELS:
        for name, axes in LAYOUTS.items():
            if axes.get("ep", 1) > 1 and not MODELS[model].get("n_experts"):
                continue
            for accumulation in (1, 4):
                yield model, name, accumulation


def quick() -> Iterator[tuple[str, str, int]]:
    """A part of the matrix in which every layout, model and accumulation occurs."""
    by_layout: dict[str, list[tuple[str, str, int]]] = {}
    for row in matrix():
        by_layout.setdefault(row[1], []).append(row)
    for place, rows in enumerate(by_layout.values()):
        yield rows[(3 * place + 1) % len(rows)]


def layout(axes: dict[str, Any], accumulation: int, experts: bool = True) -> Layout:
    """`axes` with the micro-batch that gives `accumulation` micro-batches a step; without
    `experts` there are none whose width could be split."""
    dp = int(axes.get("dp_replicate", 1)) * int(axes.get("dp_shard", 1))
    kept = axes if experts else {key: value for key, value in axes.items() if key != "etp"}
    return Layout(**kept, micro_batch=BATCH // (dp * accumulation))


def job(model: dict[str, Any], packing: str = "stream", **sections: dict[str, Any]) -> Job:
    """A job on one process; the tests put layouts in its place."""
    tables: dict[str, Any] = {
        "job": {"steps": 8},
        "model": model,
        "data": {"seq_len": SEQ_LEN, "global_batch": BATCH, "packing": packing},
        "layout": {"micro_batch": BATCH},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1, "grad_clip": 0.1},
    }
    return resolve_job({**tables, **sections})


def model_job(name: str, **sections: dict[str, Any]) -> Job:
    """The job of `MODELS[name]`."""
    packing = "documents" if name == "packed" else "stream"
    return job(MODELS[name], packing, **sections)


def on_layout(base: Job, how: Layout) -> Job:
    """`base` under `how`, checked as a job file is."""
    tables = base.model_dump(mode="json")
    tables["layout"] = how.model_dump(mode="json")
    tables["cluster"]["ref"] = f"local:{how.world}"
    return resolve_job(tables)


def write_tokens(prefix: Path) -> Path:
    """A token store with something to learn in it: a noisy walk over the vocabulary, in documents
    some of which are shorter than a sequence."""
    random = np.random.default_rng(7)
    steps = random.integers(1, 5, size=6000)
    cuts = np.cumsum(random.integers(5, 60, size=150))
    with write_store(prefix, VOCAB, end_of_text=0) as writer:
        for document in np.split((np.cumsum(steps) % (VOCAB - 1)) + 1, cuts):
            if len(document):
                writer.add(document)
                writer.end_document()
    return prefix
