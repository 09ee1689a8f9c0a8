"""`meshwright cluster inspect, benchmark, report, emit`: what people have scripts for elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwright.base.config import parse, read_toml
from meshwright.base.errors import ConfigError, InputError, RunError, did_you_mean
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.cli.service import Url, as_part, await_operation, reach, table
from meshwright.control.client import Client

Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name or id.", callback=as_part)]

_SLOW = 0.9  # of the median of its like
_HOT_C = 15.0  # above the median of its like
_FATAL = ("ecc_uncorrected", "errors")  # counters that should stand at zero
_TOLD = ("chip_health", "link_health", "node_status", "fault", "engine_trouble")


def add_to(group: typer.Typer) -> None:
    """Add these commands to a group that has others."""
    for name, command in (
        ("inspect", inspect),
        ("benchmark", benchmark),
        ("report", report),
        ("emit", emit),
    ):
        group.command(name)(command)


def inspect(cluster: Cluster, url: Url = None, as_json: AsJson = False) -> int:
    """Look over nodes, chips and links; exit 1 if something is not as it should be."""
    with reach(url) as client:
        found = list(_wrong(client.get(f"/clusters/{cluster}/hardware")))
    if as_json:
        print_json({"ok": not found, "findings": found})
    elif found:
        columns = ("where", "what")
        Console().print(table(columns, [[one[column] for column in columns] for one in found]))
    else:
        Console().print(f"{cluster}: nothing is wrong")
    return 1 if found else 0


def benchmark(cluster: Cluster, url: Url = None, as_json: AsJson = False) -> int:
    """Run the self-test on every node, one after the other; exit 1 if a node fails it, or reaches
    less than nine tenths of the median in one of its figures."""
    with reach(url) as client:
        count = client.get(f"/clusters/{cluster}")["nodes"]
        nodes = [_check_node(client, cluster, number) for number in range(count)]
    rates = [name for name in _names(nodes) if _is_rate(name)]
    middle = {name: median(_values(nodes, name)) for name in rates}
    for node in nodes:
        node["slow"] = [
            name
            for name in rates
            if name in node["figures"] and node["figures"][name] < _SLOW * middle[name]
        ]
    bad = [node for node in nodes if node["error"] or node["slow"]]
    if as_json:
        print_json({"ok": not bad, "nodes": nodes, "median": middle})
    else:
        _show_benchmark(nodes, [name for name in rates if not name.endswith("_min")])
    return 1 if bad else 0


def _show_benchmark(nodes: list[dict[str, Any]], rates: list[str]) -> None:
    rows = []
    for node in nodes:
        verdict = "failed" if node["error"] else "slow" if node["slow"] else "ok"
        rows.append((node["node"], *(node["figures"].get(name) for name in rates), verdict))
    titles = [name.removesuffix("_median").replace("_", " ") for name in rates]
    console = Console()
    console.print(table(("node", *titles, "verdict"), rows))
    for node in nodes:
        said = node["error"] or ", ".join(node["slow"])
        if said:
            line = f"node {node['node']}: {said}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def report(cluster: Cluster, url: Url = None, as_json: AsJson = False) -> int:
    """Faults, what they did to chips and nodes, and what jobs went through."""
    with reach(url) as client:
        described = client.get(f"/clusters/{cluster}")
        faults = list(client.items(f"/clusters/{cluster}/faults"))
        events = list(_all_events(client, cluster))
        jobs = list(client.items("/jobs", cluster=cluster))
    document = {
        "cluster": described["name"],
        "status": described["status"],
        "healthy_chips": described["healthy_chips"],
        "chips": described["chips"],
        "faults": faults,
        "events": dict(Counter(event["kind"] for event in events if event["kind"] in _TOLD)),
        "by_node": _by_node(events),
        "jobs": [_job(job, events) for job in jobs],
    }
    if as_json:
        print_json(document)
    else:
        _show_report(document)
    return 0


def emit(
    form: Annotated[
        str, typer.Argument(metavar="FORMAT", help="hyperpod, parallelcluster or jobset.")
    ],
    cluster: Annotated[str | None, typer.Argument(metavar="[CLUSTER]")] = None,
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Instead of a cluster of the service.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("cluster-out"),
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Write what HyperPod, ParallelCluster or Kubernetes makes such a cluster from."""
    from meshwright.control.emit import EMITTERS
    from meshwright.control.spec import ClusterSpec

    if form not in EMITTERS:
        hint = did_you_mean(form, EMITTERS) or f"; known: {', '.join(EMITTERS)}"
        raise ConfigError("FORMAT", form, f"no such format{hint}")
    if (cluster is None) == (spec is None):
        raise InputError("cluster emit: name a cluster of the service, or give --spec FILE.toml")
    if spec is not None:
        wanted = parse(ClusterSpec, read_toml(spec))
    else:
        with reach(url) as client:
            wanted = ClusterSpec.model_validate(client.get(f"/clusters/{cluster}")["spec"])
    files = EMITTERS[form](wanted)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if as_json:
        print_json({"folder": str(out), "files": sorted(files)})
    else:
        for name in sorted(files):
            typer.echo(out / name)
    return 0


def _wrong(hardware: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """What is not as it should be."""
    chips = [(node, chip) for node in hardware["nodes"] for chip in node["chips"]]
    usual = _usual_c([chip for _, chip in chips])
    for node in hardware["nodes"]:
        if node["status"] != "RUNNING" or node["message"]:
            what = f"{node['status']} {node['message']}".strip()
            yield {"where": f"node {node['number']}", "what": what}
    for node, chip in chips:
        where = f"chip {node['number']}.{chip['chip']}"
        if chip["health"] != "HEALTHY":
            yield {"where": where, "what": f"is {chip['health']}"}
        if chip["links"] in ("DEGRADED", "FAILED"):
            yield {"where": where, "what": f"its links are {chip['links']}"}
        figures = chip["figures"]
        for name in _FATAL:
            if figures[name]:
                yield {"where": where, "what": f"{name} = {figures[name]:g}"}
        if figures["throttled"]:
            yield {"where": where, "what": f"held back {100 * figures['throttled']:.0f} % of time"}
        heat, like = figures["temperature_c"], usual.get(chip["job"])
        if heat and like and heat > like + _HOT_C:
            yield {"where": where, "what": f"{heat:.0f} C, and its like {like:.0f} C"}


def _usual_c(chips: list[dict[str, Any]]) -> dict[str | None, float]:
    """The median temperature of the chips of each job, and of those that have none."""
    found: dict[str | None, list[float]] = {}
    for chip in chips:
        if heat := chip["figures"]["temperature_c"]:
            found.setdefault(chip["job"], []).append(heat)
    return {job: median(heats) for job, heats in found.items()}


def _check_node(client: Client, cluster: str, number: int) -> dict[str, Any]:
    log_console().print(f"node {number}", highlight=False)
    path = f"/clusters/{cluster}/nodes/{number}/action"
    operation = client.send("POST", path, {"action": "check"})["operation"]
    error = ""
    try:
        operation = await_operation(client, operation, log_console())
    except RunError as failure:
        error = str(failure)
        operation = client.get(f"/operations/{operation['id']}")
    return {"node": number, "figures": operation["figures"], "error": error}


def _names(nodes: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for node in nodes for name in node["figures"]))


def _values(nodes: list[dict[str, Any]], name: str) -> list[float]:
    return [node["figures"][name] for node in nodes if name in node["figures"]]


def _is_rate(name: str) -> bool:
    """More of it is better: the units stand last in a name, or before how it was summed up."""
    return any(unit in name for unit in ("flops", "gb_s", "tb_s"))


def _all_events(client: Client, cluster: str) -> Iterator[dict[str, Any]]:
    after = 0
    while page := client.get("/events", after=after, limit=500, cluster=cluster):
        yield from page
        after = page[-1]["seq"]


def _by_node(events: list[dict[str, Any]]) -> dict[str, int]:
    counted = Counter(
        str(event["node"])
        for event in events
        if event["kind"] in _TOLD and event["node"] is not None
    )
    return dict(counted.most_common())


def _job(job: Mapping[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    own = Counter(event["kind"] for event in events if event["job"] == job["id"])
    return {
        "id": job["id"],
        "name": job["name"],
        "status": job["status"],
        "restarts": job["restarts"],
        "takeovers": own["run_takeover_done"],
        "ranks_lost": own["run_rank_lost"],
        "message": job["message"],
    }


def _show_report(found: dict[str, Any]) -> None:
    console = Console()
    healthy = f"{found['healthy_chips']} of {found['chips']} chips are healthy"
    console.print(f"{found['cluster']} is {found['status']}; {healthy}", highlight=False)
    columns: tuple[str, ...] = ("id", "kind", "node", "chip", "severity", "status", "since")
    if found["faults"]:
        console.print(table(columns, [[one[name] for name in columns] for one in found["faults"]]))
    if found["by_node"]:
        rows = list(found["by_node"].items())
        console.print(table(("node", "changes and faults"), rows))
    columns = ("id", "name", "status", "restarts", "takeovers", "ranks_lost", "message")
    if found["jobs"]:
        console.print(table(columns, [[one[name] for name in columns] for one in found["jobs"]]))
