"""The same job on another number of ranks, by its data-parallel axes."""

from __future__ import annotations

from fractions import Fraction

from meshwright.base.errors import ConfigError
from meshwright.plan.job import Job, resolve_job


def rescaled(job: Job, world: int) -> Job:
    """`job` on `world` ranks: replicas grow or shrink, or shards where there are no replicas, and
    the global batch with them, so that each rank does the same work.

    Raises ConfigError where neither dp_replicate nor dp_shard can make up the difference.
    """
    layout = job.layout
    factor = Fraction(world, layout.world)
    axis = "dp_shard" if layout.dp_shard > 1 and layout.dp_replicate == 1 else "dp_replicate"
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    for name in (axis, *sizes):
        size = sizes[name] * factor
        if size.denominator == 1:
            return _with(job, name, int(size), int(job.data.global_batch * factor), world)
    rest = layout.cp * layout.tp * layout.pp
    raise ConfigError(
        "--world",
        world,
        f"neither layout.dp_replicate = {layout.dp_replicate} nor layout.dp_shard = "
        f"{layout.dp_shard} can be scaled to it from {layout.world} ranks; use a multiple of "
        f"{rest} (cp x tp x pp), or set both for it",
    )


def _with(job: Job, axis: str, size: int, batch: int, world: int) -> Job:
    tables = job.model_dump(exclude_defaults=True)
    tables["layout"] = {**tables.get("layout", {}), axis: size}
    tables["data"]["global_batch"] = batch
    tables["cluster"] = {**tables.get("cluster", {}), "ref": f"local:{world}"}
    return resolve_job(tables)
