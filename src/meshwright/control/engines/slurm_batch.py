"""What Slurm is given for an attempt: a name, options and a script. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.control.engines.attempt_folder import LEAD, Folder, Order
from meshwright.control.engines.engine import ClusterOrder, RunOrder
from meshwright.control.engines.slurm_words import Node, gres_name

MODULE = "meshwright.control.engines.attempt_process"


def node_numbers(run: RunOrder) -> list[int]:
    """The nodes of an attempt, in order."""
    return sorted({node for node, _ in run.chips})


def prefix(cluster: ClusterOrder) -> str:
    """How the names of all jobs of a cluster begin."""
    return f"mw-{cluster.id}-"


def job_name(cluster: ClusterOrder, run: RunOrder) -> str:
    """By which a job is found again. Of one name, Slurm runs one at a time (`singleton`)."""
    return f"{prefix(cluster)}{run.job_id}"


def batch_script(order: Order, folder: Folder) -> str:
    """One that trains, or one that is an agent on each node of the job."""
    words = [order.python, "-m", MODULE, "agent" if order.survives else LEAD, str(folder.path)]
    command = shlex.join(words)
    if order.survives:
        # A node that dies takes no other with it, not even the first, which this runs on: what
        # srun has started lives on without it, though its streams do not.
        size = '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
        keep = "--no-kill --kill-on-bad-exit=0 --wait=0 --output=/dev/null --error=/dev/null"
        cpus = '--ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none'
        command = f"srun {size} {cpus} \\\n  {keep} \\\n  {command}"
    return f"#!/bin/sh\nexec {command}\n"


def sbatch_options(
    cluster: ClusterOrder, run: RunOrder, order: Order, folder: Folder, nodes: Sequence[Node]
) -> list[str]:
    """A gang: all of its nodes, spares too, or none."""
    most = max(order.chips)
    share = max(1, min(node.cpus for node in nodes) * most // cluster.chips_per_node)
    options = [
        f"--job-name={job_name(cluster, run)}",
        f"--comment=attempt={run.attempt}",
        f"--nodes={len(order.nodes)}",
        f"--nodelist={','.join(order.nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={share}",
        "--dependency=singleton",
        "--requeue",
        "--open-mode=append",
        f"--output={folder.path / 'slurm.log'}",
        f"--chdir={folder.path}",
    ]
    if cluster.spec.partition:
        options.append(f"--partition={cluster.spec.partition}")
    if len(order.nodes) > 1:
        options.append("--no-kill")
    if name := gres_name(nodes[0].gres):
        options.append(f"--gres={name}:{most}")
    return options
