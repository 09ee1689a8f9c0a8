"""By what a run is kept, and what that is predicted to take: resolved once, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.catalog import cluster
from meshwright.conduct.muster import Muster
from meshwright.plan.job import Job
from meshwright.plan.redundancy_cost import Price, Speeds, chosen, prices

_MB = 1e6


@dataclass(frozen=True)
class Kept:
    """`chosen` of all kinds that the job could have; None: its state is kept by nobody."""

    asked: str
    chosen: Price | None
    prices: tuple[Price, ...]

    @classmethod
    def of(cls, job: Job) -> Kept:
        """For the run of `job`."""
        asked = job.resilience.redundancy
        if not job.resilience.survives:
            return cls(asked, None, ())
        muster, world = Muster(job), job.layout.world
        homes = [muster.home_of(member) for member in range(world + job.cluster.spares)]
        nodes = len(set(homes[:world]))
        machine = cluster(job.cluster.ref)
        found = prices(job, machine, homes[:world], homes[world:])
        room = Speeds.of(machine, nodes).host_bytes
        return cls(asked, chosen(job, found, room, nodes), tuple(found))

    def job(self, job: Job) -> Job:
        """`job` with the kind that was chosen for it."""
        if self.asked != "auto" or self.chosen is None:
            return job
        update = {"redundancy": self.chosen.kind}
        return job.model_copy(update={"resilience": job.resilience.model_copy(update=update)})

    def document(self) -> dict[str, Any] | None:
        """As plain JSON."""
        if not self.prices:
            return None
        of_run = None if self.chosen is None else self.chosen.document()
        return {"asked": self.asked, "chosen": of_run, "kinds": [x.document() for x in self.prices]}

    def line(self) -> str | None:
        """For the first lines of a run."""
        if self.chosen is None:
            return None
        others = [f"{x.kind} {x.seconds * 1e3:.2g} ms" for x in self.prices if x is not self.chosen]
        beside = f"; {', '.join(others)}" if others and self.asked == "auto" else ""
        how = " (auto)" if self.asked == "auto" else ""
        return f"redundancy: {price_words(self.chosen.document())}{how}{beside}"


def price_words(price: Mapping[str, Any]) -> str:
    """A price for a person."""
    return (
        f"{price['kind']}, survives the loss of {price['survives']}: "
        f"{price['host_bytes'] / _MB:.3g} MB of host memory at most on a member, "
        f"{price['wire_bytes'] / _MB:.3g} MB sent and {price['seconds'] * 1e3:.2g} ms a step"
    )
