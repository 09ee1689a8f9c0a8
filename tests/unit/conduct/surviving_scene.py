"""A run that survives, of fake members, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.conductor import Outcome
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.muster import Muster
from meshwright.conduct.rundir import RunDir, read_lines
from meshwright.conduct.surviving import run
from meshwright.plan.job import Job, resolve_job

SHAPE = {
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 2,
    "ffn_hidden": 32,
    "vocab": 64,
}


def make_job(ranks: int = 8, **sections: dict[str, Any]) -> Job:
    """A job of `ranks` replicas that survives."""
    tables: dict[str, Any] = {
        "job": {"steps": 100},
        "model": SHAPE,
        "data": {"seq_len": 8, "global_batch": 48},
        "layout": {"dp_replicate": ranks},
        "cluster": {"ref": f"local:{ranks}"},
        "resilience": {"redundancy": "auto"},
    }
    for name, section in sections.items():
        tables[name] = {**tables.get(name, {}), **section}
    return resolve_job(tables)


class Scene:
    """One run directory, and what was seen of the run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "run"
        self.rundir = RunDir.open_existing(path) if path.exists() else RunDir.create_at(path)
        (folder / "state").mkdir(exist_ok=True)
        self.seen: list[dict[str, Any]] = []
        self.on_event: Callable[[dict[str, Any]], None] = self.seen.append
        self.stops = 0

    def play(
        self, job: Job, acts: dict[str, Any] | None = None, adopt: bool = False, **args: Any
    ) -> Outcome:
        """The run of `job`, from its first event to its last."""
        args = {"folder": str(self.folder / "state"), "steps": 40, "acts": acts or {}, **args}
        with Fleet.start("fake_member") as fleet:
            self.fleet = fleet
            return run(
                fleet,
                self.rundir,
                Muster(job),
                "fake_member:main",
                args,
                lambda message: self.on_event(message),
                lambda: self.stops,
                adopt=adopt,
            )

    def events(self, kind: Kind) -> list[dict[str, Any]]:
        """The stored events of `kind`."""
        return [e for e in read_lines(self.rundir.events) if e["kind"] == kind]

    def once(self, kind: Kind, what: Callable[[], None], step: int = 0) -> None:
        """Have `what` called at the first message of `kind` of at least `step`."""
        done: list[bool] = []

        def on_event(message: dict[str, Any]) -> None:
            self.seen.append(message)
            if not done and message["kind"] == kind and message.get("step", 0) >= step:
                done.append(True)
                what()

        self.on_event = on_event

    def steps(self) -> list[int]:
        """The steps with metrics, as stored."""
        return [line["step"] for line in read_lines(self.rundir.metrics)]
