"""Peak memory of published runs: which rank and which figure a source means, and the prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.framework import Framework, framework
from meshwright.plan.cost.memory import STATES, Memory, add, heaviest, rank_memory
from meshwright.plan.cost.memory_setting import Setting
from meshwright.plan.cost.memory_shape import memory_shape
from meshwright.plan.validate.memory_golden import transcribed
from meshwright.plan.validate.rows import Row, Run


@dataclass(frozen=True)
class Meaning:
    """What a source's figure is: tensors, the allocator's share, or all that the chip has given
    away. `flash` overrides what is assumed of its attention."""

    framework: str
    figure: str
    flash: bool = True


MEANINGS: Mapping[str, Meaning] = {
    "simumax": Meaning("megatron", "allocated"),
    "mlm": Meaning("megatron", "allocated"),
    "mbcard": Meaning("bridge", "allocated"),
    "mbskill": Meaning("bridge", "allocated"),
    "mlperf": Meaning("bridge", "allocated"),
    "bloom": Meaning("megatron-deepspeed", "device", flash=False),
    "tr3": Meaning("megatron-deepspeed", "device", flash=False),
    "zb": Meaning("megatron-2021", "allocated", flash=False),
    "kempner": Meaning("kempnerforge", "allocated"),
    "nano": Meaning("nanotron", "allocated"),
    "primus": Meaning("megatron", "device"),
    "gist": Meaning("deepspeed", "allocated"),
    "intern": Meaning("internevo", "device"),
    "swift": Meaning("megatron", "device"),
    "aws": Meaning("torchtitan", "reserved"),
    "titan": Meaning("torchtitan", "reserved"),
}


@dataclass(frozen=True)
class MemoryRun:
    """One row: what to predict, and what was measured."""

    id: str
    origin: str
    spec: ModelSpec
    setting: Setting
    layout: Candidates
    figure: str
    last_rank: bool
    peak_bytes: float

    @property
    def case(self) -> str:
        """Rows that differ in what memory does not depend on, or in the chip, are one case."""
        return f"{self.spec.model_dump_json()} {self.layout} {self.setting.seq_len}"

    def memory(self, constants: Framework | None = None) -> Memory:
        """The prediction, by part, with other constants if given."""
        s = self.setting
        if constants is not None:
            shape = memory_shape(self.spec, constants, s.precision)
            s = replace(s, framework=constants, shape=shape)
        if self.last_rank:
            return rank_memory(s, self.layout, self.layout.pp - 1)
        return heaviest(s, self.layout)

    def predicted_bytes(self, constants: Framework | None = None) -> float:
        """The figure that the source means."""
        found = self.memory(constants)
        figures = {
            "allocated": found.allocated_bytes,
            "reserved": found.reserved_bytes,
            "device": found.total_bytes,
        }
        return float(figures[self.figure][0])


def memory_run(run: Run, row: Row) -> MemoryRun:
    """A published run as one of the memory model. Raises ValueError with the reason where it cannot
    be."""
    if run.memory_bytes is None:
        raise ValueError("no peak memory")
    key = next((name for name in MEANINGS if run.id.startswith(name)), "")
    if not key:
        raise ValueError("what its memory figure means is not known")
    if transcribed(run.id):
        raise ValueError("counted as a CI case, from its arguments")
    notes, meaning = row.get("notes", ""), MEANINGS[key]
    if "MTP" in notes:
        raise ValueError("multi-token prediction and attention kernel are in no column")
    if "OOM during run" in notes or "offload" in notes:
        raise ValueError("peak before a failure, or with offloading")
    constants = framework(meaning.framework)
    setting = Setting(
        shape=memory_shape(run.spec, constants, run.precision),
        framework=constants,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=run.precision,
        flash=meaning.flash,
    )
    last = "LAST rank" in notes
    layout = _sharded(run.layout, row)
    size = run.memory_bytes
    found = MemoryRun(run.id, run.origin, run.spec, setting, layout, meaning.figure, last, size)
    _check_states(found, notes)
    return found


def _check_states(run: MemoryRun, notes: str) -> None:
    """Where a note says what is allocated between two steps, the layout must lead to that."""
    between = re.search(r"steady allocated ([\d.]+) GB", notes)
    states = float(add(run.memory().parts, STATES)[0])
    if between and not 0.9 < states / (float(between[1]) * 1e9) < 1.1:
        raise ValueError("allocated between steps is not what its layout leads to")


def _sharded(c: Candidates, row: Row) -> Candidates:
    """ZeRO-1 over the cp ranks alone, which a layout without data parallelism has too."""
    if re.search(r"zero-?1", row.get("sharding", "").lower()) and c.dp[0] == 1 and c.cp[0] > 1:
        return replace(c, zero=np.ones_like(c.zero))
    return c
