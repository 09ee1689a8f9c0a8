"""Definitions of a cluster for those who rent machines out: pure functions of a ClusterSpec.

Each gives the files by name. What only the account knows (roles, subnets, images) is a placeholder,
which the file `fill-in.txt` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.control.emit.hyperpod import hyperpod
from meshwright.control.emit.jobset import jobset
from meshwright.control.emit.parallelcluster import parallelcluster
from meshwright.control.spec import ClusterSpec

EMITTERS: Mapping[str, Callable[[ClusterSpec], dict[str, str]]] = {
    "hyperpod": hyperpod,
    "parallelcluster": parallelcluster,
    "jobset": jobset,
}
