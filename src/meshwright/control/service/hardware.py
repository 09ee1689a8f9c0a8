"""`DescribeClusterHardware`: nodes, chips and links as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from sqlalchemy import Connection
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConfigError, NotFoundError
from meshwright.catalog.hardware import Level
from meshwright.catalog.load import cluster as catalog_cluster
from meshwright.control.figures import CHIP_FIGURES
from meshwright.control.reconcile import orders
from meshwright.control.samples import Recorder
from meshwright.control.service import clusters
from meshwright.control.service.telemetry import as_figures
from meshwright.control.spec import ClusterSpec
from meshwright.control.views import ChipView, HardwareView, LinkView, NodeView, at
from meshwright.control.words import Health, JobStatus, NodeStatus

Ends = tuple[int, int]
_WORST = (Health.FAILED, Health.UNKNOWN, Health.DEGRADED, Health.HEALTHY)


def describe(
    connection: Connection,
    cluster: str,
    recorder: Recorder | None,
    node: int | None = None,
    chip: int | None = None,
    brief: bool = False,
) -> HardwareView:
    """Of all nodes of a cluster or of one, all chips or that of one number, with its links.

    `brief`: without figures and links, which are nine tenths of it. Raises NotFoundError.
    """
    row = clusters.row_of(connection, cluster)
    if chip is not None and chip >= row["chips_per_node"]:
        raise NotFoundError(f"chip {chip}: nodes have chips 0 to {row['chips_per_node'] - 1}")
    rows = [clusters.node_of(connection, row, node)] if node is not None else None
    rows = rows or orders.node_rows(connection, row["id"])
    holders = _holders(connection, row["id"])
    spec = ClusterSpec.model_validate(row["spec"])
    return HardwareView(
        cluster=row["id"],
        sampled_at=at(recorder.latest_s if recorder and recorder.latest_s else None),
        units={figure.name: figure.unit for figure in CHIP_FIGURES},
        nodes=[_node(found, row, spec, holders, recorder, chip, brief) for found in rows],
        links=[
            link
            for link in (() if brief else _links(spec, row["chips_per_node"], rows))
            if chip is None or any(end[1] == chip for end in link.ends)
        ],
    )


def _node(
    node: RowMapping,
    cluster: RowMapping,
    spec: ClusterSpec,
    holders: Mapping[Ends, tuple[str, int | None]],
    recorder: Recorder | None,
    wanted: int | None,
    brief: bool,
) -> NodeView:
    number = node["number"]
    latest = None if recorder is None else recorder.latest
    chips = []
    for chip, health in enumerate(node["chips"]):
        if wanted not in (None, chip):
            continue
        place = number * cluster["chips_per_node"] + chip
        job, rank = holders.get((number, chip), (None, None))
        row = latest[place] if latest is not None and place < len(latest) else None
        chips.append(
            ChipView(
                chip=chip,
                health=Health(health),
                links=Health(node["links"][chip]) if chip < len(node["links"]) else Health.UNKNOWN,
                spare=number >= spec.nodes,
                job=job,
                rank=rank,
                figures={} if brief else as_figures(row),
            )
        )
    return NodeView(
        number=number,
        name=f"{cluster['name']}-{number}",
        status=NodeStatus(node["status"]),
        health=Health(node["health"]),
        message=node["message"],
        address=node["address"],
        firmware=node["firmware"],
        software=node["software"],
        drained=bool(node["drained"]),
        seen_at=at(node["seen_s"]),
        chips=chips,
    )


def _holders(connection: Connection, cluster: str) -> dict[Ends, tuple[str, int | None]]:
    """By (node, chip): which job holds it, and as which rank, by the scheduler's own record."""
    found: dict[Ends, tuple[str, int | None]] = {}
    for job in clusters.active_jobs(connection, cluster):
        if JobStatus(job["status"]).holds_chips:
            for index, (node, chip) in enumerate(job["placement"]):
                found[node, chip] = (job["id"], index if index < job["ranks"] else None)
    return found


def _links(
    spec: ClusterSpec, chips_per_node: int, rows: Sequence[RowMapping]
) -> Iterator[LinkView]:
    chips = spec.nodes * chips_per_node
    health = {
        (row["number"], chip): Health(word)
        for row in rows
        for chip, word in enumerate(row["links"])
    }
    for level, link_gb_s, pairs in wiring(spec.engine, spec.instance, chips):
        for one, other in pairs:
            ends = (divmod(one, chips_per_node), divmod(other, chips_per_node))
            if ends[0] in health and ends[1] in health:
                worst = min((health[end] for end in ends), key=_WORST.index)
                yield LinkView(ends=ends, level=level, bandwidth_gb_s=link_gb_s, health=worst)


@lru_cache(maxsize=32)
def wiring(
    engine: str, instance: str, chips: int
) -> tuple[tuple[str, float, tuple[Ends, ...]], ...]:
    """By level of network with links of its own (tori): its name, GB/s of a link, and the numbers
    of the chips that each joins. Nothing for an instance that the catalogue does not know."""
    if engine == "local":
        return ()
    try:
        found = catalog_cluster(f"{instance}:{chips}")
    except ConfigError:
        return ()
    levels = []
    inner = 1
    for level in found.levels:
        if level.shape:
            pairs = tuple(_torus(level, inner, chips))
            levels.append((level.name, level.link_bytes_s / 1e9, pairs))
        inner = level.size or chips
    return tuple(levels)


def _torus(level: Level, inner: int, chips: int) -> Iterator[Ends]:
    """Neighbours along each dimension in each unit of a level; the last dimension is between
    adjacent numbers, and a step of it is `inner` chips."""
    shape, unit = level.shape, inner * prod(level.shape)
    strides = [inner * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for base in range(0, chips - unit + 1, unit):
        for inside in range(inner):
            for place in product(*(range(extent) for extent in shape)):
                here = sum(step * stride for step, stride in zip(place, strides, strict=True))
                for axis, extent in enumerate(shape):
                    last = place[axis] == extent - 1
                    if extent < 2 or (last and not level.wraps[axis]):
                        continue
                    there = here - place[axis] * strides[axis] * last + strides[axis] * (not last)
                    yield base + inside + here, base + inside + there
