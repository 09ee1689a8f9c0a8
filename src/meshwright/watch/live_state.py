"""What the live view knows of a run, kept up to date message by message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshwright.base.events import Kind
from meshwright.watch.survival import survival_words

_BLOCKS = "▁▂▃▄▅▆▇█"
_RATE_WINDOW = 50
_LOSSES_KEPT = 512


@dataclass
class LiveState:
    """The newest values of one run. `now_s` is any monotonic clock, in seconds."""

    steps: int
    world: int
    step: int = 0
    ready: set[int] = field(default_factory=set)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    status: str = "starting"
    started_s: float | None = None
    now_s: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES_KEPT))
    _paces: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))
    skipped: list[int] = field(default_factory=list)
    loss_scale: float = math.nan
    survived: list[str] = field(default_factory=list)  # takeovers, in words
    false_alarms: int = 0
    quarantined: list[str] = field(default_factory=list)  # chips and nodes, in words
    unsaved: str = ""  # the last save failed, in words
    committed: Mapping[str, Any] = field(default_factory=dict)  # the last that did not
    moved: int = 0  # experts that changed places
    grad_sent_bytes: float = 0.0  # by compressed reductions, over all ranks
    grad_saved_bytes: float = 0.0
    _profiles: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _loads: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def apply(self, message: Mapping[str, Any], now_s: float) -> None:
        """Take in one message of `base.events`; kinds that the view does not show are ignored."""
        self.now_s = now_s
        if self.started_s is None:
            self.started_s = now_s
        match message.get("kind"):
            case Kind.RUN_STARTED:
                self._restart(message)
            case Kind.RANK_READY:
                self.ready.add(message["rank"])
            case Kind.METRICS:
                self._advance(message)
            case Kind.RANK_PROFILE:
                self._take_profile(message)
            case Kind.EXPERT_LOAD:
                self._loads[message["layer"]] = message
            case Kind.EXPERTS_MOVED:
                self.moved += message["moved"]
            case Kind.STEP_SKIPPED:
                self._skip(message)
            case Kind.EVALUATED:
                self.evaluation = message
            case Kind.RANK_LOST:
                self.ready.discard(message["rank"])
                self.status = f"lost rank {message['rank']}"
            case Kind.TAKEOVER_DONE:
                self.survived.append(survival_words(message) or "")
                self.status = "running"
            case Kind.FALSE_ALARM:
                self.false_alarms += 1
            case Kind.QUARANTINED:
                self.quarantined.append(survival_words(message) or "")
            case Kind.CHECKPOINT_FAILED:
                self.unsaved = survival_words(message) or ""
            case Kind.CHECKPOINT_COMMITTED:
                self.unsaved, self.committed = "", message
            case Kind.RUN_FINISHED:
                self.status = "finished"
            case Kind.RUN_FAILED:
                self.status = "failed"
            case Kind.RUN_INTERRUPTED:
                self.status = "interrupted"

    def _restart(self, message: Mapping[str, Any]) -> None:
        self.step = message.get("resumed_from") or 0
        self.ready.clear()
        self.skipped = [step for step in self.skipped if step <= self.step]
        self._paces.clear()
        self._loads.clear()
        self.status = "starting"

    def _advance(self, message: Mapping[str, Any]) -> None:
        self.metrics = message
        self.losses.append(number(message, "loss"))
        self._pass(message["step"])

    def _skip(self, message: Mapping[str, Any]) -> None:
        self.skipped.append(message["step"])
        self.loss_scale = number(message, "loss_scale")
        self._pass(message["step"])

    def _pass(self, step: int) -> None:
        self.step = step
        self._paces.append((self.now_s, step))
        self.status = "running"

    def _take_profile(self, message: Mapping[str, Any]) -> None:
        self._profiles[message["rank"]] = message
        sent = float(message.get("grad_wire_bytes") or 0)
        self.grad_sent_bytes += sent
        self.grad_saved_bytes += float(message.get("grad_plain_bytes") or 0) - sent

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first message."""
        return self.now_s - self.started_s if self.started_s is not None else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the newest steps, evaluations included; None if unknown."""
        if len(self._paces) < 2:
            return None
        (first_s, first), (last_s, last) = self._paces[0], self._paces[-1]
        if last <= first:
            return None
        return (self.steps - last) * (last_s - first_s) / (last - first)

    @property
    def load(self) -> tuple[float, int, float] | None:
        """Max / mean load of the most uneven experts, their layer, and that of the most uneven
        chips; None before any report."""
        if not self._loads:
            return None
        layer, worst = max(self._loads.items(), key=lambda item: number(item[1], "imbalance"))
        chips = max(number(load, "chip_imbalance") for load in self._loads.values())
        return number(worst, "imbalance"), layer, chips

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each of `summary.PARTS` on the mean rank, from the newest profiles; or empty."""
        keys = ("compute_s", "comm_wait_s", "data_wait_s", "optimizer_s")
        wall_s = sum(number(p, "wall_s") for p in self._profiles.values())
        if not wall_s > 0:
            return ()
        known = [sum(number(p, key) for p in self._profiles.values()) / wall_s for key in keys]
        return (*known, max(0.0, 1 - sum(known)))


def number(message: Mapping[str, Any], key: str) -> float:
    """`message[key]` as a float; absent and `null` are NaN."""
    value = message.get(key)
    return math.nan if value is None else float(value)


def sparkline(values: list[float], width: int) -> str:
    """`values` in at most `width` block characters, each the mean of its stretch; `x` for NaN."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        pairs = pairwise(edges)
        values = [sum(values[a:b]) / (b - a) for a, b in pairs]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "x" * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((v - low) / span * top)] if math.isfinite(v) else "x" for v in values
    )
