"""Nodes of a run that are not on the machine of its conductor."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Console

from meshwright.base.errors import InputError
from meshwright.conduct.hosts import this_machine
from meshwright.conduct.limits import limits
from meshwright.conduct.rundir import ADDRESS_FILE
from meshwright.plan.job import Job, load_job


def parse_here(job: Job, text: str | None) -> frozenset[int] | None:
    """The nodes of `0,2` or `none`; None, which is all of them, where nothing is given. Raises
    InputError for what is no node of `job`."""
    if text is None:
        return None
    if not job.resilience.survives:
        raise InputError(
            f"--nodes-here {text}: this job runs on one machine; "
            "set resilience.redundancy to have it run on several"
        )
    parts = [part.strip() for part in text.split(",")] if text.strip() != "none" else []
    names = [str(node) for node in range(job.cluster.nodes)]
    for part in parts:
        if part not in names:
            raise InputError(
                f"--nodes-here {text}: cluster.nodes = {job.cluster.nodes}; "
                f"name some of {','.join(names)}, or none"
            )
    return frozenset(map(int, parts))


def here_again(run: Path) -> frozenset[int] | None:
    """The nodes of this machine, for one who goes on with `run` and does not name them: the same as
    before, and none on another machine than before. None: all, as before."""
    try:
        said = json.loads((run / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    if said.get("here") is None:
        return None
    return frozenset(said["here"] if said["machine"] == this_machine() else ())


def tell_elsewhere(run: Path, job: Job, here: frozenset[int] | None, console: Console) -> None:
    """Say how the nodes of other machines are started."""
    away = [] if here is None else sorted(set(range(job.cluster.nodes)) - here)
    for node in away:
        command = f"meshwright job agent {shlex.quote(str(run))} --node {node}"
        line = f"node {node} is started on its machine by: {command}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lease_of(run: Path, node: int) -> float:
    """How long an agent of `run` holds its lease at first, in seconds. Raises InputError where
    there is no such run, or no such node of it."""
    if not (run / ADDRESS_FILE).is_file():
        raise InputError(
            f"{run}: no run that survives losses has begun here; start it by "
            "`meshwright train JOB.toml --run-dir RUN --nodes-here N,...`"
        )
    job = load_job(run / "job.toml")
    if not 0 <= node < job.cluster.nodes:
        most = job.cluster.nodes - 1
        raise InputError(f"--node {node}: {run} has nodes 0 to {most}; name one of them")
    return limits(job.resilience.longest_stall_s).lease_agent_s
