"""Tokens per second of two ranks on this machine: ours, DDP, Accelerate with FSDP2, DeepSpeed.

Same modules, weights, batches and optimizer for all, one thread a rank, gloo, fp32. Rounds go
through all peers in turn, each a fresh pair of processes, so that a slow spell of the machine does
not fall on one peer alone. The peers live in an environment of their own: `--setup` makes it.
Exits 1 if a peer does not train the same model, or one of ours does not run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence

import results
from peers import peers
from peers_launch import PYTHON, RANKS, VENV, Course, Run, launch, set_up
from workload import Load

OURS = "Meshwright"
LOSS_TOLERANCE = 1e-4  # relative
COURSES = (
    Course(Load("tiny", global_batch=8, seq_len=256), steps=20),
    Course(Load("10m", global_batch=4, seq_len=256), steps=10),
)

Rounds = Mapping[str, Sequence[Run | str]]
"""The launches of each peer; a text says why one failed."""


def compare(course: Course, rounds: int) -> Rounds:
    """Round after round through all peers, each round beginning with the next one."""
    names = list(peers())
    found: dict[str, list[Run | str]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(run := launch(name, course))
            print(f"{course.load.model}, round {number + 1}: {name}: {said(run)}", file=sys.stderr)
    return found


def said(run: Run | str) -> str:
    """One launch in a few words."""
    return f"failed: {run}" if isinstance(run, str) else f"{run.step_s * 1e3:.1f} ms a step"


def completed(runs: Sequence[Run | str]) -> list[Run]:
    """The launches that came to their end, if all did; a peer that fails at times has no figure."""
    done = [run for run in runs if isinstance(run, Run)]
    return done if len(done) == len(runs) else []


def loss_apart(runs: Sequence[Run], reference: Run) -> float:
    """Largest relative distance to the losses of `reference`, over all steps and launches."""
    pairs = [pair for run in runs for pair in zip(run.losses, reference.losses, strict=True)]
    return max(abs(loss - wanted) / wanted for loss, wanted in pairs)


def reference_of(found: Rounds) -> Run:
    """What all others are compared with: the first peer that ran. Exits if none did."""
    for runs in found.values():
        if done := completed(runs):
            return done[0]
    sys.exit("no trainer ran: see the lines above")


def row(name: str, runs: Sequence[Run | str], course: Course, reference: Run) -> list[str]:
    """One line of the table."""
    done = completed(runs)
    if not done:
        return [name, "does not run", "", "", ""]
    speeds = [course.load.tokens / run.step_s for run in done]
    return [
        name,
        f"**{statistics.median(speeds):.0f}**",
        f"{min(speeds):.0f} to {max(speeds):.0f}",
        f"{statistics.median(run.step_s for run in done) * 1e3:.1f}",
        f"{loss_apart(done, reference):.1e}",
    ]


def verdict(found: Rounds) -> str:
    """The fastest of ours against the fastest of the others."""
    step_s = {
        name: statistics.median(run.step_s for run in done)
        for name, runs in found.items()
        if (done := completed(runs))
    }
    if len({name.startswith(OURS) for name in step_s}) < 2:
        return "There is nothing to compare."
    ours = min((n for n in step_s if n.startswith(OURS)), key=step_s.__getitem__)
    other = min((n for n in step_s if not n.startswith(OURS)), key=step_s.__getitem__)
    pairs = zip(completed(found[ours]), completed(found[other]), strict=True)
    by_round = [theirs.step_s / mine.step_s for mine, theirs in pairs]
    return (
        f"{ours} is **{step_s[other] / step_s[ours]:.3f}** times as fast as {other}, the fastest "
        f"of the others ({min(by_round):.3f} to {max(by_round):.3f} by round)."
    )


def part(course: Course, found: Rounds) -> str:
    """Heading, table and verdict of one load."""
    reference = reference_of(found)
    load, losses = course.load, reference.losses
    header = ["trainer", "tokens/s", "range", "step, ms", "loss, rel"]
    rows = [row(name, runs, course, reference) for name, runs in found.items()]
    return (
        f"### {load.model}, {load.global_batch} x {load.seq_len} tokens a step\n\n"
        f"{results.table(header, rows)}\n\n{verdict(found)}\n"
        f"The loss goes from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps; "
        "`loss, rel` is how far from the\nfirst row's it was at worst.\n"
    )


def report(all_found: Mapping[Course, Rounds], rounds: int) -> str:
    """The section of RESULTS.md."""
    first = reference_of(next(iter(all_found.values())))
    named = {"Python": platform.python_version(), **first.versions}
    facts = {
        "versions": ", ".join(f"{name} {version}" for name, version in named.items()),
        "command": results.command(),
        "load of the machine at the end": results.busy(),
    }
    body = (
        f"{RANKS} ranks, one thread each, gloo, fp32, AdamW, clipped. Median of {rounds} launches "
        "of the median step.\n\n"
    )
    body += "\n".join(part(course, found) for course, found in all_found.items())
    return results.section("Two ranks: ours against other trainers", facts, body)


def faults(all_found: Mapping[Course, Rounds]) -> list[str]:
    """Why the comparison is not a fair one."""
    told = []
    for course, found in all_found.items():
        reference = reference_of(found)
        for name, runs in found.items():
            reasons = [run for run in runs if isinstance(run, str)]
            if reasons and name.startswith(OURS):
                told.append(f"{course.load.model}: {name} failed: {reasons[0]}")
            done = completed(runs)
            if done and not loss_apart(done, reference) <= LOSS_TOLERANCE:
                told.append(f"{course.load.model}: {name} does not train the same model")
    return told


def main() -> int:
    """Measure, print, and say whether the comparison was a fair one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--setup", action="store_true", help="make .venv-bench first")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each peer")
    parser.add_argument("--models", nargs="+", default=["tiny", "10m"], help="tiny, 10m")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    options = parser.parse_args()
    if options.setup:
        set_up()
        for name in peers():  # DeepSpeed compiles its own ops on first use: not in a timed launch
            found = launch(name, Course(COURSES[0].load, steps=1))
            print(f"set-up: {name}: {said(found)}", file=sys.stderr)
    if not PYTHON.exists():
        print(f"{VENV.name} is not there: run it with --setup first", file=sys.stderr)
        return 2
    courses = [course for course in COURSES if course.load.model in options.models]
    all_found = {course: compare(course, options.rounds) for course in courses}
    unfair = faults(all_found)
    for fault in unfair:
        print(fault, file=sys.stderr)
    text = report(all_found, options.rounds)
    print(text)
    if options.write and not unfair:
        results.write(text)
    return 1 if unfair else 0


if __name__ == "__main__":
    sys.exit(main())
