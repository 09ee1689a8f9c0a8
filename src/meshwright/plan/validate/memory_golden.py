"""Megatron-LM's CI runs: arguments as a setting of the memory model, or why not.

The figure is PyTorch's `max_memory_allocated` as the last rank logs it: tensors only, and the last
pipeline stage. The number of chips is in no file: a CI node has eight (a GB200 node four); for
release tests, which run on several nodes, it is the power of two whose states come nearest to
`mem_alloc`, what is allocated between two steps. That column also shows where the golden values
belong to other arguments than those that the repository has now.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.base.errors import DataError
from meshwright.plan.cost.candidates import (
    CORE,
    FULL,
    INTERLEAVED,
    NONE,
    ONE_F_ONE_B,
    Candidates,
)
from meshwright.plan.cost.framework import Framework
from meshwright.plan.cost.memory import STATES, Memory, add, rank_memory
from meshwright.plan.cost.memory_setting import Setting
from meshwright.plan.validate.memory_shapes import Arguments, megatron_shape

OTHER_MODELS = {
    r"^bert/|^t5/": "an encoder, which ModelSpec has not",
    r"^mimo/|^multimodal|llava": "a vision tower and frozen parts, which ModelSpec has not",
    r"mamba|hybrid|nemotron|gdn|dsa|engram": "layers that ModelSpec has not (state spaces)",
    r"grpo|inference|distill|modelopt": "holds what inference or a teacher needs, not in arguments",
}
COPIES = {
    ("gpt/gpt3_15b_8t_release_sm_gb200", "lts_dgx_a100"): "values of gpt3_15b_8t_release_sm",
    ("gpt/gpt3_15b_8t_release_sm_gb200", "dev_dgx_h100"): "values of gpt3_15b_8t_release_sm: "
    "its step takes 3.40 s, as on the A100, and 1.45 s in the test that they come from",
}
SAME_STATES = 0.10  # relative, or
SMALL_BYTES = 0.75e9  # what work spaces, caches and the state of data loaders may add


@dataclass(frozen=True)
class GoldenRun:
    """One row that can be predicted."""

    case: str
    hardware: str
    arguments: Arguments
    setting: Setting
    layout: Candidates
    peak_bytes: float
    between_bytes: float

    @property
    def origin(self) -> str:
        """What its row is counted under."""
        return "Megatron-LM CI"

    def memory(self, constants: Framework | None = None) -> Memory:
        """The last pipeline rank by part, with other constants if given."""
        setting = self.setting
        if constants is not None:
            batch = setting.global_batch
            setting = replace(_setting(self.case, self.arguments, constants), global_batch=batch)
        return rank_memory(setting, self.layout, self.layout.pp - 1)

    def predicted_bytes(self, constants: Framework | None = None) -> float:
        """The peak of what tensors take."""
        return float(self.memory(constants).allocated_bytes[0])


@dataclass(frozen=True)
class GoldenRefused:
    """One row that cannot be predicted, and why."""

    case: str
    hardware: str
    peak_bytes: float
    reason: str


def read_golden(
    path: Path, framework: Framework, published: Sequence[Mapping[str, str]] = ()
) -> list[GoldenRun | GoldenRefused]:
    """Every row with a peak, in order; then those of `published` that `memory_transcribed.toml`
    has the arguments of."""
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["mem_max"]]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError) as error:
        raise DataError(f"{path}: cannot be read as Megatron-LM CI runs: {error}") from error
    return [read_row(row, framework) for row in (*rows, *_transcribed(rows, published))]


def transcribed(row_id: str) -> dict[str, Any] | None:
    """How the arguments of a published row follow from those of a case; None where they do not."""
    text = files("meshwright.plan.validate").joinpath("memory_transcribed.toml")
    table = tomllib.loads(text.read_text(encoding="utf-8"))
    return next((entry for key, entry in table.items() if row_id.startswith(key)), None)


def _transcribed(
    rows: list[dict[str, str]], published: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    found = []
    arguments = {row["case"]: row["args"] for row in rows}
    for row in published:
        entry = transcribed(row["id"])
        if not entry or entry["base"] not in arguments or not row["peak_mem_gb_per_chip"]:
            continue
        dropped = [f"--{name}" for name in entry.get("drop", ())]
        base = json.loads(arguments[entry["base"]])
        kept = {key: value for key, value in base.items() if key not in dropped}
        changed = {f"--{name}": value for name, value in entry.get("set", {}).items()}
        between = re.search(r"steady allocated ([\d.]+) GB", row["notes"])
        made = {
            "case": entry["case"],
            "hw": row["chip"],
            "mem_max": str(float(row["peak_mem_gb_per_chip"]) * 1e9),
            "mem_alloc": str(float(between[1]) * 1e9) if between else "",
            "args": json.dumps({**kept, **changed}),
        }
        found.append(made)
    return found


def read_row(row: Mapping[str, str], framework: Framework) -> GoldenRun | GoldenRefused:
    """One row, or why not."""
    case, hardware, peak = row["case"], row["hw"], float(row["mem_max"])
    reason = COPIES.get((case, hardware), "")
    reason = next((why for what, why in OTHER_MODELS.items() if re.search(what, case)), reason)
    if reason:
        return GoldenRefused(case, hardware, peak, reason)
    try:
        return _run(row, Arguments(json.loads(row["args"])), framework)
    except ValueError as error:
        return GoldenRefused(case, hardware, peak, str(error))


def _run(row: Mapping[str, str], a: Arguments, framework: Framework) -> GoldenRun:
    between = float(row["mem_alloc"] or 0)
    setting = _setting(row["case"], a, framework)
    runs = []
    for world in _worlds(row):
        layout = _layout(a, world, setting.shape.layers)
        if layout.world[0] == world and (layout.expert_lanes % layout.ep)[0] == 0:
            batch = a.count("global-batch-size", int(layout.dp[0] * layout.micro_batch[0]) * 8)
            one = replace(setting, global_batch=batch)
            peak = float(row["mem_max"])
            run = GoldenRun(row["case"], row["hw"], a, one, layout, peak, between)
            runs.append((_states_off(run), run))
    if not runs:
        raise ValueError("the arguments need more chips than a node has")
    off, run = min(runs, key=lambda pair: pair[0])
    states = add(run.memory().parts, STATES)[0]
    if off > math.log(1 + SAME_STATES) and abs(states - between) > SMALL_BYTES:
        raise ValueError(
            f"{between / 2**30:.1f} GiB between steps, the arguments say {states / 2**30:.1f}: "
            "values and arguments are of different runs"
        )
    return run


def _worlds(row: Mapping[str, str]) -> tuple[int, ...]:
    if "release" in row["case"]:
        return (16, 32, 64, 128, 256, 512)
    return (4, 8) if row["case"].endswith("_1node") and "gb200" in row["hw"] else (8,)


def _states_off(run: GoldenRun) -> float:
    states = float(add(run.memory().parts, STATES)[0])
    return abs(math.log(states / run.between_bytes)) if run.between_bytes else 0.0


def _setting(case: str, a: Arguments, framework: Framework) -> Setting:
    half = a.flag("bf16") or a.flag("fp16")
    precision = "fp8" if a.text("fp8-format") else "bf16" if half else "fp32"
    own: dict[str, Any] = {
        "vocab_multiple": a.count("make-vocab-size-divisible-by", 128),
        "wgrads": framework.wgrads * (not a.flag("no-gradient-accumulation-fusion")),
    }
    if a.flag("cross-entropy-loss-fusion") and a.text("cross-entropy-fusion-impl") != "te":
        own["logit_bytes"] = framework.logit_compiled_bytes
    if a.flag("grad-reduce-in-bf16"):
        own["gradient_bytes"] = 2.0
    if a.flag("fp8-param-gather"):
        own["fp8_cache_bytes"] = 0.0
    if not half:  # FP8 products of fp32 weights
        own |= {"weight_bytes": 4.0, "master_bytes": 0.0}
    semantics = replace(framework, **own)
    return Setting(
        shape=megatron_shape(case, a, semantics, precision, fp32=not half),
        framework=semantics,
        seq_len=a.count("seq-length"),
        global_batch=1,
        precision=precision if half else "fp32",
        flash=a.text("attention-backend") != "unfused",
    )


def _layout(a: Arguments, world: int, layers: int) -> Candidates:
    tp, pp = a.count("tensor-model-parallel-size", 1), a.count("pipeline-model-parallel-size", 1)
    cp, ep = a.count("context-parallel-size", 1), a.count("expert-model-parallel-size", 1)
    etp = a.count("expert-tensor-parallel-size", tp) if a.count("num-experts", 0) else tp
    dp, sharded = max(world // (tp * pp * cp), 1), a.flag("use-distributed-optimizer")
    vpp = a.count("num-virtual-stages-per-pipeline-rank", 1)
    if a.text("num-layers-per-virtual-pipeline-stage"):
        vpp = layers // pp // a.count("num-layers-per-virtual-pipeline-stage")
    if pattern := a.text("pipeline-model-parallel-layout"):
        stages = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), pattern)
        vpp = (stages.count("|") + 1) // pp
    how = {"full": FULL, "selective": CORE}.get(a.text("recompute-granularity"), NONE)
    return Candidates.of(
        1, dp_replicate=1 if sharded else dp, dp_shard=dp if sharded else 1, tp=tp, cp=cp, pp=pp,
        vpp=vpp, ep=ep, etp=etp, zero=int(sharded), micro_batch=a.count("micro-batch-size"),
        schedule=INTERLEAVED if vpp > 1 else ONE_F_ONE_B, recompute=how,
        sp=a.flag("sequence-parallel"),
    )  # fmt: skip
