"""Reading the same samples: ours, a raw memory map, and four libraries, each in fresh processes.

Rounds go through all peers in turn. The libraries live in an environment of their own: `--setup`
makes it. Exits 1 if a target of ours is missed or a peer of ours fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results

_HERE = Path(__file__).parent
_ROOT = _HERE.parent
VENV = _ROOT / ".venv-bench-data"
_PACKAGES = (
    "torch==2.13.0",
    "mosaicml-streaming==0.13.0",
    "litdata==0.2.76",
    "webdataset==1.0.2",
    "datasets==5.0.1",
    "pillow",
)
_IMAGES = _ROOT.parent / "shared" / "data" / "image_text" / "emoji32.zip"
_NAMES = (
    "raw memmap, no loader (tokens)",
    "torch DataLoader over a memmap (tokens)",
    "Meshwright, in torch's DataLoader",
    "Meshwright, numpy iterator (tokens)",
    "Meshwright, behind its feed (tokens)",
    "mosaicml-streaming",
    "LitData",
    "WebDataset",
    "HF datasets, map",
    "HF datasets, iterable",
)
_OURS = "Meshwright, in torch's DataLoader"
_PAIRS = {
    (_NAMES[3], _NAMES[0]): 0.8,
    (_OURS, _NAMES[1]): 0.8,
    (_OURS, "LitData"): 2.0,  # the fastest of the libraries
}
_ROW = 2048
_ROWS = 16_384  # 33.6 million tokens, 64 MiB
_DEEP = 10**9  # samples; a peer that has no epochs beyond one resumes at three quarters of it
_LAUNCH_TIMEOUT_S = 180.0


@dataclass
class Figures:
    """What was found of one peer, by what was measured, over all rounds."""

    of: dict[str, list[float]] = field(default_factory=dict)
    failed: str | None = None

    def add(self, what: str, value: float) -> None:
        """One more."""
        self.of.setdefault(what, []).append(value)

    def median(self, what: str) -> float | None:
        """None if it was not measured."""
        return statistics.median(self.of[what]) if self.of.get(what) else None


def set_up() -> None:
    """Make the environment, or bring it up to date."""
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, symlinks=True, with_pip=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")
    subprocess.run([str(VENV / "bin" / "python"), "-m", "pip", "install", *_PACKAGES], check=True)


def launch(python: str, name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any] | str:
    """What one process found, or the last line of why it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [python, str(_HERE / "data_worker.py"), name, str(folder), str(out)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, json.dumps(options)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LAUNCH_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {_LAUNCH_TIMEOUT_S:g} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1][:200]
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def measure(python: str, folder: Path, rounds: int, seconds: float) -> dict[str, Figures]:
    """All peers, round after round, each round beginning with the next one."""
    found = {name: Figures() for name in _NAMES}
    for course in ("tokens", "images"):
        for name in _of_course(course):
            prepare = {"do": "prepare", "course": course, "count": _ROWS, "images": str(_IMAGES)}
            _run(python, name, folder / course, prepare, found[name])
    shuffled = [("tokens, shuffled", "tokens", True, 0), ("images, shuffled", "images", True, 0)]
    cases = [("tokens, sequential", "tokens", False, 0), *shuffled]
    cases.append(("tokens, shuffled, 2 workers", "tokens", True, 2))
    for number in range(rounds):
        for what, course, mixed, workers in cases:
            names = _of_course(course)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                options = {
                    "do": "read",
                    "shuffled": mixed,
                    "workers": workers,
                    "seconds": seconds,
                }
                if told := _run(python, name, folder / course, options, found[name]):
                    found[name].add(what, told["samples_s"])
                    found[name].add(f"{what}: first", told["first_s"])
                    found[name].add(f"{what}: bytes", told["bytes"])
        for mine, other in _PAIRS:
            options = {"do": "against", "other": other, "pairs": 20, "batches": 500}
            if told := _run(python, mine, folder / "tokens", options, found[mine]):
                found[mine].add(f"against {other}", told["ratio"])
        for name in _of_course("tokens"):
            at = _DEEP if name.startswith("Meshwright") else _ROWS * 3 // 4
            told = _run(python, name, folder / "tokens", {"do": "resume", "at": at}, found[name])
            if told and "resume_s" in told:
                found[name].add("resume", told["resume_s"])
    return found


def _of_course(course: str) -> list[str]:
    return [name for name in _NAMES if course == "tokens" or "(tokens)" not in name]


def _run(
    python: str, name: str, folder: Path, options: dict[str, Any], figures: Figures
) -> dict[str, Any] | None:
    told = launch(python, name, folder, options)
    print(f"{name}: {options}: {told}", file=sys.stderr)
    if isinstance(told, str):
        figures.failed = figures.failed or told
        return None
    return told


def rows_of(found: dict[str, Figures]) -> list[list[str]]:
    """The table."""
    rows = []
    for name, figures in found.items():
        cells = [name]
        for what in ("tokens, sequential", "tokens, shuffled", "tokens, shuffled, 2 workers"):
            rate = figures.median(what)
            cells.append("-" if rate is None else f"{rate * _ROW / 1e6:.1f}")
        images = figures.median("images, shuffled")
        cells.append("-" if images is None else f"{images:,.0f}")
        first, more = (figures.median(f"tokens, shuffled: {w}") for w in ("first", "bytes"))
        cells.append("-" if first is None else f"{first * 1e3:.1f}")
        resume = figures.median("resume")
        cells.append("-" if resume is None else f"{resume * 1e3:.1f}")
        cells.append("-" if more is None else f"{more / 2**20:.0f}")
        rows.append(cells)
    return rows


def targets(found: dict[str, Figures]) -> list[tuple[str, bool]]:
    """Each target in words, and whether it is met."""
    pairs = {what: found[what[0]].median(f"against {what[1]}") or 0.0 for what in _PAIRS}
    told = [
        (f"{mine}: {pairs[mine, other]:.2f} times as fast as {other} (target {least:g})", least)
        for (mine, other), least in _PAIRS.items()
    ]
    resume = found[_OURS].median("resume") or float("inf")
    return [
        *((words, pairs[pair] >= least) for pair, (words, least) in zip(_PAIRS, told, strict=True)),
        (f"resumes at sample 10^9 in {resume * 1e3:.1f} ms (target 50)", resume <= 0.05),
    ]


def report(found: dict[str, Figures], rounds: int) -> str:
    """The section of RESULTS.md."""
    header = [
        "reader",
        "sequential, M tokens/s",
        "shuffled",
        "shuffled, 2 workers",
        "images/s",
        "first batch, ms",
        "resume, ms",
        "memory, MiB",
    ]
    facts = {
        "versions": ", ".join(_PACKAGES),
        "command": results.command(),
        "load of the machine at the end": results.busy(),
    }
    failed = [f"{name} failed: {f.failed}" for name, f in found.items() if f.failed]
    met = [f"{'met' if ok else 'MISSED'}: {words}" for words, ok in targets(found)]
    lines = [
        f"{_ROWS:,} rows of {_ROW} uint16 ids as int64 batches of 8; 1,581 PNGs of 32 x 32, by "
        f"Pillow.\nMedian of {rounds} processes each, pages in memory, one thread. WebDataset and "
        "the iterable of\nHugging Face shuffle by a buffer of 4,096 samples, the others over all. "
        "First batch, resume and\nmemory are of shuffled tokens without workers; memory is what "
        "reading added to the peak, mapped\npages included. Ours resumes at sample 10^9, others "
        "at three quarters of the one epoch; `-` where\na library has no such state or course. "
        "The feed is for steps of milliseconds: to hand a batch of\n30 us from thread to thread "
        "costs more than to read it.",
        results.table(header, rows_of(found)),
        "\n".join(f"- {line}" for line in met + failed),
    ]
    return results.section("Reading data: ours against other loaders", facts, "\n\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--setup", action="store_true", help=f"make {VENV.name} first")
    parser.add_argument("--python", default=str(VENV / "bin" / "python"), help="with the libraries")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args(arguments)
    if options.setup:
        set_up()
    if not Path(options.python).exists():
        print(f"{VENV.name} is not there: run it with --setup first", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.python, Path(folder), options.rounds, options.seconds)
    text = report(found, options.rounds)
    print(text)
    if options.write:
        results.write(text)
    return 0 if all(ok for _, ok in targets(found)) and not found[_OURS].failed else 1


if __name__ == "__main__":
    sys.exit(main())
