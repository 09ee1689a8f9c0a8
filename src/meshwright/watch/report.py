"""`report.html`: one file that tells a run and needs nothing else, no network and no script."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from meshwright.base.events import ExpertLoad, Kind
from meshwright.plan.layout import Layout
from meshwright.watch.chips import draw_layout
from meshwright.watch.experts import by_layer, milestones, report_steps
from meshwright.watch.figures import load_figures, loss_figure, speed_figures, split_figure
from meshwright.watch.formats import duration, percent, si, size
from meshwright.watch.happenings import event_rows
from meshwright.watch.history import RunHistory, read_run
from meshwright.watch.layout_words import layout_facts
from meshwright.watch.redundancy import redundancy_words
from meshwright.watch.summary import nonfinite_steps, split_by_rank, summary
from meshwright.watch.survival import survival_words

_EVENT_ROWS = 400


@dataclass(frozen=True)
class Table:
    """Names of the columns, and the words of each row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Tile:
    """One headline number: what it is, the value, and a line that puts it in place."""

    name: str
    value: str
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir`, whole or not at all, and return its path.

    Raises InputError if `run_dir` is not a run directory.
    """
    page = render(read_run(run_dir))
    target = run_dir / "report.html"
    draft = run_dir / f".report.{os.getpid()}.html"
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        with suppress(OSError):  # a folder that cannot be written has raised above
            draft.unlink(missing_ok=True)
    return target


def render(history: RunHistory) -> str:
    """The page as HTML. Every text from the run is escaped."""
    environment = Environment(
        loader=PackageLoader("meshwright.watch"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    run, plan, layout = summary(history), history.plan, history.job.layout
    rows = event_rows(history.events)
    return environment.get_template("report.html").render(
        run=run,
        plan=plan,
        tiles=tiles(run),
        notices=notices(history),
        loss=loss_figure(history),
        speed=speed_figures(history.metrics),
        split=split_figure(split_by_rank(history.profiles)),
        split_words=split_words(run),
        loads=load_figures(history.expert_loads, chips=layout.ep > 1),
        load_words=load_words(run["expert_load"]),
        load_table=load_table(history),
        layout_facts=layout_facts(history.job, plan.stage_balance if plan else None),
        layout_words=_columns_and_rows(layout),
        chips=draw_layout(plan.ranks, layout.chunks) if plan else None,
        events=rows[-_EVENT_ROWS:],
        hidden_events=max(0, len(rows) - _EVENT_ROWS),
        job_text=history.job_text,
    )


def tiles(run: dict[str, Any]) -> list[Tile]:
    """The headline numbers from a `summary`."""
    ranks = f"{run['ranks']} chip" + ("s" if run["ranks"] != 1 else "")
    per_chip = run["tokens_per_s_per_chip"]
    return [
        Tile(
            "Training loss", _loss(run["train_loss"]), f"step {run['step']:,} of {run['steps']:,}"
        ),
        _validation_tile(run["validation"]),
        Tile(
            "Tokens per second",
            _or_dash(run["tokens_per_s"], si),
            f"median; {si(per_chip)} a chip on {ranks}" if per_chip is not None else ranks,
        ),
        Tile("MFU", _or_dash(run["mfu"], percent), _peak_words(run)),
        Tile("Wall time", duration(run["wall_s"]), _resume_words(run["resumed_from"])),
        Tile(
            "Parameters",
            si(run["model_params"]),
            _active_words(run) + f"{run['layout']} on {ranks}",
        ),
    ]


def _active_words(run: dict[str, Any]) -> str:
    active = run["active_params"]
    return "" if active in (None, run["model_params"]) else f"{si(active)} active a token; "


def _validation_tile(validation: dict[str, Any] | None) -> Tile:
    if validation is None:
        return Tile("Validation loss", "—", "not evaluated yet")
    note = f"{validation['verdict']} (step {validation['step']:,})"
    return Tile("Validation loss", _loss(validation["loss"]), note)


def _peak_words(run: dict[str, Any]) -> str:
    if run["peak_flops_per_chip"] is None:
        return f"no peak known for this chip: {run['peak_source'] or 'no plan yet'}"
    return f"of a peak of {si(run['peak_flops_per_chip'])}FLOP/s a chip ({run['peak_source']})"


def _resume_words(steps: Sequence[int]) -> str:
    if not steps:
        return "in one go"
    return "resumed from step " + ", ".join(f"{step:,}" for step in steps)


def _loss(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "—"


def _or_dash(value: float | None, words: Callable[[float], str]) -> str:
    return words(value) if value is not None else "—"


def notices(history: RunHistory) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if bad := nonfinite_steps(history):
        found.append(
            f"steps whose loss or gradient norm is not finite: {len(bad):,}, first {bad[0]:,}"
        )
    if skipped := history.skipped_steps:
        found.append(
            f"steps skipped because fp16 gradients overflowed: {len(skipped):,}, "
            f"first {skipped[0]:,}, last {skipped[-1]:,}"
        )
    if bad := summary(history)["bad_samples"]:
        found.append(f"bad samples that were left out: {bad:,} (data.bad_samples allows for them)")
    if alarms := summary(history)["false_alarms"]:
        found.append(f"ranks that were replaced by a false alarm, and could have gone on: {alarms}")
    found += [survival_words(e) or "" for e in history.events if e.get("kind") == Kind.QUARANTINED]
    if history.unreadable_lines:
        found.append(f"unreadable lines in the run's records: {history.unreadable_lines:,}")
    return found


def split_words(run: dict[str, Any]) -> list[str]:
    """Where the time of the mean rank goes, and what compression does to gradients."""
    found = []
    if shares := run["time_split"]:
        parts = ", ".join(f"{part.replace('_', ' ')} {percent(s)}" for part, s in shares.items())
        found.append(f"The mean rank spends its time on: {parts}.")
    if kept := run["redundancy"]:
        found.append(f"Redundancy: {redundancy_words(kept)}.")
    if sent := run["gradient_bytes"]:
        found.append(
            f"Gradients: {size(sent['sent'])} sent, {size(sent['saved'])} saved "
            "against fp32, over all ranks."
        )
    return found


def load_words(load: dict[str, Any] | None) -> str:
    """The newest report of the experts' loads, and how often they moved."""
    if load is None:
        return ""
    words = (
        f"At step {load['step']:,} the fullest expert of a layer got "
        f"{_times(load['imbalance'])} times its even share "
        f"(layer {load['layer']}, expert {load['expert']})"
    )
    if load["chip_imbalance"] is not None:
        words += f", the fullest chip {_times(load['chip_imbalance'])} times"
    if load["moves"]:
        words += f"; {load['moved']:,} experts moved in {load['moves']:,} changes of a layer"
    return words + "."


def _times(imbalance: float | None) -> str:
    return _or_dash(imbalance, "{:.2f}".format)


def load_table(history: RunHistory) -> Table:
    """For each layer max / mean at the first, the middle and the last report, and the fullest
    expert at the last; that of the chips too where they share the experts."""
    steps = milestones(report_steps(history.expert_loads))
    chips = history.job.layout.ep > 1
    rows = []
    for layer in by_layer(history.expert_loads):
        found = [layer.by_step.get(step) for step in steps]
        row = [f"{load.imbalance:.2f}" if load else "—" for load in found]
        if chips:
            row += [f"{load.chip_imbalance:.2f}" if load else "—" for load in found]
        newest = layer.by_step[max(layer.by_step)]
        rows.append((str(layer.layer), *row, _hottest(newest)))
    kinds = ("Experts", "Chips") if chips else ("Experts",)
    columns = [f"{kind}, step {step:,}" for kind in kinds for step in steps]
    return Table(("Layer", *columns, "Fullest expert"), tuple(rows))


def _hottest(load: ExpertLoad) -> str:
    if load.hottest < len(load.counts) and (total := sum(load.counts)):
        return f"{load.hottest} ({percent(load.counts[load.hottest] / total)} of the load)"
    return str(load.hottest)


def _columns_and_rows(layout: Layout) -> str:
    """How to read the drawing of the layout."""
    columns = "pipeline stages"
    if layout.chunks > 1:
        columns = f"pipeline ranks with {layout.chunks} stages each"
    rows = "data-parallel ranks"
    if layout.cp > 1:
        rows += " and the context parts of each"
    return (
        f"Columns are {columns}, rows are {rows}, and the chips of one tensor-parallel group touch."
    )
