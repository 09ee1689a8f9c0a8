"""What redundancy and checks of chips cost without a fault, against the same fabric without them.

One run for each layout: its ranks switch redundancy and checks off and on every few steps, all at
the same steps (`survival_cost_worker.py`), so whatever else the machine does falls on both. Where
it does much, this says little, for whoever waits looks about and takes more of the processor the
longer it waits; so the processor time of the calls of each part is said as well, which others
change little (checks include the witness; either includes the looking about while its messages go).
What agent and conductor take is beside it, and by the second, not by the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
import survival_cost_worker as worker
from survival_cost_worker import BLOCK, CONDUCTOR, FOLDER, TURNS, WARM_UP, turn_of

from meshwright.cli import app, session

JOB = Path(__file__).parents[1] / "recipes" / "survive.toml"
TWINS = {"resilience.redundancy": '"twin"'}
MIRRORS = {"resilience.redundancy": '"mirror"'}
SHARDED = {**MIRRORS, "layout.dp_replicate": "1", "layout.dp_shard": "2"}
PARITY = {**SHARDED, "resilience.redundancy": '"parity"'}
LONGER = {"data.global_batch": "32", "layout.micro_batch": "8"}  # four times the tokens of a rank
CASES: dict[str, dict[str, str]] = {
    "twin, dp2 x tp2 x pp2": TWINS,
    "twin, 4 times the tokens": {**TWINS, **LONGER},
    "mirror, dp2 x tp2 x pp2": MIRRORS,
    "mirror, fsdp2 x tp2 x pp2": SHARDED,
    "mirror, 4 times the tokens": {**SHARDED, **LONGER},
    "parity, fsdp2 x tp2 x pp2": PARITY,
}


PARTS = ("checks", "witness", "redundancy")


@dataclass(frozen=True)
class Found:
    """Of one run, by turn: for each block of it the median step, in seconds of processor of all
    ranks and in seconds of the slowest. What share of the first is spent in the calls of each of
    `parts`, and what agent and conductor took of the processor in a second."""

    cpu_s: Mapping[str, Sequence[float]]
    wall_s: Mapping[str, Sequence[float]]
    parts: Mapping[str, float]
    others: float


def play(overrides: Mapping[str, str], rounds: int) -> Found:
    """One run."""
    steps = WARM_UP + BLOCK * len(TURNS) * rounds + 1
    asked = {
        **overrides,
        "job.steps": str(steps),
        "job.eval_every": str(steps),
        "cluster.spares": "0",
        "checkpoint.every": str(steps),
    }
    words = [part for key, value in asked.items() for part in ("-o", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER], os.environ[CONDUCTOR] = folder, str(os.getpid())
        run = Path(folder) / "run"
        app.app(["train", str(JOB), "--run-dir", str(run), *words], standalone_mode=False)
        members = [json.loads(path.read_text()) for path in Path(folder).glob("member-*.json")]
    return read(members)


def read(members: Sequence[Mapping[str, list[Any]]]) -> Found:
    """What the members of one run have found."""
    cpu: dict[int, float] = {}
    wall: dict[int, float] = {}
    spent: dict[str, dict[int, float]] = {part: {} for part in PARTS}
    for member in members:
        for step, cpu_s, wall_s, parts in member["steps"]:
            cpu[step] = cpu.get(step, 0.0) + cpu_s
            wall[step] = max(wall.get(step, 0.0), wall_s)
            for part in PARTS:
                spent[part][step] = spent[part].get(step, 0.0) + parts.get(part, 0.0)
    shares = {part: _share(of_steps, cpu) for part, of_steps in spent.items()}
    begun, *_, ended = members[0]["others"]
    others_s = sum(b - a for a, b in zip(begun, ended, strict=True))
    all_s = statistics.mean(wall.values()) * len(members[0]["others"])
    return Found(_blocks(cpu), _blocks(wall), shares, others_s / all_s)


def _share(of_steps: Mapping[int, float], cpu: Mapping[int, float]) -> float:
    steps = [step for step in cpu if turn_of(step) == "all"]
    return statistics.median(of_steps[step] / cpu[step] for step in steps)


def _blocks(of_steps: Mapping[int, float]) -> dict[str, list[float]]:
    blocks: dict[int, list[float]] = {}
    for step in sorted(of_steps):
        blocks.setdefault((step - WARM_UP) // BLOCK, []).append(of_steps[step])
    found: dict[str, list[float]] = {turn: [] for turn in TURNS}
    for block, values in blocks.items():
        turn = turn_of(WARM_UP + block * BLOCK)
        assert turn is not None
        found[turn].append(statistics.median(values))
    return found


def against(found: Mapping[str, Sequence[float]]) -> str:
    """By how much all of it takes more than the fabric alone: the median of the ratios of blocks
    that follow on each other, and where the middle half of them lies."""
    alone = found["fabric alone"]
    ratios = [100 * (a / b - 1) for a, b in zip(found["all"], alone, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def row(name: str, found: Found) -> list[str]:
    """One line of the table."""
    return [
        name,
        f"{statistics.median(found.cpu_s['fabric alone']) * 1e3:.0f} ms",
        against(found.cpu_s),
        against(found.wall_s),
        *(f"{100 * found.parts[part]:.2f} %" for part in PARTS),
        f"{100 * found.others:.1f} %",
    ]


HEADER = [
    "8 ranks",
    "step, fabric alone, CPU of all",
    "all of it, CPU",
    "all of it, seconds",
    *(f"in {part}, CPU" for part in PARTS),
    "agent and conductor, of a core",
]


def main() -> None:
    """Measure what is asked for, and print or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    asked = parser.parse_args()
    session.WORKER = worker.__name__
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    facts = {"command": results.command(), "processes that want a core, before": results.busy()}
    rows = []
    for name in asked.cases:
        rows.append(row(name, play(CASES[name], asked.rounds)))
        print(*rows[-1], sep="  ", file=sys.stderr)
    body = __doc__.partition("\n\n")[2] if __doc__ else ""
    text = results.section(
        "Survival: without a fault", facts, f"{body}\n{results.table(HEADER, rows)}"
    )
    sys.stdout.write(text)
    if asked.write:
        results.write(text)


if __name__ == "__main__":
    main()
