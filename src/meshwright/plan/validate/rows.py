"""Published runs: rows of a CSV file as workloads and layouts that can be priced, or as refusals.

The columns are those of `published_runs.csv`. A row is compared by its step time, or by tokens/s
where it gives only these; never by TFLOP/s, which sources define in different ways.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.base.errors import DataError
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.workload import Precision
from meshwright.plan.validate import layouts, models

Row = Mapping[str, str]
REQUIRED = ("id", "source", "model", "chip", "n_chips", "seq_len", "global_batch_sequences")


@dataclass(frozen=True)
class Source:
    """What a source says once for all its rows (`sources.toml`)."""

    key: str
    framework: str
    style: str
    attention: str
    tp_overlap: bool = False
    dp_overlap: bool = True
    pp_overlap: bool = True
    whole_hops: bool = False
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    bucket_params: float = 40e6
    bucket_per_rank: float = 1e6
    clusters: Mapping[str, str] = field(default_factory=dict)
    finest_chunks: bool = False
    merges: bool = True
    untimed: str = ""
    recompute: str = ""


@dataclass(frozen=True)
class Run:
    """One row that can be priced. `step_s` or `memory_bytes` is None where the row has none."""

    id: str
    source: Source
    origin: str
    spec: ModelSpec
    cluster: str
    seq_len: int
    global_batch: int
    precision: Precision
    layout: Candidates
    attention_share: float
    step_s: float | None
    memory_bytes: float | None
    notes: str
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """One row that cannot be, and why."""

    id: str
    origin: str
    reason: str


class UnusableError(ValueError):
    """Why a row is refused."""


def read_runs(path: Path) -> list[Run | Refused]:
    """Every row of `path`, in order. Raises DataError where it is no such file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as published runs: {error}") from error
    if missing := [name for name in REQUIRED if not rows or name not in rows[0]]:
        raise DataError(f"{path}: has no column {', '.join(missing)}; see published_runs.csv")
    return [read_row(row) for row in rows]


def read_row(row: Row) -> Run | Refused:
    """One row as a run, or why not."""
    try:
        return _run({key: (value or "").strip() for key, value in row.items() if key})
    except ValueError as reason:
        return Refused(row["id"], row["source"], str(reason))


def source_of(row_id: str, name: str = "") -> Source:
    """What is known of the source of a row, by the longest beginning of its id; or, where the
    source called `name` says that it ran on JAX, of MaxText."""
    table = _sources()
    if re.search(r"MaxText|Paxml|\bPax\b", name):
        return Source(key="maxtext", **{**table["default"], **table["maxtext"]})
    keys = [key for key in table if row_id == key or row_id.startswith(f"{key}-")]
    key = max(keys, key=len, default="default")
    return Source(key=key, **{**table["default"], **table[key]})


@cache
def _sources() -> dict[str, dict[str, Any]]:
    text = files("meshwright.plan.validate").joinpath("sources.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def number(row: Row, name: str) -> float | None:
    """The cell as a number; None where it is empty or no number."""
    try:
        return float(row.get(name) or "")
    except ValueError:
        return None


def _run(row: Row) -> Run:
    if "DOUBTFUL" in row.get("notes", ""):
        raise UnusableError("DOUBTFUL in its notes")
    step, memory = number(row, "step_time_s"), number(row, "peak_mem_gb_per_chip")
    speed = number(row, "tokens_per_s_per_chip")
    if step is None and speed is None and memory is None:
        raise UnusableError("no step time, tokens/s or peak memory")
    chips, seq_len = _count(row, "n_chips"), _count(row, "seq_len")
    batch = _count(row, "global_batch_sequences")
    if step is None and speed:
        step = batch * seq_len / (speed * chips)
    assumed: list[str] = []
    source = source_of(row["id"], row["source"])
    spec = models.spec_of(row, seq_len, assumed)
    layout = layouts.layout_of(row, chips, batch, source, assumed)
    return Run(
        id=row["id"],
        source=source,
        origin=row["source"],
        spec=spec,
        cluster=layouts.cluster_of(row, source),
        seq_len=seq_len,
        global_batch=batch,
        precision=layouts.precision_of(row.get("precision", ""), assumed),
        layout=layout,
        attention_share=models.attention_share(row["model"]),
        step_s=None if source.untimed else step,
        memory_bytes=None if memory is None else memory * _memory_unit(row),
        notes=row.get("notes", ""),
        assumed=tuple(assumed),
    )


def _count(row: Row, name: str) -> int:
    value = number(row, name)
    if value is None or value < 1 or value != int(value):
        raise UnusableError(f"{name} is not stated")
    return int(value)


def _memory_unit(row: Row) -> float:
    """Bytes of the unit that the row's memory is in: the notes say where it is GiB."""
    return 2.0**30 if re.search(r"\bGiB\b", row.get("notes", "")) else 1e9


VTRAIN = {
    "n_chips": "# GPUs",
    "global_batch_sequences": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "seq_len": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}


def read_vtrain(path: Path) -> list[Run | Refused]:
    """vTrain's own table of 8 x A100 (`vtrain_single.csv`), as rows of the usual schema: full
    recomputation, 1F1B, no sharding, as its repository configures them."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    return [
        read_row(
            {
                **{name: row[column] for name, column in VTRAIN.items()},
                "id": f"vtrain-single-{number}",
                "source": "vTrain single node",
                "model": "GPT",
                "chip": "A100",
                "precision": "fp16",
                "sharding": "none",
                "recompute": "full",
                "sequence_parallel": "no",
                "schedule": "1f1b",
                "ffn_hidden": str(4 * int(row["hidden size"])),
                "step_time_s": str(float(row["iteration time (ms)"]) / 1e3),
            }
        )
        for number, row in enumerate(rows, start=1)
    ]
