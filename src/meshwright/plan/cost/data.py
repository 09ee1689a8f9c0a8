"""Seconds of reading the samples of a step from storage."""

from __future__ import annotations

from meshwright.catalog.hardware import Cluster
from meshwright.plan.cost.workload import Workload


def read_seconds(work: Workload, cluster: Cluster) -> float:
    """What a step's samples take where each is read once and all nodes read their share at the
    same time. The next step's are read beside this one's arithmetic, so a step takes the longer."""
    return work.read_bytes / (cluster.nodes * cluster.storage_bytes_s_per_node)
