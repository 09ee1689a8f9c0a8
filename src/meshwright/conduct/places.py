"""Which ranks hold the same state, and which sizes a layout may shrink or grow to: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshwright.base.errors import ConfigError
from meshwright.plan.combinations import check_job
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout, expert_lanes


@dataclass(frozen=True)
class Shapes:
    """How the ranks of a layout lie: `stages` x replicas x `inner`, as `plan.layout.coordinates`.

    `sizes` are the numbers of replicas that the job can run with, ascending.
    """

    stages: int
    inner: int
    sizes: tuple[int, ...]

    def replicas(self, world: int) -> int:
        """How many replicas `world` ranks make."""
        return world // (self.stages * self.inner)

    def world(self, replicas: int) -> int:
        """Ranks of so many replicas."""
        return self.stages * replicas * self.inner

    def place(self, rank: int, replicas: int) -> tuple[int, int, int]:
        """Stage, replica and place inside of a rank."""
        outer, inner = divmod(rank, self.inner)
        stage, replica = divmod(outer, replicas)
        return stage, replica, inner

    def twins(self, rank: int, world: int) -> list[int]:
        """The other ranks that hold the same weights."""
        replicas = self.replicas(world)
        stage, own, inner = self.place(rank, replicas)
        return [
            (stage * replicas + replica) * self.inner + inner
            for replica in range(replicas)
            if replica != own
        ]


def shapes(job: Job) -> Shapes:
    """The shapes of `job`. Only its own size, where replicas share out what they hold."""
    layout = job.layout
    inner = layout.dp_shard * layout.cp * layout.tp
    sizes: tuple[int, ...] = (layout.dp_replicate,)
    if expert_lanes(layout) % layout.ep == 0 and not layout.domain:
        most = max(job.data.global_batch // layout.micro_batch, layout.dp_replicate)
        sizes = tuple(size for size in range(1, most + 1) if _runs(job, size))
    return Shapes(layout.pp, inner, sizes)


def resized(job: Job, replicas: int) -> Job:
    """`job` with another number of replicas, and as many chips."""
    layout: Layout = job.layout.model_copy(update={"dp_replicate": replicas})
    cluster = job.cluster.model_copy(update={"ref": f"local:{layout.world}"})
    return job.model_copy(update={"layout": layout, "cluster": cluster})


def _runs(job: Job, replicas: int) -> bool:
    # A size takes the redundancy that it can have: a single replica has no twins.
    resilience = job.resilience.model_copy(update={"redundancy": "auto"})
    try:
        check_job(resized(job.model_copy(update={"resilience": resilience}), replicas))
    except ConfigError:
        return False
    return True


def choose(
    vacant: Sequence[int],
    table: Sequence[int],
    free: Sequence[int],
    node_of: Mapping[int, int],
    shapes: Shapes,
) -> dict[int, int] | None:
    """A member of `free`, the best first, for each vacant rank; None if they are too few.

    Where possible not on a node of the rank's twins: what holds the same bytes shall not be lost
    together.
    """
    chosen: dict[int, int] = {}
    left = list(free)
    for rank in vacant:
        if not left:
            return None
        twins = [t for t in shapes.twins(rank, len(table)) if t not in vacant or t in chosen]
        near = {node_of[chosen.get(twin, table[twin])] for twin in twins}
        found = next((member for member in left if node_of[member] not in near), left[0])
        left.remove(found)
        chosen[rank] = found
    return chosen


def crowded(table: Sequence[int], node_of: Mapping[int, int], shapes: Shapes) -> list[int]:
    """One rank, the last, of each place whose members are all on one node though they are several:
    what they hold would be lost with it."""
    found = []
    for rank in range(len(table)):
        twins = shapes.twins(rank, len(table))
        nodes = {node_of[table[twin]] for twin in [*twins, rank]}
        if twins and rank > max(twins) and len(nodes) == 1:
            found.append(rank)
    return found


def shrunk(
    table: Sequence[int], living: Collection[int], shapes: Shapes
) -> tuple[int, tuple[int, ...]] | None:
    """The largest smaller size that members who live can hold by themselves, and their table; None
    if some place has nobody left."""
    by_place = _by_place(table, living, shapes)
    most = min(len(members) for members in by_place.values())
    before = shapes.replicas(len(table))
    fitting = [size for size in shapes.sizes if size <= most and size < before]
    if not fitting:
        return None
    return fitting[-1], _laid(by_place, fitting[-1], shapes)


def grown(
    table: Sequence[int], replicas: int, free: Sequence[int], shapes: Shapes
) -> tuple[int, ...] | None:
    """The table of so many replicas: members stay at their place, the rest of `free` goes to new
    ones; None if they are too few. Fewer replicas need nobody."""
    by_place = _by_place(table, table, shapes)
    left = list(free)
    for members in by_place.values():
        missing = max(0, replicas - len(members))
        if missing > len(left):
            return None
        members += left[:missing]
        del left[:missing]
    return _laid(by_place, replicas, shapes)


def _by_place(
    table: Sequence[int], living: Collection[int], shapes: Shapes
) -> dict[tuple[int, int], list[int]]:
    replicas = shapes.replicas(len(table))
    by_place: dict[tuple[int, int], list[int]] = {}
    for rank, member in enumerate(table):
        stage, _, inner = shapes.place(rank, replicas)
        held = by_place.setdefault((stage, inner), [])
        if member in living:
            held.append(member)
    return by_place


def _laid(
    by_place: Mapping[tuple[int, int], Sequence[int]], replicas: int, shapes: Shapes
) -> tuple[int, ...]:
    places = (shapes.place(rank, replicas) for rank in range(shapes.world(replicas)))
    return tuple(by_place[stage, inner][replica] for stage, replica, inner in places)
