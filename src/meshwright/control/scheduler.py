"""Which job starts where: one function from how things are to what is to be done.

Gangs are placed whole or not at all. On a cluster, jobs go in order of priority, then of age; none
overtakes, so none starves. Ranks take chips from the first node on, spares from the last one back,
where the chips are that are held ready for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # node, chip within it


@dataclass(frozen=True)
class ChipState:
    """A chip; `why_not` says why it takes no work, empty if it does."""

    place: Place
    why_not: str = ""


@dataclass(frozen=True)
class ClusterState:
    """A cluster; `why_not` says why nothing starts on it, empty if it can."""

    id: str
    chips: tuple[ChipState, ...]
    why_not: str = ""


@dataclass(frozen=True)
class JobState:
    """A job that waits (`holds` is empty) or holds chips."""

    id: str
    cluster: str
    ranks: int
    spares: int
    priority: int
    seq: int  # by age
    waits: bool
    holds: tuple[Place, ...] = ()

    @property
    def needs(self) -> int:
        """Chips."""
        return self.ranks + self.spares


@dataclass(frozen=True)
class Snapshot:
    """How things are."""

    clusters: tuple[ClusterState, ...]
    jobs: tuple[JobState, ...]


@dataclass(frozen=True)
class Start:
    """A job starts on these chips: ranks, then spares."""

    job: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Waiting:
    """Why a job does not start now."""

    free: int
    ahead: tuple[str, ...]
    unusable: dict[str, int]
    sentence: str


def schedule(snapshot: Snapshot) -> list[Start]:
    """What starts now."""
    return [start for cluster in snapshot.clusters for start in _starts(cluster, snapshot.jobs)]


def explain(snapshot: Snapshot, job: JobState) -> Waiting:
    """Why `job`, which waits, does not start."""
    cluster = next(found for found in snapshot.clusters if found.id == job.cluster)
    unusable = dict(Counter(chip.why_not for chip in cluster.chips if chip.why_not))
    free = len(_free(cluster, snapshot.jobs))
    queue = _queue(cluster, snapshot.jobs)
    ahead = tuple(other.id for other in queue[: queue.index(job)])
    return Waiting(free, ahead, unusable, _sentence(cluster, job, free, ahead, unusable))


def _starts(cluster: ClusterState, jobs: Sequence[JobState]) -> Iterator[Start]:
    if cluster.why_not:
        return
    free = _free(cluster, jobs)
    for job in _queue(cluster, jobs):
        if job.needs > len(free):
            return
        ranks, rest = free[: job.ranks], free[job.ranks :]
        spares = rest[len(rest) - job.spares :]
        yield Start(job.id, (*ranks, *spares))
        free = rest[: len(rest) - job.spares]


def _queue(cluster: ClusterState, jobs: Sequence[JobState]) -> list[JobState]:
    waiting = [job for job in jobs if job.cluster == cluster.id and job.waits]
    return sorted(waiting, key=lambda job: (-job.priority, job.seq))


def _free(cluster: ClusterState, jobs: Sequence[JobState]) -> list[Place]:
    held = {place for job in jobs if job.cluster == cluster.id for place in job.holds}
    return [chip.place for chip in cluster.chips if not chip.why_not and chip.place not in held]


def _sentence(
    cluster: ClusterState,
    job: JobState,
    free: int,
    ahead: Sequence[str],
    unusable: dict[str, int],
) -> str:
    if cluster.why_not:
        return f"waits: the cluster {cluster.why_not}"
    held = len(cluster.chips) - free - sum(unusable.values())
    words = [f"needs {job.needs} chips, and {free} of {len(cluster.chips)} are free"]
    if held:
        words.append(f"{held} are held by other jobs")
    words += [f"{count} {why}" for why, count in sorted(unusable.items())]
    if ahead:
        words.append(f"{len(ahead)} jobs go first ({', '.join(ahead[:3])})")
    if free >= job.needs and not ahead:
        return "starts at the next moment"
    return "waits: " + "; ".join(words)
