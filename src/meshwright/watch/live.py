"""A run in the terminal while it goes: a panel on a terminal, plain lines anywhere else.

No thread and no rendering per message: a message updates a few numbers, and the view is drawn at
most four times a second from whichever call comes next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.base.events import Kind
from meshwright.plan.job import Job
from meshwright.watch.experts import imbalance_words
from meshwright.watch.formats import duration, ordinary, percent, si, size
from meshwright.watch.layout_words import layout_facts, model_size
from meshwright.watch.live_state import LiveState, number, sparkline
from meshwright.watch.survival import survival_words

_REDRAW_S = 0.25
_LINE_S = 5.0
_BAR_CELLS = 40
_PROGRESS_CELLS = 24
_PARTS = (  # short names of `summary.PARTS`, to fit 80 columns
    ("compute", "blue"),
    ("comm", "yellow"),
    ("data", "magenta"),
    ("optimizer", "green"),
    ("other", "bright_black"),
)


class LiveView:
    """Shows a run on `console` (give one that writes to stderr; stdout is for results).

    `plan` is the contents of `plan.json`. Feed it every message with `on_event`; call `tick` when
    none has come for a while, so that the elapsed time goes on.
    """

    def __init__(
        self,
        job: Job,
        plan: Mapping[str, Any],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = LiveState(steps=job.job.steps, world=job.layout.world)
        model = model_size(plan["model_params"], plan.get("active_params"))
        self._title = f"{job.job.name} · {plan['label']} · {model}"
        self._layout = " · ".join(layout_facts(job, plan.get("stage_balance")))
        self._shares_experts = job.layout.ep > 1
        self._mfu_known = plan.get("peak_flops_per_chip") is not None
        self._console = console
        self._clock = clock
        self._shown_s = float("-inf")  # so that the first showing is due at once
        self._shown_step = 0
        self._told: dict[str, str] = {}
        self._visible = True
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._show(self._finish)

    def on_event(self, message: Mapping[str, Any]) -> None:
        """Take in one message (a dict with a `kind` of `base.events.Kind`)."""
        self.state.apply(message, self._clock())
        if self._live:
            self._redraw_if_due(self._live)
        else:
            self._print_if_due(message)

    def tick(self) -> None:
        """Let time pass without a message."""
        self.state.now_s = self._clock()
        if self._live:
            self._redraw_if_due(self._live)

    def _redraw_if_due(self, live: Live) -> None:
        if self.state.now_s - self._shown_s >= _REDRAW_S:
            self._shown_s = self.state.now_s
            self._show(lambda: live.update(self.render(), refresh=True))

    def _finish(self) -> None:
        if self._live:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def _show(self, draw: Callable[[], None]) -> None:
        """Draw; once the terminal is gone nothing more is shown, and the run goes on."""
        if self._visible:
            try:
                draw()
            except OSError:
                self._visible = False

    def _print_if_due(self, message: Mapping[str, Any]) -> None:
        state = self.state
        if told := survival_words(message):
            self._print(f"step {message.get('step', state.step)}  {told}")
            return
        match message.get("kind"):
            case Kind.RUN_STARTED:
                self._print(self._title + (f" · from step {state.step}" if state.step else ""))
                if self._layout:
                    self._print(f"layout: {self._layout}")
                self._shown_step = state.step
            case Kind.EVALUATED:
                self._print(f"step {message['step']}  validation {_validation(message)}")
            case Kind.METRICS | Kind.STEP_SKIPPED if self._line_is_due():
                self._shown_s, self._shown_step = state.now_s, state.step
                self._print(self.plain_line())
                self._print_extras()

    def _print_extras(self) -> None:
        """What only some runs have, where it has changed."""
        extras = self._extras()
        for name, told in extras.items():
            if self._told.get(name) != told:
                self._print(f"step {self.state.step}  {name}: {told}")
        self._told = extras

    def _line_is_due(self) -> bool:
        state = self.state
        return (
            state.step == state.steps
            or state.now_s - self._shown_s >= _LINE_S
            or state.step - self._shown_step >= state.steps / 10
        )

    def _print(self, line: str) -> None:
        self._show(lambda: self._console.print(Text(line), soft_wrap=True))

    def plain_line(self) -> str:
        """The newest step in one line."""
        state = self.state
        words = [f"step {state.step}/{state.steps}"]
        if state.metrics:
            words += [
                f"loss {number(state.metrics, 'loss'):.4f}{self._router_words()}",
                *self._speed(),
                f"grad norm {ordinary(number(state.metrics, 'grad_norm'))}",
                f"lr {ordinary(number(state.metrics, 'lr'))}",
            ]
        if state.eta_s is not None and state.step < state.steps:
            words.append(f"ETA {duration(state.eta_s)}")
        return "  ".join(words)

    def _speed(self) -> list[str]:
        words = [f"{si(number(self.state.metrics, 'tokens_per_s'))} tokens/s"]
        if self._mfu_known:
            words.append(f"MFU {percent(number(self.state.metrics, 'mfu'))}")
        return words

    def render(self) -> RenderableType:
        """The panel as it stands now."""
        state = self.state
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        if self._layout:
            rows.add_row("layout", Text(self._layout))
        rows.add_row("progress", self._progress())
        if state.metrics:
            spark = sparkline(list(state.losses), 32)
            value = f"{number(state.metrics, 'loss'):.4f}"
            rows.add_row("loss", Text.assemble((value, "bold"), self._router_words(), "  ", spark))
        if state.evaluation:
            at = f"  (step {state.evaluation['step']})"
            rows.add_row("validation", Text(_validation(state.evaluation) + at))
        if state.metrics:
            rows.add_row("speed", Text(" · ".join(self._speed())))
        if state.shares:
            rows.add_row("time", _split_bar(state.shares))
        if state.metrics:
            rate = ordinary(number(state.metrics, "lr"))
            norm = ordinary(number(state.metrics, "grad_norm"))
            rows.add_row("optimizer", Text(f"lr {rate} · grad norm {norm}"))
        for name, told in self._extras().items():
            rows.add_row(name, Text(told))
        return Group(Text(self._title, style="bold"), rows)

    def _router_words(self) -> str:
        router = number(self.state.metrics, "router_loss")
        return "" if math.isnan(router) or not router else f" + router {ordinary(router)}"

    def _extras(self) -> dict[str, str]:
        """What only some runs have: words by name."""
        state, found = self.state, {}
        if state.load:
            imbalance, layer, chips = state.load
            told = imbalance_words(imbalance, layer, chips if self._shares_experts else None)
            found["experts"] = told + (f"; {state.moved} moved" if state.moved else "")
        if state.grad_sent_bytes:
            sent, saved = size(state.grad_sent_bytes), size(state.grad_saved_bytes)
            found["gradients"] = f"{sent} sent, {saved} saved"
        if state.survived:
            found["takeovers"] = f"{len(state.survived)}, last: {state.survived[-1]}"
        if state.false_alarms:
            found["false alarms"] = str(state.false_alarms)
        if (age_s := state.committed.get("verified_age_s")) is not None:
            step, verified = state.committed["step"], state.committed["verified_step"]
            found["saved"] = f"step {step}; step {verified} verified, {duration(age_s)} old"
        if state.unsaved:
            found["not saved"] = state.unsaved
        if state.quarantined:
            found["quarantined"] = "; ".join(state.quarantined)
        if state.skipped:
            scale = ordinary(state.loss_scale)
            last = state.skipped[-1]
            found["skipped steps"] = f"{len(state.skipped)}, last {last}; loss scale {scale}"
        return found

    def _progress(self) -> RenderableType:
        state = self.state
        words = f"{state.step}/{state.steps}  {state.status}  {duration(state.elapsed_s)}"
        if state.eta_s is not None and state.status == "running":
            words += f", {duration(state.eta_s)} left"
        if len(state.ready) < state.world and state.status == "starting":
            words += f"  {len(state.ready)}/{state.world} ranks ready"
        line = Table.grid(padding=(0, 2))
        line.add_row(
            ProgressBar(total=state.steps, completed=state.step, width=_PROGRESS_CELLS), words
        )
        return line


def _validation(evaluation: Mapping[str, Any]) -> str:
    words = f"{number(evaluation, 'loss'):.4f}"
    if evaluation.get("bigram_loss") is None:
        return words
    bigram = number(evaluation, "bigram_loss")
    side = "below" if number(evaluation, "loss") < bigram else "not below"
    return f"{words}, {side} bigram {bigram:.4f}"


def _split_bar(shares: Sequence[float]) -> RenderableType:
    """A bar over its legend; `shares` are those of `summary.PARTS`."""
    bar, words = Text(), Text()
    for share, (name, style) in zip(shares, _PARTS, strict=True):
        bar.append("█" * round(share * _BAR_CELLS), style=style)
        words.append("■ ", style=style)
        words.append(f"{name} {share:.0%}  ")
    return Group(bar, words)
