"""`meshwright plan`: the best layouts for a model on a cluster, explained."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.catalog import Cluster
from meshwright.catalog import cluster as find_cluster
from meshwright.cli import plan_encoder
from meshwright.cli import plan_options as options
from meshwright.cli.options import AsJson, print_json
from meshwright.cli.plan_text import show_answer
from meshwright.plan import plots_png
from meshwright.plan.cost.framework import names
from meshwright.plan.emit import Emitted, Plan, emit
from meshwright.plan.encoder_placed import Placement, place
from meshwright.plan.encoders import Beside
from meshwright.plan.explain import Change, Comparison, bound, compare, levers
from meshwright.plan.goodput import Bill, Reliability, bill
from meshwright.plan.limits import refusal
from meshwright.plan.objectives import (
    Choice,
    Objective,
    best_choice,
    choices,
    ranked,
    sizes,
)
from meshwright.plan.plots import page
from meshwright.plan.prediction import Prediction, layout_of, predict
from meshwright.plan.scaling import Scaling, scaling
from meshwright.plan.search import Found, search
from meshwright.plan.search_notation import parse_layout, write_layout
from meshwright.plan.search_question import Question, Wishes
from meshwright.plan.search_traffic import placed
from meshwright.plan.trace import trace as trace_of

TRILLION = 1e12
# What the cost model calls the frameworks that configurations are written for, where it differs.
PRICED_AS = {"megatron-bridge": "bridge", "torchtitan-toml": "torchtitan", "job": "meshwright"}
PAGES = (".html", ".htm")
MONEY = ("cost", "goodput")  # objectives that try smaller parts of the cluster too
MOST_EMITTED = 4096  # layouts tried for one that the framework itself accepts


@dataclass(frozen=True)
class Written:
    """Files in `folder` for `layout`: not the best one where the framework does not take that."""

    layout: str
    folder: str
    files: Emitted

    def document(self) -> dict[str, Any]:
        """As plain JSON, without the text of the files."""
        return {
            "layout": self.layout,
            "folder": self.folder,
            "files": sorted(self.files.files),
            "command": self.files.command,
            "notes": list(self.files.notes),
        }


@dataclass(frozen=True)
class Answer:
    """Everything that one call of `plan` found."""

    question: Question
    found: Found
    best: tuple[Prediction, ...]
    bill: Bill
    helps: tuple[Change, ...]
    front: tuple[Choice, ...]
    objective: Objective
    why: Comparison | None = None
    curve: Scaling | None = None
    emitted: Written | None = None
    placed: Placement | None = None

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        mapping = placed(self.question, self.best[0].layout)
        return {
            "cluster": self.question.cluster.name,
            "framework": self.question.framework.name,
            "seq_len": self.question.seq_len,
            "global_batch": self.question.global_batch,
            "objective": self.objective,
            "legal_layouts": self.found.legal,
            "best": [one.document() for one in self.best],
            "bound": bound(self.best[0]),
            "run": self.bill.document(),
            "single_changes": [change.document() for change in self.helps],
            "front": [choice.document() for choice in self.front],
            "mapping": {
                "order": [piece.label for piece in mapping.order],
                "terms_s": mapping.terms,
                "levels": {name: cost.level for name, cost in mapping.placements.items()},
            },
            "why": self.why and self.why.document(),
            "scaling": self.curve and self.curve.document(),
            "encoder": self.placed and self.placed.document(),
            "written": self.emitted and self.emitted.document(),
        }


def plan(
    model: options.Model,
    cluster: options.ClusterRef,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    tokens: options.Tokens = 1e12,
    objective: options.Wanted = "time",
    framework: options.FrameworkName = None,
    precision: options.PrecisionName = None,
    risk: options.Risk = options.DEFAULT_RISK,
    top: options.Top = 3,
    failures: options.Failures = None,
    spares: options.Spares = None,
    pareto: options.Pareto = False,
    why: options.Why = None,
    scale: options.Scale = None,
    plot: options.Plot = None,
    trace: options.Trace = None,
    emit_for: options.EmitFor = None,
    out: options.Out = Path("plan-out"),
    catalogue: options.Catalogue = None,
    constants: options.ConstantsFile = None,
    encoder: plan_encoder.Encoder = None,
    images: plan_encoder.Images = None,
    image_tokens: plan_encoder.ImageTokens = None,
    image_bytes: plan_encoder.ImageBytes = None,
    freeze_encoder: plan_encoder.Freeze = False,
    as_json: AsJson = False,
) -> int:
    """The best layouts for a model on a cluster, with time, memory, money and reasons."""
    wanted = _objective(objective)
    _check_plot(plot)
    about = plan_encoder.wanted(encoder, images, image_tokens, image_bytes, freeze_encoder)
    how = _reliability(failures, spares, wanted)
    priced_as = framework or _priced_as(emit_for)
    wishes = Wishes(seq_len, global_batch, precision, priced_as, risk, catalogue)
    question, _ = options.the_question(model, cluster, wishes, constants)
    smaller = {"pareto": pareto, "scale": scale, "objective": wanted in MONEY and wanted}
    beside = plan_encoder.check(about, smaller, question)
    placed = _placed(question, beside, catalogue) if beside else None
    if placed:
        question = placed.best.language.question
    answer = _answer(question, catalogue, wanted, top, tokens, how, pareto, placed)
    answer = _extended(answer, why, scale, catalogue)
    if emit_for:
        answer = replace(answer, emitted=_emit(answer, emit_for, out, tokens))
    _write(answer, plot, trace, model)
    if as_json:
        print_json(answer.document())
    else:
        show_answer(answer.document(), answer.question)
    return 0


def _check_plot(path: Path | None) -> None:
    """Before anything is searched: whether charts can be written to `path`."""
    if path is None or path.suffix.lower() in PAGES:
        return
    if path.suffix.lower() != ".png":
        raise ConfigError(
            "plot", str(path), "charts are HTML with SVG or PNG; name it .html or .png"
        )
    plots_png.check(path)


def _priced_as(emitted_for: str | None) -> str | None:
    """The framework that a configuration is for is the one that will run it."""
    name = PRICED_AS.get(emitted_for or "", emitted_for)
    return name if name in names() else None


def _reliability(failures: float | None, spares: int | None, objective: Objective) -> Reliability:
    if spares is not None and objective in MONEY:
        raise ConfigError("spares", spares, f"--objective {objective} tries 0 to 4; leave it out")
    how = Reliability(spares=spares or 0)
    return how if failures is None else replace(how, failures_per_node_day=failures)


def _extended(answer: Answer, why: str | None, scale: str | None, catalogue: Path | None) -> Answer:
    """With the comparison and the curve that were asked for."""
    question = answer.question
    if why:
        other = parse_layout(why, question.cluster.chips, question.precision)
        compared = compare(question, answer.best[0], predict(question, other))
        answer = replace(answer, why=compared)
    if scale:
        curve = scaling(question, _clusters(question, scale, catalogue))
        answer = replace(answer, curve=curve)
    return answer


def _answer(
    question: Question,
    catalogue: Path | None,
    objective: Objective,
    top: int,
    tokens: float,
    how: Reliability,
    pareto: bool,
    placed: Placement | None,
) -> Answer:
    """Search, and everything that is said about the best layouts. Under an objective of money,
    smaller parts of the cluster and numbers of spares are tried too. With an encoder beside it,
    `question` is about the language model on its part of the chips."""
    front: list[Choice] = []
    if pareto or objective in MONEY:
        front = choices(
            [_resized(question, chips, catalogue) for chips in sizes(question.cluster)],
            tokens,
            how,
        )
        if front and objective in MONEY:
            chosen = best_choice(front, objective)
            question, how = chosen.question, replace(how, spares=chosen.bill.spares)
    found = search(question)
    if not len(found.best):
        raise refusal(question, found, lambda n: _maybe(question, n, catalogue)).error(question)
    order = ranked(found, objective)
    best = tuple(
        predict(question, layout_of(question, order.candidates, index))
        for index in range(min(top, len(order)))
    )
    paid = _bill(question, best[0], tokens, how, placed, catalogue)
    # Against the fastest: every change is searched for the fastest too, whatever the objective.
    fastest = predict(question, layout_of(question, found.best.candidates, 0))
    helps = tuple(levers(question, fastest))
    return Answer(question, found, best, paid, helps, tuple(front), objective, placed=placed)


def _placed(question: Question, beside: Beside, catalogue: Path | None) -> Placement:
    return place(question, beside, lambda chips: _maybe(question, chips, catalogue))


def _bill(
    question: Question,
    best: Prediction,
    tokens: float,
    how: Reliability,
    placed: Placement | None,
    catalogue: Path | None,
) -> Bill:
    """Of the run; with an encoder of all chips, and of the state of both."""
    if placed is None:
        return bill(question, best.tokens_per_s, tokens, how)
    split = placed.best
    whole = _resized(question, split.language.chips + split.encoder.chips, catalogue)
    return bill(whole, split.tokens_per_s, tokens, how, placed.beside.trained_params)


def _objective(text: str) -> Objective:
    known = get_args(Objective)
    if text not in known:
        hint = did_you_mean(text, known) or f"; known: {', '.join(known)}"
        raise ConfigError("objective", text, "no such objective" + hint)
    chosen: Objective = next(name for name in known if name == text)
    return chosen


def _cluster(question: Question, chips: int, catalogue: Path | None) -> Cluster:
    return find_cluster(f"{question.cluster.name.partition(':')[0]}:{chips}", catalogue)


def _resized(question: Question, chips: int, catalogue: Path | None) -> Question:
    return question.on(_cluster(question, chips, catalogue))


def _maybe(question: Question, chips: int, catalogue: Path | None) -> Cluster | None:
    try:
        return _cluster(question, chips, catalogue)
    except ConfigError:
        return None


def _clusters(question: Question, text: str, catalogue: Path | None) -> list[Cluster]:
    numbers = [word.strip() for word in text.split(",") if word.strip()]
    if not numbers or not all(word.isdecimal() and int(word) for word in numbers):
        raise ConfigError("scale", text, "write numbers of chips, as 64,128,256")
    return [_cluster(question, int(word), catalogue) for word in numbers]


def _emit(answer: Answer, framework: str, out: Path, tokens: float) -> Written:
    """Files for the best layout that the framework's own rules accept."""
    question = answer.question
    steps = max(1, round(tokens / question.tokens))
    refused: ConfigError | None = None
    order = ranked(answer.found, answer.objective)
    for index in range(min(MOST_EMITTED, len(order))):
        layout = layout_of(question, order.candidates, index)
        wanted = Plan(
            question.spec, layout, question.seq_len, question.global_batch, steps, question.cluster
        )
        try:
            written = emit(framework, wanted)
        except ConfigError as error:
            refused = refused or error
            continue
        out.mkdir(parents=True, exist_ok=True)
        for name, text in written.files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
        return Written(write_layout(layout), str(out), written)
    assert refused is not None
    raise refused


def _write(answer: Answer, plot: Path | None, trace: Path | None, model: str) -> None:
    if plot:
        title = f"{model} on {answer.question.cluster.name}"
        if plot.suffix.lower() in PAGES:
            plot.write_text(page(title, answer.best, answer.curve), encoding="utf-8")
        else:
            plots_png.save(plot, title, answer.best, answer.curve)
    if trace:
        found = trace_of(answer.question, answer.best[0].layout)
        trace.write_text(json.dumps(found), encoding="utf-8")
