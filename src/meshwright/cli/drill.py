"""`meshwright drill`: whether a job survives what may befall it, tried on the job itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwright.base.config import to_toml
from meshwright.base.errors import ConfigError, InputError, RunError, did_you_mean
from meshwright.cli.commits import store_of_run
from meshwright.cli.drill_plan import (
    GAP_STEPS,
    KINDS,
    DrillFault,
    account,
    plan_faults,
    steps_for,
    summary,
)
from meshwright.cli.drill_run import NOTES
from meshwright.cli.kept import Kept
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.conduct.rundir import read_lines
from meshwright.plan.job import Job, load_job

_SPARES = 4  # so that one is warm at each fault, or a whole small node can be replaced


def drill(
    target: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Job file.")],
    override: Overrides = None,
    faults: Annotated[int, typer.Option("--faults", min=1, help="How many.")] = 10,
    seed: Annotated[int, typer.Option("--seed", help="Which.")] = 0,
    kinds: Annotated[
        str | None, typer.Option("--kinds", help=f"Of: {', '.join(KINDS)}; by commas.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder for the two runs; default: none is kept.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a job twice, without faults and with, and compare the weights bit for bit."""
    console = log_console()
    job = drill_job(load_job(target, override), faults)
    every = job.checkpoint.every
    assert every != "auto"  # a drill has set it
    planned = plan_faults(
        faults,
        seed,
        job.layout.world,
        job.cluster.nodes,
        every,
        Kept.of(job).job(job).resilience.redundancy in ("mirror", "shadow", "parity"),
        **({} if kinds is None else {"kinds": parse_kinds(kinds)}),
    )
    with tempfile.TemporaryDirectory() as folder:
        root = keep or Path(folder)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        document = compare(job, planned, root, console)
    if as_json:
        print_json(document)
    else:
        for line in lines(document):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    survived = all(fault["survived"] for fault in document["faults"])
    return 0 if survived and document["bit_identical"] else 1


def parse_kinds(text: str) -> list[str]:
    """The kinds of faults in a list with commas. Raises ConfigError."""
    found = [kind.strip() for kind in text.split(",") if kind.strip()]
    for kind in found:
        if kind not in KINDS:
            raise ConfigError("--kinds", kind, f"no such fault{did_you_mean(kind, KINDS)}")
    if not found:
        raise ConfigError("--kinds", text, f"names no fault; there are {', '.join(KINDS)}")
    return found


def drill_job(job: Job, faults: int) -> Job:
    """`job` with what a drill needs: spares, steps enough, and no end by too many takeovers.

    Raises ConfigError for a job that does not survive losses.
    """
    if not job.resilience.survives:
        raise ConfigError(
            "resilience.redundancy",
            job.resilience.redundancy,
            "a lost rank ends such a run, there is nothing to drill; set it to 'auto'",
        )
    resilience = {"on_no_spare": "wait", "max_takeovers": 10 * faults + 20}
    spares = max(job.cluster.spares, _SPARES)
    steps = max(job.job.steps, steps_for(faults))
    asked = job.checkpoint.every
    every = (
        GAP_STEPS if asked == "auto" else min(asked, GAP_STEPS)
    )  # for faults in the middle of one
    return job.model_copy(
        update={
            # Each of the two runs has a store of its own.
            "checkpoint": job.checkpoint.model_copy(update={"every": every, "store": ""}),
            "job": job.job.model_copy(update={"steps": steps}),
            "cluster": job.cluster.model_copy(update={"spares": spares}),
            "resilience": job.resilience.model_copy(update=resilience),
        }
    )


def compare(
    job: Job, planned: Sequence[DrillFault], root: Path, console: Console
) -> dict[str, Any]:
    """Both runs, in `root`; the document. Raises RunError if either does not reach its end."""
    file = root / "drill.toml"
    file.write_text(to_toml(job.model_dump()))
    console.print(f"a run of {job.job.steps} steps without faults")
    without = play(file, root / "without", [])
    console.print(f"the same with {len(planned)} faults")
    run = play(file, root / "with", planned)
    notes = list(read_lines(run / NOTES))
    metrics_ts = {note["step"]: note["ts"] for note in notes if "step" in note}
    found = account(planned, list(read_lines(run / "events.jsonl")), metrics_ts)
    return summary(found, weights(without) == weights(run))


def play(job: Path, run: Path, planned: Sequence[DrillFault]) -> Path:
    """One run to its end, whatever happens to its conductor. Raises RunError."""
    if run.exists():
        raise InputError(f"{run}: exists already; give another folder with --keep")
    plan = run.with_suffix(".json")
    adopt = False
    while True:
        fields = {"job": str(job), "run": str(run), "faults": [asdict(f) for f in planned]}
        plan.write_text(json.dumps({**fields, "adopt": adopt}))
        command = [sys.executable, "-m", "meshwright.cli.drill_run", str(plan)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return run
        if done.returncode != -signal.SIGKILL:
            said = done.stderr.strip().splitlines()
            raise RunError(f"the drill's run ended: {said[-1] if said else 'it said nothing'}")
        adopt = True


def weights(run: Path) -> dict[str, str]:
    """What the last checkpoint of a run holds, as one hash a tensor."""
    at = store_of_run(run)
    commit = at.head()
    if commit is None:
        raise RunError(f"{run}: left no checkpoint to compare")
    reader = at.open().reader(commit)
    return {name: sha256(reader.read(name).tobytes()).hexdigest() for name in reader.names}


def lines(document: dict[str, Any]) -> list[str]:
    """The document for a person."""
    told = []
    for fault in document["faults"]:
        where = f" in {fault['phase']}" if fault["phase"] else ""
        rank = "" if fault["rank"] is None else f" of rank {fault['rank']}"
        said = f"step {fault['step']}: {fault['kind']}{rank}{where}: "
        if fault["takeover_s"] is not None:
            most = "at most " if fault["kind"] == "corrupt" else ""
            said += (
                f"detected after {most}{_ms(fault['detected_s'])}, taken over after "
                f"{_ms(fault['takeover_s'])}, next commit after {_ms(fault['next_commit_s'])}, "
                f"{fault['lost_steps']} steps lost"
            )
            said += f"; {fault['done']}" if fault["kind"] == "corrupt" else ""
        elif fault["kind"] == "slow":
            after = f"detected after {_ms(fault['detected_s'])}: {fault['done']}"
            said += after if fault["survived"] else "NOT NAMED"
        else:
            said += "nothing to take over" if fault["survived"] else "NOT SURVIVED"
        told.append(said)
    same = "equal, bit for bit," if document["bit_identical"] else "NOT EQUAL"
    told.append(
        f"takeover: median {_ms(document['takeover_p50_s'])}, p95 "
        f"{_ms(document['takeover_p95_s'])}; next commit: p95 "
        f"{_ms(document['next_commit_p95_s'])}; {document['lost_steps']} steps lost"
    )
    told.append(f"weights: {same} to those of the run without faults")
    return told


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
