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
    "Meshwright, its own loader (tokens)",
    "Meshwright, numpy iterator (tokens)",
    "Meshwright, behind its feed (tokens)",
    "mosaicml-streaming",
    "LitData",
    "WebDataset",
    "HF datasets, map",
    "HF datasets, iterable",
)
_RAW, _TORCH, _OURS, _LOADER, _ARRAYS, _FEED, *_LIBRARIES = _NAMES
_CASES = {
    "tokens, sequential": ("tokens", False, 0),
    "tokens, shuffled": ("tokens", True, 0),
    "images, shuffled": ("images", True, 0),
    "tokens, shuffled, 2 workers": ("tokens", True, 2),
}
_FIGURES = {"samples_s": "", "first_s": ": first", "bytes": ": bytes"}
_LEAST = 2.0  # times as fast as the best library
_ROW = 2048
_ROWS = 16_384  # 33.6 million tokens, 64 MiB
_DEEP = 10**9  # samples; a peer that has no epochs beyond one resumes at three quarters of it
_TASK_S, _LAUNCH_S = 60.0, 300.0  # limits


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


Tasks = Sequence[dict[str, Any]]


def launch(python: str, name: str, folder: Path, tasks: Tasks) -> list[dict[str, Any]]:
    """What one process found, task by task; as "failed", why it did not."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [python, str(_HERE / "data_worker.py"), name, str(folder), str(out)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"}
        limited = [{"limit_s": _TASK_S, **task} for task in tasks]
        try:
            done = subprocess.run(
                [*command, json.dumps(limited)],
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                timeout=_LAUNCH_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [{"failed": f"not done after {_LAUNCH_S:g} s"}] * len(tasks)
        sys.stderr.write(done.stderr)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1][:200]
            return [{"failed": said}] * len(tasks)
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def measure(python: str, folder: Path, rounds: int, seconds: float) -> dict[str, Figures]:
    """All peers, round after round, each round beginning with the next one; then ours against
    others, in turns."""
    found = {name: Figures() for name in _NAMES}

    def run(name: str, tasks: Tasks) -> list[dict[str, Any]]:
        told = launch(python, name, folder, tasks)
        for one in told:
            found[name].failed = found[name].failed or one.get("failed")
        return told

    for name in _NAMES:
        about = {"do": "prepare", "count": _ROWS, "images": str(_IMAGES)}
        run(name, [{**about, "course": course} for course in _courses(name)])
    for number in range(rounds):
        first = number % len(_NAMES)
        for name in _NAMES[first:] + _NAMES[:first]:
            cases = {what: case for what, case in _CASES.items() if case[0] in _courses(name)}
            tasks = [_read(*case, seconds) for case in cases.values()]
            at = _DEEP if name.startswith("Meshwright") else _ROWS * 3 // 4
            *read, resumed = run(name, [*tasks, {"do": "resume", "at": at, "course": "tokens"}])
            for what, told in zip(cases, read, strict=True):
                for figure, kept in (
                    ("samples_s", ""),
                    ("first_s", ": first"),
                    ("bytes", ": bytes"),
                ):
                    if figure in told:
                        found[name].add(what + kept, told[figure])
            if "resume_s" in resumed:
                found[name].add("resume", resumed["resume_s"])
    for _ in range(rounds):
        for mine, other in pairs(found):
            options = {"do": "against", "other": other, "pairs": 20, "batches": 500}
            (told,) = run(mine, [{**options, "course": "tokens"}])
            if "ratio" in told:
                found[mine].add(f"against {other}", told["ratio"])
    return found


def _read(course: str, shuffled: bool, workers: int, seconds: float) -> dict[str, Any]:
    about = {"do": "read", "course": course, "shuffled": shuffled}
    return {**about, "workers": workers, "seconds": seconds}


def _courses(name: str) -> list[str]:
    return ["tokens"] if "(tokens)" in name else ["tokens", "images"]


def fastest(found: dict[str, Figures], what: str) -> str:
    """The library that reads most of `what` a second."""
    return max(_LIBRARIES, key=lambda name: found[name].median(what) or 0.0)


def pairs(found: dict[str, Figures]) -> dict[tuple[str, str], float]:
    """Of ours and another how many times as fast ours is to be at least, shuffled."""
    best = fastest(found, "tokens, shuffled")
    return {
        (_ARRAYS, _RAW): 0.8,
        (_LOADER, _RAW): 0.8,
        (_OURS, _TORCH): 0.8,
        (_OURS, best): _LEAST,
    }


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
    told = []
    for (mine, other), least in pairs(found).items():
        ratio = found[mine].median(f"against {other}") or 0.0
        words = f"{mine}: {ratio:.2f} times as fast as {other} (target {least:g})"
        told.append((words, ratio >= least))
    what = "tokens, shuffled, 2 workers"
    best = fastest(found, what)
    ours, theirs = (found[name].median(what) or 0.0 for name in (_LOADER, best))
    words = f"{_LOADER}, 2 workers: {ours / max(theirs, 1e-9):.2f} times as fast as {best} with 2"
    told.append((f"{words} (target {_LEAST:g})", ours >= _LEAST * theirs))
    resume = found[_OURS].median("resume") or float("inf")
    words = f"resumes at sample 10^9 in {resume * 1e3:.1f} ms (target 50)"
    return [*told, (words, resume <= 0.05)]


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
        "Rates are from the first\nbatch on. First batch, resume and memory are of shuffled tokens "
        "without workers; memory is what\nreading added to the peak, mapped pages included. Ours "
        "resumes at sample 10^9, others at three\nquarters of the one epoch; `-` where a library "
        "has no such state or course. A step of torch's\nDataLoader costs as much as reading one "
        "of these batches, and a message of its workers some fifty\ntimes as much: our own loader "
        "puts many into one. The feed hands batches from thread to thread: it\nis for steps of "
        "milliseconds.",
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
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement")
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
