"""`meshwright cluster`: clusters of the service, their hardware, faults and operations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwright.base.config import toml_value
from meshwright.base.errors import ConfigError
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.cli.service import (
    Url,
    Waiting,
    Watching,
    as_part,
    await_operation,
    reach,
    show,
    table,
)
from meshwright.control.client import Client
from meshwright.control.words import FaultKind, NodeAction

# Of the figures of a chip: what the column is called, what they are divided by.
_SHOWN = {
    "utilization": ("busy %", 0.01),
    "temperature_c": ("C", 1.0),
    "power_w": ("W", 1.0),
    "memory_used_bytes": ("GB", 1e9),
    "ecc_corrected": ("ecc", 1.0),
    "link_errors": ("link err", 1.0),
}

cluster = typer.Typer(help="Clusters of the service.", no_args_is_help=True)

Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name or id.", callback=as_part)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the request; a.b=c nests."),
]


@cluster.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Letters, digits and dashes.")],
    engine: Annotated[
        str, typer.Option(help="simulated, local, slurm or kubernetes.")
    ] = "simulated",
    instance: Annotated[
        str | None, typer.Option(help="Of the catalogue; trn2u where none is given.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Without those of the spares.")] = None,
    chips_per_node: Annotated[int | None, typer.Option()] = None,
    spares: Annotated[int | None, typer.Option(help="1 to 4 for each 64 chips.")] = None,
    partition: Annotated[str | None, typer.Option(help="Of Slurm.")] = None,
    sets: Sets = None,
    wait: Waiting = True,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Make a cluster: by default 64 simulated chips, 4 nodes x 16 in a torus."""
    if engine == "local":  # one machine is one node
        nodes, instance = nodes or 1, instance or "local"
    given = {"name": name, "engine": engine, "instance": instance, "nodes": nodes}
    given |= {"chips_per_node": chips_per_node, "spares": spares, "partition": partition}
    body = {key: value for key, value in given.items() if value is not None}
    for text in sets or []:
        _put(body, text)
    with reach(url) as client:
        accepted = client.send("POST", "/clusters", body)
        return _taken_on(client, accepted, wait, as_json)


@cluster.command("list")
def listed(url: Url = None, watch: Watching = False, as_json: AsJson = False) -> int:
    """All clusters."""
    with reach(url) as client:
        if as_json:
            print_json(list(client.items("/clusters")))
        else:
            show(lambda: _clusters(list(client.items("/clusters"))), watch)
    return 0


@cluster.command("describe")
def describe(
    cluster: Cluster, url: Url = None, watch: Watching = False, as_json: AsJson = False
) -> int:
    """One cluster: its state, what its self-test measured, its jobs."""
    with reach(url) as client:
        if as_json:
            print_json(client.get(f"/clusters/{cluster}"))
        else:
            show(lambda: _details(client.get(f"/clusters/{cluster}")), watch)
    return 0


@cluster.command("hardware")
def hardware(
    cluster: Cluster,
    node: Annotated[int | None, typer.Option(help="This one alone.")] = None,
    url: Url = None,
    watch: Watching = False,
    as_json: AsJson = False,
) -> int:
    """Nodes and chips with their figures."""
    with reach(url) as client:

        def found() -> Any:
            return client.get(f"/clusters/{cluster}/hardware", node=node)

        if as_json:
            print_json(found())
        else:
            show(lambda: _hardware(found()), watch)
    return 0


@cluster.command("update")
def update(
    cluster: Cluster,
    nodes: Annotated[int | None, typer.Option()] = None,
    spares: Annotated[int | None, typer.Option()] = None,
    sets: Sets = None,
    wait: Waiting = True,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Change how many nodes or spares it has, or its labels."""
    given: dict[str, Any] = {"nodes": nodes, "spares": spares}
    body = {key: value for key, value in given.items() if value is not None}
    for text in sets or []:
        _put(body, text)
    if not body:
        fix = "say what changes: --nodes N, --spares N or --set labels.KEY=VALUE"
        raise ConfigError("cluster update", cluster, fix)
    with reach(url) as client:
        accepted = client.send("PATCH", f"/clusters/{cluster}", body)
        return _taken_on(client, accepted, wait, as_json)


@cluster.command("delete")
def delete(
    clusters: Annotated[list[str], typer.Argument(metavar="CLUSTER...")],
    wait: Waiting = True,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """End clusters that have no jobs."""
    with reach(url) as client:
        results = client.send("POST", "/clusters:bulk", {"action": "delete", "clusters": clusters})
        if wait:
            for result in results:
                if result["ok"]:
                    operation = client.get(f"/operations/{result['operation']}")
                    await_operation(client, operation, log_console())
    if as_json:
        print_json(results)
    for result in results:
        if not result["ok"]:
            log_console().print(result["error"], markup=False, highlight=False, soft_wrap=True)
    return 0 if all(result["ok"] for result in results) else 1


@cluster.command("node")
def node(
    cluster: Cluster,
    node: Annotated[int, typer.Argument(metavar="NODE", help="Its number.")],
    action: Annotated[NodeAction, typer.Argument(help="What to do with it.")],
    wait: Waiting = True,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Drain, resume, reboot, replace or check a node."""
    with reach(url) as client:
        path = f"/clusters/{cluster}/nodes/{node}/action"
        accepted = client.send("POST", path, {"action": action.value})
        return _taken_on(client, accepted, wait, as_json)


@cluster.command("fault")
def fault(
    cluster: Cluster,
    kind: Annotated[FaultKind, typer.Argument(help="What to do to it.")],
    node: Annotated[int, typer.Option(help="Where.")] = 0,
    chip: Annotated[int | None, typer.Option(help="Within the node; else all of it.")] = None,
    severity: Annotated[float | None, typer.Option(help="How much; depends on the kind.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Until it ends by itself.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Inject a fault."""
    given: dict[str, Any] = {"kind": kind.value, "node": node, "chip": chip}
    given |= {"severity": severity, "seconds": seconds}
    body = {key: value for key, value in given.items() if value is not None}
    with reach(url) as client:
        found = client.send("POST", f"/clusters/{cluster}/faults", body)
    _print(found, as_json, f"{found['id']}: {found['kind']} {found['status']}")
    return 0


@cluster.command("clear")
def clear(
    cluster: Cluster,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help="Its id.", callback=as_part)],
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """End a fault."""
    with reach(url) as client:
        found = client.send("DELETE", f"/clusters/{cluster}/faults/{fault}")
    _print(found, as_json, f"{found['id']}: {found['kind']} {found['status']}")
    return 0


@cluster.command("faults")
def faults(cluster: Cluster, url: Url = None, as_json: AsJson = False) -> int:
    """Faults that were injected."""
    with reach(url) as client:
        found = list(client.items(f"/clusters/{cluster}/faults"))
    if as_json:
        print_json(found)
        return 0
    columns = ("id", "kind", "node", "chip", "severity", "status", "since", "message")
    Console().print(table(columns, [[one[column] for column in columns] for one in found]))
    return 0


@cluster.command("events")
def events(
    cluster: Annotated[str | None, typer.Argument(metavar="[CLUSTER]")] = None,
    after: Annotated[int | None, typer.Option(help="Number of the last event seen.")] = None,
    watch: Watching = False,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """What has happened; with --watch, what happens. With --json --watch a document a line."""
    with reach(url) as client:
        if watch:
            for event in client.events(after, cluster=cluster):
                _event(event, as_json)
        newest = after is None  # the last ones, if it is not said from where on
        found = client.get("/events", after=after or 0, limit=500, cluster=cluster, newest=newest)
    if as_json:
        print_json(found)
    else:
        for event in found:
            _event(event, False)
    return 0


@cluster.command("metrics")
def metrics(
    cluster: Cluster,
    figure: Annotated[str, typer.Argument(help="As `cluster hardware --json` names them.")],
    node: Annotated[int | None, typer.Option()] = None,
    chip: Annotated[int | None, typer.Option(help="Within the node.")] = None,
    grain: Annotated[int, typer.Option(help="1, 60 or 3600 seconds.")] = 60,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """The history of one figure: of its chips, lowest, mean and highest."""
    asked = {"figure": figure, "node": node, "chip": chip, "grain_s": grain}
    with reach(url) as client:
        found = client.get(f"/clusters/{cluster}/metrics", **asked)
    if as_json:
        print_json(found)
    else:
        Console().print(table(("time", "low", "mean", "high"), list(_history(found))))
    return 0


@cluster.command("operations")
def operations(
    operation: Annotated[
        str | None, typer.Argument(metavar="[OPERATION]", callback=as_part)
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Long work on clusters; of one, its log."""
    with reach(url) as client:
        if operation is not None:
            lines = client.get(f"/operations/{operation}/log")
            found: Any = {**client.get(f"/operations/{operation}"), "log": lines}
        else:
            found = list(client.items("/operations"))
    if as_json:
        print_json(found)
    elif isinstance(found, dict):
        rows = [(line["at"][:19], line["phase"], line["line"]) for line in found["log"]]
        Console().print(table(("at", "phase", "line"), rows))
        _print(found, False, f"{found['id']}: {found['kind']} {found['status']} {found['error']}")
    else:
        columns = ("id", "kind", "cluster", "status", "phase", "progress", "error")
        Console().print(table(columns, [[one[column] for column in columns] for one in found]))
    return 0


def _history(found: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """For each time: over all chips that are known."""
    for place, begun in enumerate(found["times"]):
        parts = {
            name: [line[place] for line in found[name] if line[place] is not None]
            for name in ("low", "mean", "high")
        }
        if parts["mean"]:
            mean = sum(parts["mean"]) / len(parts["mean"])
            when = datetime.fromtimestamp(begun).isoformat(" ")
            yield when, min(parts["low"]), mean, max(parts["high"])


def _put(body: dict[str, Any], text: str) -> None:
    """One `a.b=value` into a nested document."""
    dotted, sign, value = text.partition("=")
    if not sign or not all(dotted.split(".")):
        raise ConfigError("--set", text, "write it as key=value, or table.key=value")
    *tables, key = dotted.strip().split(".")
    for name in tables:
        body = body.setdefault(name, {})
        if not isinstance(body, dict):
            raise ConfigError("--set", text, f"{name} is a single value here, not a table")
    body[key] = toml_value(value)


def _taken_on(client: Client, accepted: dict[str, Any], wait: bool, as_json: bool) -> int:
    """Wait for the operation if that is wanted, then show the cluster."""
    if wait:
        done = await_operation(client, accepted["operation"], log_console())
        accepted = {"operation": done, "cluster": accepted["cluster"]}
        if done["kind"] != "delete":
            accepted["cluster"] = client.get(f"/clusters/{accepted['cluster']['id']}")
    if as_json:
        print_json(accepted)
    else:
        Console().print(_details(accepted["cluster"]))
    return 0


def _print(document: Any, as_json: bool, line: str) -> None:
    if as_json:
        print_json(document)
    else:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


def _event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event))
        return
    where = " ".join(
        f"{key} {event[key]}"
        for key in ("cluster", "job", "operation", "node", "chip")
        if event[key] is not None
    )
    words = ", ".join(f"{key}={value}" for key, value in event["data"].items() if value != "")
    typer.echo(f"{event['seq']:>6} {event['at'][:19]} {event['kind']:<20} {where}  {words}"[:400])


def _clusters(found: list[dict[str, Any]]) -> Any:
    columns = ("name", "id", "engine", "status", "chips", "healthy", "in use", "jobs", "message")
    rows = [
        (
            one["name"],
            one["id"],
            one["engine"],
            one["status"],
            one["chips"],
            one["healthy_chips"],
            one["chips_in_use"],
            len(one["jobs"]),
            one["message"],
        )
        for one in found
    ]
    return table(columns, rows)


def _details(one: dict[str, Any]) -> Any:
    rows = [(key, one[key]) for key in ("id", "name", "status", "message", "engine")]
    nodes = f"{one['nodes']} x {one['chips_per_node']}"
    chips = f"{one['chips']} ({one['healthy_chips']} healthy, {one['chips_in_use']} in use, "
    rows += [("nodes", nodes), ("chips", chips + f"{one['spares']} spares)")]
    rows += [("jobs", ", ".join(one["jobs"]) or None)]
    rows += [(key, value) for key, value in one["figures"].items()]
    return table(("", ""), [row for row in rows if row[1] not in ("", None)])


def _hardware(found: dict[str, Any]) -> Any:
    rows = [
        (
            f"{node['number']}.{chip['chip']}",
            _state(node, chip),
            chip["job"],
            "spare" if chip["spare"] else chip["rank"],
            *(_figure(chip, name, unit) for name, (_, unit) in _SHOWN.items()),
        )
        for node in found["nodes"]
        for chip in node["chips"]
    ]
    titles = [title for title, _ in _SHOWN.values()]
    return table(("chip", "state", "job", "rank", *titles), rows)


def _state(node: dict[str, Any], chip: dict[str, Any]) -> str:
    """What is not as it should be; nothing is said of what is."""
    said = [node["status"]] if node["status"] != "RUNNING" else []
    said += [chip["health"]] if chip["health"] != "HEALTHY" else []
    said += [f"links {chip['links']}"] if chip["links"] in ("DEGRADED", "FAILED") else []
    return ", ".join(said) or "ok"


def _figure(chip: dict[str, Any], name: str, unit: float) -> float | None:
    value = chip["figures"].get(name)
    return None if value is None else round(value / unit, 1)
