"""What a run came to, as pure functions of its history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from meshwright.base.events import Kind, RankProfile
from meshwright.watch.experts import fullest
from meshwright.watch.history import Evaluation, JsonObject, RunHistory
from meshwright.watch.redundancy import redundancy

Status = Literal["not started", "running", "interrupted", "failed", "finished"]

_ENDS: dict[str, Status] = {
    Kind.RUN_FINISHED: "finished",
    Kind.RUN_FAILED: "failed",
    Kind.RUN_INTERRUPTED: "interrupted",
}

PARTS = ("compute", "communication wait", "data wait", "optimizer", "other")


@dataclass(frozen=True)
class RankSplit:
    """Where the time of one rank went, in seconds summed over `steps` steps."""

    rank: int
    steps: int
    wall_s: float
    compute_s: float
    comm_wait_s: float
    data_wait_s: float
    optimizer_s: float

    @property
    def other_s(self) -> float:
        """Wall time that no part accounts for."""
        known_s = self.compute_s + self.comm_wait_s + self.data_wait_s + self.optimizer_s
        return max(0.0, self.wall_s - known_s)

    @property
    def seconds(self) -> tuple[float, ...]:
        """One value for each of `PARTS`, in that order."""
        return (
            self.compute_s,
            self.comm_wait_s,
            self.data_wait_s,
            self.optimizer_s,
            self.other_s,
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """One share for each of `PARTS`; they sum to 1, or to 0 for a rank without any time."""
        total_s = sum(self.seconds)
        return tuple(value / total_s if total_s else 0.0 for value in self.seconds)


def split_by_rank(profiles: Iterable[RankProfile]) -> tuple[RankSplit, ...]:
    """Sums of `profiles` for each rank, by rank.

    Steps done twice, after going back to a checkpoint, count twice: their time was spent.
    """
    by_rank: dict[int, list[RankProfile]] = {}
    for profile in profiles:
        by_rank.setdefault(profile.rank, []).append(profile)
    return tuple(
        RankSplit(
            rank=rank,
            steps=sum(p.steps for p in found),
            wall_s=sum(p.wall_s for p in found),
            compute_s=sum(p.compute_s for p in found),
            comm_wait_s=sum(p.comm_wait_s for p in found),
            data_wait_s=sum(p.data_wait_s for p in found),
            optimizer_s=sum(p.optimizer_s for p in found),
        )
        for rank, found in sorted(by_rank.items())
    )


def mean_shares(splits: Sequence[RankSplit]) -> tuple[float, ...] | None:
    """Share of each of `PARTS` on the mean rank; None without profiles."""
    if not splits:
        return None
    return tuple(
        sum(column) / len(splits) for column in zip(*(s.shares for s in splits), strict=True)
    )


def finite_median(values: Iterable[float]) -> float | None:
    """Median of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def status(events: Sequence[JsonObject]) -> Status:
    """How the newest incarnation ended, or that it has not."""
    for event in reversed(events):
        if event.get("kind") in _ENDS:
            return _ENDS[event["kind"]]
        if event.get("kind") == Kind.RUN_STARTED:
            return "running"
    return "not started"


def error_line(events: Sequence[JsonObject]) -> str | None:
    """The error that ended the newest incarnation; None unless it failed."""
    if status(events) != "failed":
        return None
    last = next(event for event in reversed(events) if event.get("kind") == Kind.RUN_FAILED)
    return str(last.get("error", "no reason recorded"))


def incarnations(events: Sequence[JsonObject]) -> list[list[JsonObject]]:
    """The events of each start of the run, each list beginning with its `RUN_STARTED`."""
    found: list[list[JsonObject]] = []
    for event in events:
        if event.get("kind") == Kind.RUN_STARTED:
            found.append([])
        if found:
            found[-1].append(event)
    return found


def wall_time_s(events: Sequence[JsonObject]) -> float:
    """Seconds from start to end (or newest event) of each incarnation, summed."""
    return sum(_incarnation_wall_s(events) for events in incarnations(events))


def _incarnation_wall_s(events: Sequence[JsonObject]) -> float:
    for event in events:
        if event.get("kind") == Kind.RUN_FINISHED and "wall_s" in event:
            return float(event["wall_s"])
    times = [float(event["ts"]) for event in events if "ts" in event]
    return max(times) - min(times) if times else 0.0


def resumed_steps(events: Sequence[JsonObject]) -> list[int]:
    """The checkpointed step each later incarnation went on from."""
    starts = (event for event in events if event.get("kind") == Kind.RUN_STARTED)
    return [int(e["resumed_from"]) for e in starts if e.get("resumed_from") is not None]


def comparison(evaluation: Evaluation) -> str:
    """Plain words: how the validation loss stands against the bigram and the unigram model."""
    rivals = (("bigram", evaluation.bigram_loss), ("unigram", evaluation.unigram_loss))
    known = [_against(evaluation.loss, name, loss) for name, loss in rivals if loss is not None]
    return " and ".join(known) + ", on the same split" if known else "no reference to compare with"


def _against(loss: float, name: str, rival: float) -> str:
    if not math.isfinite(loss):
        return f"not comparable with the {name} model's {rival:.3f}"
    if loss == rival:
        return f"equal to the {name} model's {rival:.3f}"
    side = "lower" if loss < rival else "higher"
    return f"{side} than the {name} model's {rival:.3f}"


def nonfinite_steps(history: RunHistory) -> list[int]:
    """Steps whose loss or gradient norm is not a number or infinite."""
    return [
        m.step
        for m in history.metrics
        if not (math.isfinite(m.loss) and math.isfinite(m.grad_norm))
    ]


def summary(history: RunHistory) -> dict[str, Any]:
    """The run in one JSON document: plain values, `None` for what is unknown, not finite, or not
    part of this run (no pipeline, no experts, no compression)."""
    last = history.metrics[-1] if history.metrics else None
    splits = split_by_rank(history.profiles)
    return {
        "name": history.job.job.name,
        "status": status(history.events),
        "error": error_line(history.events),
        **_layout(history),
        "step": max([last.step if last else 0, *history.skipped_steps[-1:]]),
        "steps": history.job.job.steps,
        "incarnations": len(incarnations(history.events)),
        "resumed_from": resumed_steps(history.events),
        "wall_s": wall_time_s(history.events),
        "train_loss": _finite(last.loss) if last else None,
        "router_loss": _router_loss(history),
        "validation": _validation(history.evaluations),
        **_speed(history),
        "time_split": _named(mean_shares(splits)),
        "time_split_by_rank": [{"rank": s.rank, **_named(s.shares)} for s in splits],
        "gradient_bytes": gradient_bytes(history.profiles),
        "expert_load": _expert_load(history),
        "redundancy": redundancy(history.events),
        "skipped_steps": list(history.skipped_steps),
        "bad_samples": _left_out(history.events),
        "takeovers": _count(history.events, Kind.TAKEOVER_DONE),
        "false_alarms": _count(history.events, Kind.FALSE_ALARM),
        "quarantined": quarantined(history.events),
        "nonfinite_steps": nonfinite_steps(history),
        "unreadable_lines": history.unreadable_lines,
    }


def _left_out(events: Sequence[JsonObject]) -> int:
    """Bad samples of the run so far, as the last that was said of them counts."""
    told = [event.get("total") for event in events if event.get("kind") == Kind.BAD_SAMPLES]
    return next((total for total in reversed(told) if isinstance(total, int)), 0)


def _count(events: Sequence[JsonObject], kind: Kind) -> int:
    return sum(event.get("kind") == kind for event in events)


def quarantined(events: Sequence[JsonObject]) -> list[JsonObject]:
    """Chips and whole nodes (`rank` None) that were given up, and why."""
    keys = ("rank", "member", "node", "step", "cause")
    found = [event for event in events if event.get("kind") == Kind.QUARANTINED]
    return [{key: event.get(key) for key in keys} for event in found]


def _layout(history: RunHistory) -> dict[str, Any]:
    plan, layout = history.plan, history.job.layout
    return {
        "layout": layout.label,
        "ranks": layout.world,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "stage_balance": plan.stage_balance if plan else None,
        "zero_stage": layout.zero_stage,
        "model_params": plan.model_params if plan else history.job.model.params,
        "active_params": plan.active_params if plan else None,
    }


def _speed(history: RunHistory) -> dict[str, Any]:
    plan, ranks = history.plan, history.job.layout.world
    tokens_per_s = finite_median(m.tokens_per_s for m in history.metrics)
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_chip": tokens_per_s / ranks if tokens_per_s is not None else None,
        "step_time_s": finite_median(m.step_time_s for m in history.metrics),
        "mfu": _mfu(history),
        "peak_flops_per_chip": plan.peak_flops_per_chip if plan else None,
        "peak_source": plan.peak_source if plan else None,
    }


def _mfu(history: RunHistory) -> float | None:
    """Median MFU; None where the plan knows no peak to measure against."""
    if history.plan is None or history.plan.peak_flops_per_chip is None:
        return None
    return finite_median(m.mfu for m in history.metrics)


def gradient_bytes(profiles: Sequence[RankProfile]) -> dict[str, float] | None:
    """Bytes that compressed reductions of gradients sent and saved against fp32, summed over ranks;
    None without compression."""
    sent, plain = (
        sum(getattr(profile, name) for profile in profiles)
        for name in ("grad_wire_bytes", "grad_plain_bytes")
    )
    return {"sent": sent, "saved": plain - sent} if plain else None


def _router_loss(history: RunHistory) -> float | None:
    """That of the newest step; None where routers never added any."""
    if not any(m.router_loss for m in history.metrics):
        return None
    return _finite(history.metrics[-1].router_loss)


def _expert_load(history: RunHistory) -> dict[str, Any] | None:
    """The worst of the newest report, and how many experts moved since the start."""
    worst = fullest(history.expert_loads)
    if worst is None:
        return None
    return {
        "step": worst.step,
        "layer": worst.layer,
        "expert": worst.expert,
        "imbalance": _finite(worst.imbalance),
        "chip_imbalance": _finite(worst.chip_imbalance) if history.job.layout.ep > 1 else None,
        "moves": len(history.expert_moves),
        "moved": sum(move.moved for move in history.expert_moves),
    }


def _validation(evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    return {
        "step": last.step,
        "loss": _finite(last.loss),
        "bigram_loss": _finite(last.bigram_loss),
        "unigram_loss": _finite(last.unigram_loss),
        "tokens": last.tokens,
        "verdict": comparison(last),
    }


def _named(shares: tuple[float, ...] | None) -> dict[str, float]:
    if shares is None:
        return {}
    return {part.replace(" ", "_"): share for part, share in zip(PARTS, shares, strict=True)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
