"""Many published runs as one set of columns, so that all are predicted at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.catalog import load as catalog
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.rates import Machine, Rates, Software, Values, rates
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.step import seconds
from meshwright.plan.cost.workload import Workload
from meshwright.plan.validate.layouts import CLUSTERS
from meshwright.plan.validate.rows import Run

Floats = NDArray[np.float64]
Kind = tuple[Machine, Software, str]


@dataclass(frozen=True)
class Columns:
    """Runs with a step time, their shapes and layouts, and which of `kinds` (machine, software,
    precision) each is."""

    runs: tuple[Run, ...]
    shapes: Shapes
    layouts: Candidates
    kinds: tuple[Kind, ...]
    kind: NDArray[np.int64]
    measured_s: Floats

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Columns:
        """Those of `runs` that have a step time."""
        timed = [run for run in runs if run.step_s]
        kinds: dict[str, tuple[int, Kind]] = {}
        which = []
        for run in timed:
            kind = (machine(run), software(run), run.precision)
            which.append(kinds.setdefault(repr(kind), (len(kinds), kind))[0])
        return cls(
            runs=tuple(timed),
            shapes=Shapes.stack([Shapes.of(workload(run)) for run in timed]),
            layouts=Candidates.join([run.layout for run in timed]),
            kinds=tuple(kind for _, kind in kinds.values()),
            kind=np.array(which),
            measured_s=np.array([run.step_s for run in timed], float),
        )

    def predict(self, values: Values, like: Mapping[str, str]) -> dict[str, Floats]:
        """Seconds of every run, part by part."""
        every = [rates(values, like, *kind) for kind in self.kinds]
        return seconds(self.shapes, Rates.gather(every, self.kind), self.layouts)


def workload(run: Run) -> Workload:
    """What a run trained."""
    return Workload(
        spec=run.spec,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=run.precision,
        framework=framework(run.source.framework),
        flash_attention=run.source.attention != "unfused",
        attention_share=run.attention_share,
    )


def machine(run: Run) -> Machine:
    """What it ran on."""
    return Machine.of(catalog.cluster(f"{run.cluster}:{run.layout.world[0]}", CLUSTERS))


def software(run: Run) -> Software:
    """What the framework of a run could do, by its source and the notes of its row.

    Megatron-Bridge's containers from 26.06 on run a step in CUDA graphs with grouped FP8 kernels:
    the same rows are a third faster than before.
    """
    source, notes = run.source, run.notes
    container = re.search(r"NeMo container (\d\d\.\d\d)", notes)
    style = source.style
    if re.search(r"compile (is )?off", notes):
        style = "eager"
    elif style == "eager" and notes.startswith("torch.compile"):
        style = "compiled"
    elif style == "graphed" and container and container[1] >= "26.06":
        style = "captured"
    named = re.search(r"alltoall|DeepEP", notes)
    return Software(
        style=style,
        attention=source.attention,
        fused_loss=style in ("te", "graphed", "captured", "compiled", "xla"),
        tp_overlap=source.tp_overlap,
        dp_overlap=source.dp_overlap,
        pp_overlap=source.pp_overlap,
        ep_overlap="overlap on" in notes,
        merges="DeepEP" in notes if named else source.merges,
        whole_hops=source.whole_hops,
        gradient_bytes=2.0 if "PURE" in notes else source.reduce_bytes,
        gather_bytes=source.gather_bytes,
        bucket_params=source.bucket_params,
        bucket_per_rank=source.bucket_per_rank,
    )
