"""What surviving costs: how long takeovers last, and what keeping state elsewhere adds to a step.

Takeovers are those of `meshwright drill`, whose run with faults must end with the bits of the run
without. Costs are medians of whole runs in turn, with redundancy and without any; without, the
ranks talk over gloo instead of the fabric of the members, so both are in the figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

JOB = Path(__file__).parents[1] / "recipes" / "survive.toml"
MESHWRIGHT = Path(sys.executable).with_name("meshwright")
SIZES = {8: (50, 2), 16: (10, 4), 64: (2, 16)}  # ranks: kills, replicas
KINDS = ("none", "twin", "mirror", "shadow", "parity")
COST_STEPS, WARM_UP_STEPS = 40, 10
LIMIT_S = 1200


def command(*arguments: str) -> str:
    """What `meshwright` prints. Raises CalledProcessError."""
    done = subprocess.run(
        [str(MESHWRIGHT), *arguments], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    return done.stdout


def drill(ranks: int, kinds: str, faults: int, replicas: int) -> dict[str, Any]:
    """The document of one drill."""
    size = ["-o", f"layout.dp_replicate={replicas}", "-o", f"cluster.ref=local:{ranks}"]
    size += ["-o", f"data.global_batch={max(8, 2 * replicas)}"]
    asked = ["--faults", str(faults), "--kinds", kinds, "--json"]
    found: dict[str, Any] = json.loads(command("drill", str(JOB), *size, *asked))
    return found


def takeover_row(ranks: int, kind: str, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    times = [fault["takeover_s"] for fault in found["faults"] if fault["takeover_s"] is not None]
    return [
        f"{ranks} ranks, {kind}",
        str(len(times)),
        _ms(found["takeover_p50_s"]),
        _ms(found["takeover_p95_s"]),
        _ms(found["next_commit_p95_s"]),
        str(found["lost_steps"]),
        "same" if found["bit_identical"] else "DIFFERENT",
    ]


def step_s(kind: str, root: Path) -> float:
    """The median step of one run."""
    spares = "1" if kind == "shadow" else "0"
    asked = {
        "job.steps": str(COST_STEPS),
        "resilience.redundancy": f'"{kind}"',
        "cluster.spares": spares,
        "checkpoint.every": "1000",
    }
    overrides = [part for key, value in asked.items() for part in ("-o", f"{key}={value}")]
    command("train", str(JOB), "--run-dir", str(root), *overrides)
    lines = (root / "metrics.jsonl").read_text().splitlines()
    times = [line["step_time_s"] for line in map(json.loads, lines)]
    return float(statistics.median(times[WARM_UP_STEPS:]))


def costs(kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """The median step of each run, in seconds, kinds in turn."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for kind in kinds:
                found[kind].append(step_s(kind, Path(folder) / f"{kind}-{turn}"))
    return found


def cost_rows(found: dict[str, list[float]]) -> list[list[str]]:
    """One line for each kind; the last column is the median of the ratios to none, by turn."""
    rows = []
    for kind, times in found.items():
        ratios = [with_s / none_s for with_s, none_s in zip(times, found["none"], strict=True)]
        middle = statistics.median(ratios)
        rows.append([kind, _ms(statistics.median(times)), f"{100 * (middle - 1):+.1f} %"])
    return rows


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def main() -> None:
    """Measure what is asked for, and print or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    asked = parser.parse_args()
    facts = {"command": results.command(), "processes that want a core, before": results.busy()}
    rows = []
    for ranks in asked.ranks:
        faults, replicas = SIZES[ranks]
        rows.append(takeover_row(ranks, "kill", drill(ranks, "kill", faults, replicas)))
    if asked.freezes:
        rows.append(takeover_row(8, "freeze", drill(8, "freeze", asked.freezes, 2)))
    header = ["losses", "number", "p50", "p95", "next commit, p95", "steps lost", "bits"]
    body = [results.table(header, rows)] if rows else []
    if asked.rounds:
        kinds = list(dict.fromkeys(["none", *asked.kinds]))
        found = cost_rows(costs(kinds, asked.rounds))
        body.append(results.table(["8 ranks", "step", "against none"], found))
    text = results.section("Survival", facts, "\n\n".join(body))
    sys.stdout.write(text)
    if asked.write:
        results.write(text)


if __name__ == "__main__":
    main()
