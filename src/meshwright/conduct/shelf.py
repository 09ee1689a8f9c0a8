"""Where the state of a run lies in memory while its layout changes."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError
from meshwright.conduct.members import Relayout
from meshwright.conduct.muster import Muster
from meshwright.conduct.places import resized
from meshwright.plan.combinations import check_job
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import check_survivable, keeping

# Keys of [layout] that change how the work is cut, and no number of it but by rounding.
ELASTIC = (
    *("dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "cp_method", "pp", "vpp", "stages"),
    *("ep", "etp", "schedule", "micro_batch", "recompute"),
)
_ROOM = 1.25  # times what the tensors take, for all that is around them
_BYTES = 12  # a parameter: master and two moments


@dataclass
class Shelf:
    """A folder in memory: all members save to it, and begin anew from it as `job` says.

    `make` makes one for so many bytes. `through` is what tables say of it once that is done.
    Members of all nodes must see the folder.
    """

    make: Callable[[int], Path]
    job: Job | None = None
    step: int = 0
    through: Mapping[str, Any] | None = None
    _folder: Path | None = field(default=None)
    _old: list[Path] = field(default_factory=list)

    def save(self) -> dict[str, Any]:
        """What a table says that has all save; the same until they have."""
        if self._folder is None:
            assert self.job is not None
            self._folder = self.make(int(self.job.model.params * _BYTES * _ROOM))
        return {"folder": str(self._folder), "saving": True}

    def load(self) -> None:
        """From now on tables say that all have begun from it."""
        assert self._folder is not None and self.job is not None
        layout = self.job.layout.model_dump(mode="json")
        self.through = {
            "folder": str(self._folder),
            "saving": False,
            "step": self.step,
            "layout": layout,
        }
        self._old.append(self._folder)
        self._folder = None

    def give_up(self) -> None:
        """They could not save; all goes on as it was."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def adopt(self, job: Job, through: Mapping[str, Any] | None) -> Job:
        """Know what an earlier conductor said of it; the job as it goes on."""
        if through is None:
            return job
        self._old.append(Path(through["folder"]))
        if through["saving"]:
            return job
        self.through = through
        self.job = in_layout(job, Layout.model_validate(through["layout"]))
        return self.job

    def clear(self) -> None:
        """What all have begun from, and saved again since, is not needed any more."""
        for folder in self._old:
            shutil.rmtree(folder, ignore_errors=True)
        self._old.clear()

    def close(self) -> None:
        """Leave nothing behind."""
        self.clear()
        self.give_up()


class Memory:
    """Folders for the run in `run`: in memory if there is room, else beside it."""

    def __init__(self, run: Path, memory: Path = Path("/dev/shm")) -> None:
        self._run, self._memory = run, memory
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
        self._prefix = f"meshwright-{name}-"

    def make(self, n_bytes: int) -> Path:
        """One for so many bytes."""
        fits = self._memory.is_dir() and shutil.disk_usage(self._memory).free > n_bytes
        return Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._memory if fits else self._run))

    def sweep(self) -> None:
        """Remove what an incarnation that was killed has left."""
        for place in (self._memory, self._run):
            for folder in place.glob(f"{self._prefix}*"):
                shutil.rmtree(folder, ignore_errors=True)


def in_layout(job: Job, layout: Layout) -> Job:
    """`job` in another layout, on as many chips as that takes."""
    cluster = job.cluster.model_copy(update={"ref": f"local:{layout.world}"})
    return job.model_copy(update={"layout": layout, "cluster": cluster})


def _keepable(job: Job) -> Job:
    """`job` with the kind of redundancy that it has, or the best that its layout leaves."""
    kind, experts = job.resilience.redundancy, bool(job.model.n_experts)
    try:
        keeping(job.layout, kind, experts, shadowed=True)
    except ConfigError:
        resilience = job.resilience.model_copy(update={"redundancy": "auto"})
        return job.model_copy(update={"resilience": resilience})
    return job


def other_layout(muster: Muster, replicas: int, wanted: Mapping[str, Any]) -> tuple[Relayout, Job]:
    """What it takes to go on with the keys `wanted` of the layout, from so many `replicas`; and the
    job then. Raises ConfigError where the job cannot run like that."""
    now = resized(muster.job, replicas).layout
    for key, value in wanted.items():
        if key not in ELASTIC:
            raise ConfigError("resize", f"{key}={value}", f"takes {', '.join(ELASTIC)}")
    layout: Layout = parse(Layout, {**now.model_dump(), **wanted}, prefix="layout")
    job = _keepable(in_layout(muster.job, layout))
    check_job(job)
    check_survivable(layout)
    if layout == now:
        raise ConfigError("resize", layout.label, "the run goes on in it already")
    after = Muster(job)
    return Relayout(layout.world, after.shapes, after.keeping, now.label, layout.label), job
