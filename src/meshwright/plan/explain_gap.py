"""A run that is slower than it should be: where its time goes, and what is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.plan.explain import TITLES, too_few
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import Prediction, predict
from meshwright.plan.search_question import Question

UNITS = ("tokens_per_s", "tokens_per_s_per_chip", "tflops", "mfu", "step_time_s")
NETWORK = 3.0  # slower than predicted by more than this: no term of the model is off by so much


TRAFFIC = ("tp", "cp", "ep", "shard", "p2p", "dp")


@dataclass(frozen=True)
class Gap:
    """`seconds` of a measured step, from useful arithmetic at peak to what stays unexplained; they
    add up to `measured_s`. `diagnosis` in a line each."""

    measured_s: float
    predicted_s: float
    seconds: dict[str, float]
    diagnosis: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**vars(self), "diagnosis": list(self.diagnosis)}


def measured_step_s(question: Question, text: str) -> float:
    """Seconds of a step from `tokens_per_s=3.1e6`, or another of `UNITS`. `tflops` are model FLOPs
    a chip. Raises ConfigError."""
    name, equals, number = text.partition("=")
    name = name.strip()
    if not equals or name not in UNITS:
        hint = did_you_mean(name, UNITS) or f"; known: {', '.join(UNITS)}"
        raise ConfigError("measured", text, "write it as tokens_per_s=NUMBER" + hint)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError("measured", text, f"{name} must be a number above 0")
    step_s = {
        "tokens_per_s": question.tokens / value,
        "tokens_per_s_per_chip": question.tokens / value / question.cluster.chips,
        "tflops": question.flops_per_chip / value / 1e12,
        "mfu": question.flops_per_chip / (value * question.peak_flops),
        "step_time_s": value,
    }[name]
    if step_s < question.flops_per_chip / question.peak_flops:
        peak = f"{question.peak_flops / 1e12:.3g} TFLOP/s a chip"
        fix = f"is faster than the dense {question.precision} peak of {peak}; check unit and batch"
        raise ConfigError("measured", text, fix)
    return step_s


def gap(question: Question, layout: Layout, measured_s: float, best: Prediction | None) -> Gap:
    """Where the time of a measured step goes, by the model of `layout`; `best`: what a search found
    for the same chips."""
    here = predict(question, layout)
    plain = layout.model_copy(update={"recompute": "none", "recompute_parts": ["attention"]})
    without = predict(question, plain)
    again = here.time_parts["compute"] - without.time_parts["compute"]
    useful = question.flops_per_chip / question.peak_flops
    seconds = {
        "useful arithmetic at peak": useful,
        "kernels below the peak": max(without.time_parts["compute"] - useful, 0.0),
        "recomputation": again,
        **{TITLES[name]: part for name, part in here.time_parts.items() if name != "compute"},
        "unexplained": measured_s - here.step_time_s,
    }
    lines = _diagnose(question, here, again, measured_s, best)
    return Gap(measured_s, here.step_time_s, seconds, tuple(lines))


def _diagnose(
    question: Question,
    here: Prediction,
    again_s: float,
    measured_s: float,
    best: Prediction | None,
) -> list[str]:
    ratio = measured_s / here.step_time_s
    lines = []
    if ratio > NETWORK:
        lines.append(
            f"{ratio:.1f} times slower than this layout should be: the network path or the input "
            "pipeline, not the layout; check that collectives use the fast interfaces (EFA or RDMA "
            "plug-in, GPUDirect, one interface a chip) with an all-reduce benchmark, then the input"
        )
    elif measured_s > here.step_time_high_s:
        lines.append(
            f"{ratio:.2f} times slower than predicted, above the interval up to "
            f"{here.step_time_high_s:.3g} s: unfused kernels, a slow chip or link, or clocks; "
            "compare the time of one layer on one chip with the compute part"
        )
        lines += _one_to_blame(here, measured_s)
    elif measured_s < here.step_time_low_s:
        lines.append(f"faster than the interval from {here.step_time_low_s:.3g} s")
    else:
        lines.append(f"as predicted ({ratio:.2f} of it): the layout explains the time")
    taxes = {"recomputation": again_s, **_taxes(here)}
    for name, seconds in sorted(taxes.items(), key=lambda item: -item[1]):
        if seconds > 0.05 * here.step_time_s:
            line = f"{name} costs {seconds / here.step_time_s:.0%} of the predicted step"
            few = f"; {too_few(question, here)}" if name == TITLES["bubble"] else ""
            lines.append(line + few)
    if best and best.step_time_s < 0.97 * here.step_time_s:
        gain = here.step_time_s / best.step_time_s - 1
        lines.append(f"{best.name} would be {gain:.0%} faster on the same chips")
    return lines


def _one_to_blame(here: Prediction, measured_s: float) -> list[str]:
    """The largest traffic, and how slow it would be if it alone held up the step."""
    name = max(TRAFFIC, key=lambda part: here.time_parts[part])
    seconds = here.time_parts[name]
    if seconds < 0.05 * here.step_time_s:
        return []
    share = seconds / (seconds + measured_s - here.step_time_s)
    return [
        f"if {TITLES[name]} alone is to blame, it runs at {share:.0%} of the bandwidth that this "
        "network should give: a fault of the fabric; test that collective on these nodes alone"
    ]


def _taxes(here: Prediction) -> dict[str, float]:
    skipped = ("compute", "overhead", "optimizer")
    return {TITLES[name]: part for name, part in here.time_parts.items() if name not in skipped}
