"""Running a small function on every rank of a layout, and what the ranks return and save."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from parity_jobs import on_layout

from meshwright.checkpoint.opening import newest
from meshwright.conduct import conductor
from meshwright.conduct.conductor import Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout


def run_on_ranks(
    engine: LocalEngine, root: Path, name: str, job: Job, layout: Layout, args: dict[str, Any]
) -> list[Any]:
    """Results of `parity_workers:name`, or of `module:name`, in rank order."""
    out = Path(mkdtemp(dir=root))
    plain = {
        "job": on_layout(job, layout).model_dump(mode="json"),
        "out": str(out),
        **args,
    }
    with RunDir.create_at(out / "run") as rundir:
        entry = name if ":" in name else f"parity_workers:{name}"
        outcome = conductor.run(
            engine, rundir, entry, layout.world, plain, lambda _: None, lambda: 0
        )
    assert outcome.status is Status.FINISHED, outcome.error
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(layout.world)]


def saved_tensors(root: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint under `root`."""
    reader = newest(root)
    return {name: reader.read(name).tobytes() for name in reader.names}
