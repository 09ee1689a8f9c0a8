"""Answers of the planner as text for a person."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.cli.plan_encoder import show_encoder, show_parts
from meshwright.plan.explain import TITLES
from meshwright.plan.search_question import Question

GIB = 2.0**30
SHOWN = 0.005  # parts of a step below this share are left out


def show_answer(answer: dict[str, Any], question: Question) -> None:
    """What `plan` found."""
    console = Console(width=120, highlight=False)
    best = answer["best"]
    spec = question.spec
    active = f", {spec.active_params / 1e9:.1f} B active" if spec.n_experts else ""
    if answer["encoder"]:
        show_parts(answer["encoder"])
    typer.echo(
        f"{spec.params / 1e9:.1f} B parameters{active} on {answer['cluster']} "
        f"({question.cluster.title}); {answer['framework']}, {question.precision}, "
        f"sequences of {question.seq_len}, batch of {question.global_batch}; "
        f"{answer['legal_layouts']:,} legal layouts"
    )
    console.print(_layouts(best))
    show_details(best[0])
    typer.echo(f"bound by: {answer['bound']}")
    _show_changes(answer["single_changes"])
    _show_run(answer["run"])
    order = " < ".join(answer["mapping"]["order"])
    typer.echo(f"ranks on chips, innermost first: {order}" if order else "one chip")
    if answer["front"]:
        console.print(_front(answer["front"]))
    if answer["why"]:
        show_comparison(answer["why"])
    if answer["scaling"]:
        console.print(_curve(answer["scaling"]))
        typer.echo("scaling: " + answer["scaling"]["reason"])
    if answer["encoder"]:
        show_encoder(answer["encoder"])
    if answer["written"]:
        _show_written(answer["written"], best[0]["name"])
    show_assumptions(best[0])


def _layouts(best: list[dict[str, Any]]) -> Table:
    table = Table("layout", "step", "tokens/s/chip", "MFU", "GiB", "P(oom)", "$/T tokens")
    for one in best:
        price = one["dollars_per_trillion_tokens"]
        table.add_row(
            one["name"],
            f"{_s(one['step_time_s'])} ({_s(one['step_time_low_s'])} to "
            f"{_s(one['step_time_high_s'])})",
            f"{one['tokens_per_s_per_chip']:,.0f}",
            f"{one['mfu']:.1%}",
            f"{one['memory_bytes'] / GIB:.1f}",
            f"{one['oom_probability']:.1%}",
            f"{price:,.0f}" if price else "no price",
        )
    return table


def show_details(one: dict[str, Any]) -> None:
    """Where the time and memory of one layout go."""
    step = one["step_time_s"]
    times = [
        f"{TITLES[name]} {_s(part)} ({part / step:.0%})"
        for name, part in sorted(one["time_parts"].items(), key=lambda item: -item[1])
        if part > SHOWN * step
    ]
    typer.echo("time: " + "; ".join(times))
    sizes = [
        f"{name} {size / GIB:.1f}"
        for name, size in sorted(one["memory_parts"].items(), key=lambda item: -item[1])
        if size > SHOWN * one["memory_bytes"]
    ]
    typer.echo(
        f"memory of pipeline rank {one['heaviest_pp_rank']}: {one['memory_bytes'] / GIB:.1f} GiB "
        f"({one['memory_low_bytes'] / GIB:.1f} to {one['memory_high_bytes'] / GIB:.1f}) of "
        f"{one['capacity_bytes'] / GIB:.0f}; GiB: " + ", ".join(sizes)
    )


def _show_changes(changes: list[dict[str, Any]]) -> None:
    if not changes:
        return
    told = [f"{one['what']}: {one['speedup'] - 1:+.0%} ({one['layout']})" for one in changes]
    typer.echo("single changes, most helpful first: " + "; ".join(told))


def _show_run(run: dict[str, Any]) -> None:
    good = run["goodput"]
    money = f", {run['dollars']:,.0f} $" if run["dollars"] else ""
    typer.echo(
        f"{run['tokens']:.3g} tokens: {run['days']:.1f} days{money}; goodput {good['share']:.1%} "
        f"with a failure every {good['mtbf_h']:.1f} h, a checkpoint every "
        f"{good['interval_s'] / 60:.0f} min ({good['write_s']:.0f} s each), "
        f"{run['spares']} spares for each 64 chips"
    )


def _show_written(written: dict[str, Any], best: str) -> None:
    layout = written["layout"]
    why = "" if layout == best else f" (the trainer does not take {best})"
    typer.echo(f"configuration of {layout}{why} written to {written['folder']}")
    typer.echo(f"  start it with: {written['command']}")
    for note in written["notes"]:
        typer.echo(f"  - {note}")


def _front(front: list[dict[str, Any]]) -> Table:
    table = Table("cluster", "layout", "spares/64", "days", "$", "P(oom)", "goodput")
    table.title = "what nothing beats in days, dollars and risk"
    for one in front[:12]:
        dollars = f"{one['dollars']:,.0f}" if one["dollars"] else ""
        table.add_row(
            one["cluster"], one["name"], str(one["spares"]), f"{one['days']:.1f}", dollars,
            f"{one['oom_probability']:.1%}", f"{one['goodput']['share']:.1%}",
        )  # fmt: skip
    return table


def show_comparison(why: dict[str, Any]) -> None:
    """Why one layout and not another."""
    typer.echo(f"why not {why['other']['name']}: {why['verdict']}")
    seconds = [
        f"{TITLES[name]} {more:+.3g} s" for name, more in why["seconds_more"].items() if more
    ]
    sizes = [f"{name} {more / GIB:+.1f}" for name, more in why["bytes_more"].items() if more]
    typer.echo("  seconds more: " + ("; ".join(seconds[:6]) or "none"))
    typer.echo("  GiB more: " + (", ".join(sizes[:6]) or "none"))


def _curve(curve: dict[str, Any]) -> Table:
    table = Table("chips", "layout", "step", "tokens/s/chip", "efficiency", "MFU")
    for point in curve["points"]:
        best = point["best"]
        if best is None:
            table.add_row(str(point["chips"]), "nothing fits")
            continue
        mark = "  < cliff" if point["chips"] == curve["cliff"] else ""
        table.add_row(
            str(point["chips"]), best["name"], _s(best["step_time_s"]),
            f"{best['tokens_per_s_per_chip']:,.0f}", f"{point['efficiency']:.0%}{mark}",
            f"{best['mfu']:.1%}",
        )  # fmt: skip
    return table


def show_assumptions(one: dict[str, Any]) -> None:
    """What an answer rests on."""
    typer.echo(f"time: {one['origin']} on this kind of chip; assumptions:")
    for line in one["assumptions"]:
        typer.echo(f"  - {line}")


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
