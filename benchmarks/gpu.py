"""Tokens per second and MFU on one GPU: ours beside torchtitan, with a 1B and an 8B-shaped model.

Same model, batch, sequence and tokens (random ones), both compiled, nothing recomputed, AdamW on
fp32 masters, clipped; FP8 is row-wise with the head in bf16. Rounds go through all cases and both
trainers in turn, each launch a fresh process. Without a CUDA GPU it says so and measures nothing.
torchtitan lives in an environment of its own: `--setup` makes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import results
import torch
from gpu_case import LEAST_GIB, WARM_UP, Case, cases_for, known_peak
from gpu_launch import OURS, PEER, PYTHON, Run, launch, set_up

from meshwright.train.device import measure_peak_flops

_LONGEST_LAUNCH_S = 150.0

Found = Mapping[tuple[Case, str], Sequence[Run | str]]
"""The launches of each case with each trainer; a text says why one failed."""


def compare(cases: Sequence[Case], rounds: int, budget_s: float, peer_python: Path) -> Found:
    """Up to `rounds` rounds, and no further one that would not end within `budget_s`. Who comes
    first alternates."""
    found: dict[tuple[Case, str], list[Run | str]] = {}
    start = began = time.monotonic()
    for number in range(rounds):
        for index, case in enumerate(cases):
            for name in sorted((OURS, PEER), reverse=(index + number) % 2 == 1):
                left_s = budget_s - (time.monotonic() - start)
                run = launch(name, case, peer_python, min(left_s, _LONGEST_LAUNCH_S))
                found.setdefault((case, name), []).append(run)
                print(f"round {number + 1}: {case.label}: {name}: {said(run)}", file=sys.stderr)
        now = time.monotonic()
        if now + (now - began) > start + budget_s:
            break
        began = now
    return found


def said(run: Run | str) -> str:
    """One launch in a few words."""
    return f"failed: {run}" if isinstance(run, str) else f"{run.speed:.0f} tokens/s"


def completed(runs: Sequence[Run | str]) -> list[Run]:
    """The launches that came to their end."""
    return [run for run in runs if isinstance(run, Run)]


def row(case: Case, name: str, runs: Sequence[Run | str], peak: float) -> list[str]:
    """One line of the table."""
    done = completed(runs)
    if not done:
        return [case.label, f"{name}: {runs[0]}", "", "", "", "", ""]
    speed = statistics.median(run.speed for run in done)
    every = [s for run in done for s in run.tokens_per_s]
    mfu = speed * case.model.flops_per_token(case.seq_len) / peak
    return [
        case.label,
        name,
        f"**{speed:.0f}**",
        f"{min(every):.0f} to {max(every):.0f}",
        f"{mfu:.1%}",
        f"{max(run.memory_gib for run in done):.0f}",
        f"{done[0].losses[0]:.2f} to {done[0].losses[-1]:.2f}",
    ]


def verdicts(found: Found) -> list[str]:
    """Ours against the peer, case by case."""
    told = []
    for case in dict.fromkeys(case for case, _ in found):
        ours, theirs = completed(found[case, OURS]), completed(found[case, PEER])
        if ours and theirs:
            speeds = [statistics.median(run.speed for run in runs) for runs in (ours, theirs)]
            ratio = speeds[0] / speeds[1]
            told.append(f"{case.label}: ours is **{ratio:.3f}** times as fast as {PEER}.")
    return told or ["There is nothing to compare."]


def report(found: Found, device: str, peak: float, source: str) -> str:
    """The section of RESULTS.md."""
    facts = {
        "GPU": f"{device}; peak {peak / 1e12:.0f} TFLOP/s, dense bf16 ({source})",
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "command": results.command(),
    }
    header = ["model", "trainer", "tokens/s", "steps", "MFU", "GiB", "loss"]
    rows = [row(case, name, runs, peak) for (case, name), runs in found.items()]
    rounds = max(len(runs) for runs in found.values())
    body = (
        f"Median of {rounds} launches of the median step after {WARM_UP}; random tokens. MFU by "
        "our\ncount of FLOPs (`ModelSpec.flops_per_token`) for both, against the peak of bf16 also "
        "in FP8.\n\n"
    )
    body += results.table(header, rows) + "\n\n" + "\n".join(verdicts(found))
    return results.section("One GPU: ours beside torchtitan", facts, body)


def as_json(found: Found, device: str, peak: float) -> str:
    """Everything that was measured."""
    runs = [
        {
            "case": asdict(case),
            "trainer": name,
            "flops_per_token": case.model.flops_per_token(case.seq_len),
            "runs": [{"failed": r} if isinstance(r, str) else asdict(r) for r in launches],
        }
        for (case, name), launches in found.items()
    ]
    return json.dumps({"gpu": device, "peak_flops": peak, "cases": runs}, indent=1)


def why_not() -> str | None:
    """Why nothing can be measured here, if so."""
    if not torch.cuda.is_available():
        return f"no CUDA GPU (torch {torch.__version__} finds none)"
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{gib:.0f} GiB of GPU memory; {LEAST_GIB:.0f} are needed" if gib < LEAST_GIB else None


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--setup", action="store_true", help="make .venv-bench-gpu first")
    parser.add_argument("--peer-python", type=Path, default=PYTHON, help="has torchtitan")
    parser.add_argument("--rounds", type=int, default=3, help="at most, as the budget allows")
    parser.add_argument("--budget-s", type=float, default=450.0, help="seconds for all launches")
    parser.add_argument("--models", nargs="+", default=["1B", "8B"], help="1B, 8B")
    parser.add_argument("--json", type=Path, help="write everything measured there")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if ours does not run."""
    asked = options()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    if asked.setup:
        set_up()
    properties = torch.cuda.get_device_properties(0)
    cases = [c for c in cases_for(properties.total_memory / 2**30) if c.flavour in asked.models]
    peak, source = known_peak(properties.name), "data sheet"
    if peak is None:
        peak, source = measure_peak_flops(torch.bfloat16, torch.device("cuda", 0), 1), "measured"
        torch.cuda.empty_cache()
    found = compare(cases, asked.rounds, asked.budget_s, asked.peer_python)
    text = report(found, properties.name, peak, source)
    print(text)
    if asked.json is not None:
        asked.json.write_text(as_json(found, properties.name, peak), encoding="utf-8")
    failed = any(not completed(runs) for (_, name), runs in found.items() if name == OURS)
    if asked.write and not failed:
        results.write(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
