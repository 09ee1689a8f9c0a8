"""`meshwright job submit, list, ...`: jobs of the service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwright.base.errors import RunError
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.cli.service import Url, Waiting, Watching, as_part, reach, show, table
from meshwright.control.client import Client
from meshwright.plan.job import load_job

Job = Annotated[str, typer.Argument(metavar="JOB", help="Its id.", callback=as_part)]

_FINAL = ("SUCCEEDED", "STOPPED", "FAILED")
_POLL_S = 0.2


def add_to(group: typer.Typer) -> None:
    """Add these commands to a group that has others."""
    for name, command in (
        ("submit", submit),
        ("list", listed),
        ("describe", describe),
        ("explain", explain),
        ("metrics", metrics),
        ("events", events),
        ("logs", logs),
        ("stop", stop),
        ("checkpoints", checkpoints),
    ):
        group.command(name)(command)


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml")],
    cluster: Annotated[str, typer.Option(help="Name or id.")],
    override: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Default: job.name.")] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    max_restarts: Annotated[int, typer.Option(help="After its run was lost.")] = 3,
    wait: Waiting = False,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Have a job trained on a cluster of the service; with --wait, until it has ended."""
    job = load_job(job_file, override)
    body: dict[str, Any] = {"cluster": cluster, "job": job.model_dump(mode="json")}
    body |= {"priority": priority, "max_restarts": max_restarts}
    if name is not None:
        body["name"] = name
    with reach(url) as client:
        found = client.send("POST", "/jobs", body)
        if wait:
            found = _await_end(client, found)
    if as_json:
        print_json(found)
    else:
        line = f"{found['id']}: {found['name']} is {found['status']} {found['message']}"
        Console().print(line.strip(), markup=False, highlight=False, soft_wrap=True)
    if wait and found["status"] == "FAILED":
        raise RunError(f"job {found['id']}: {found['message']}")
    return 0


def listed(
    cluster: Annotated[str | None, typer.Option(help="Of this one alone.")] = None,
    url: Url = None,
    watch: Watching = False,
    as_json: AsJson = False,
) -> int:
    """Jobs of the service."""
    with reach(url) as client:

        def found() -> list[dict[str, Any]]:
            return list(client.items("/jobs", cluster=cluster))

        if as_json:
            print_json(found())
        else:
            show(lambda: _jobs(found()), watch)
    return 0


def describe(job: Job, url: Url = None, watch: Watching = False, as_json: AsJson = False) -> int:
    """One job: where it is, how far, and why."""
    with reach(url) as client:
        if as_json:
            print_json(client.get(f"/jobs/{job}"))
        else:
            show(lambda: _details(client.get(f"/jobs/{job}")), watch)
    return 0


def explain(job: Job, url: Url = None, as_json: AsJson = False) -> int:
    """Why it waits, or where it is."""
    with reach(url) as client:
        found = client.get(f"/jobs/{job}/explain")
    _print(found, as_json, f"{job} {found['sentence']}")
    return 0


def metrics(
    job: Job,
    after: Annotated[int, typer.Option(help="Steps after this one.")] = 0,
    limit: Annotated[int, typer.Option(help="At most so many, evenly spread.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Losses and times of its steps."""
    with reach(url) as client:
        found = client.get(f"/jobs/{job}/metrics", after=after, limit=limit)
    if as_json:
        print_json(found)
        return 0
    columns = ("step", "loss", "tokens_per_s", "step_time_s", "mfu", "grad_norm", "lr")
    rows = [[line.get(column) for column in columns] for line in found]
    Console().print(table(columns, rows))
    return 0


def events(
    job: Job,
    after: Annotated[int, typer.Option(help="Number of the last event seen.")] = 0,
    watch: Watching = False,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """What has happened to it; with --watch, what happens. With --json --watch one a line."""
    with reach(url) as client:
        found = client.get(f"/jobs/{job}/events", after=after, limit=500)
        if as_json and not watch:
            print_json(found)
            return 0
        for event in found:
            _event(event, as_json)
        if watch:
            last = found[-1]["seq"] if found else after
            for event in client.events(last, job=job):
                _event(event, as_json)
    return 0


def logs(
    job: Job,
    name: Annotated[str | None, typer.Option(help="Of the log; the first by default.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """The end of one of its logs; the names of all on stderr."""
    with reach(url) as client:
        found = client.get(f"/jobs/{job}/logs", name=name)
    if not as_json:
        names = ", ".join(found["names"]) or "none yet"
        log_console().print(f"logs: {names}", markup=False, highlight=False, soft_wrap=True)
    _print(found, as_json, found["text"])
    return 0


def stop(job: Job, wait: Waiting = True, url: Url = None, as_json: AsJson = False) -> int:
    """Have a job save and end."""
    with reach(url) as client:
        found = client.send("POST", f"/jobs/{job}/stop")
        if wait:
            found = _await_end(client, found)
    _print(found, as_json, f"{job} is {found['status']} at step {found['step']}")
    return 0


def checkpoints(job: Job, url: Url = None, as_json: AsJson = False) -> int:
    """The commits of its state."""
    with reach(url) as client:
        found = client.get(f"/jobs/{job}/checkpoints")
    if as_json:
        print_json(found)
        return 0
    columns = ("step", "id", "branch", "depth", "created_at", "encrypted")
    Console().print(table(columns, [[one[column] for column in columns] for one in found]))
    return 0


def _await_end(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    said = ""
    while job["status"] not in _FINAL:
        time.sleep(_POLL_S)
        job = client.get(f"/jobs/{job['id']}")
        line = f"{job['status']} step {job['step']} of {job['steps']} {job['message']}".strip()
        if line != said:
            log_console().print(line, markup=False, highlight=False, soft_wrap=True)
            said = line
    return job


def _print(document: Any, as_json: bool, text: str) -> None:
    if as_json:
        print_json(document)
    else:
        typer.echo(text)


def _event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event))
        return
    words = ", ".join(f"{key}={value}" for key, value in event["data"].items() if value != "")
    typer.echo(f"{event['seq']:>6} {event['at'][:19]} {event['kind']:<24} {words}"[:400])


def _jobs(found: list[dict[str, Any]]) -> Any:
    columns = ("id", "name", "status", "step", "loss", "tokens/s", "chips", "layout", "message")
    rows = [
        (
            one["id"],
            one["name"],
            one["status"],
            f"{one['step']}/{one['steps']}",
            one["loss"],
            one["tokens_per_s"],
            one["ranks"] + one["spares"],
            one["layout"],
            one["message"],
        )
        for one in found
    ]
    return table(columns, rows)


def _details(one: dict[str, Any]) -> Any:
    left_out = ("job", "placement", "labels", "stop_asked")
    rows = [
        (key, value)
        for key, value in one.items()
        if key not in left_out and value not in (None, "")
    ]
    return table(("", ""), rows)
