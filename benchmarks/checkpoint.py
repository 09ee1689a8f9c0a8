"""Saving and restoring a model in training: ours beside DCP, torch_checkpointing and moonclip.

Each peer trains the same model in a process of its own. They save in turn, one at a time, and then
restore in turn, in fresh processes; what is restored must have the bits of what was saved. The
libraries live in an environment of their own: `--setup` makes it. Exits 1 if a target is missed.
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
VENV = _ROOT / ".venv-bench-checkpoint"
_PEERS = ("torch==2.13.0", "torch_checkpointing==0.1.1", "moonclip==0.3.1")
_NEEDED = ("numpy", "fsspec", "xxhash", "zstandard", "cryptography", "pydantic", "ml_dtypes")
_TEXT = _ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"
UPDATES, WHOLE = "Meshwright, updates", "Meshwright, whole commits"
RAW = f"{WHOLE}, raw"
THEIRS = ("DCP", "DCP, asynchronous", "torch_checkpointing", "moonclip")
NAMES = (*THEIRS, UPDATES, WHOLE, RAW)
_MODEL = {"width": 576, "layers": 11, "text": str(_TEXT)}


@dataclass
class Figures:
    """What was found of one peer: of its first save, of the others, of its restores."""

    first: dict[str, Any] = field(default_factory=dict)
    saves: list[dict[str, Any]] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None

    def median(self, what: str) -> float:
        """Of all saves or restores; not a number if there are none."""
        found = [one[what] for one in self.saves + self.restores if what in one]
        return statistics.median(found) if found else float("nan")

    @property
    def bytes(self) -> int:
        """Written by all saves but the first."""
        return sum(save["bytes"] for save in self.saves)

    @property
    def extra_bytes(self) -> int:
        """The most that was held beside training."""
        return max((save["extra_bytes"] for save in [self.first, *self.saves] if save), default=0)


def set_up() -> None:
    """Make the environment, or bring it up to date."""
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, symlinks=True, with_pip=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install"]
    subprocess.run(
        [*pip, "--constraint", str(_ROOT / "constraints.txt"), *_PEERS, *_NEEDED], check=True
    )


class Worker:
    """One process, which answers each line with a line."""

    def __init__(self, python: str, name: str, folder: Path, options: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder.parent / f"{name}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, str(_HERE / "checkpoint_worker.py"), name, str(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )

    def ask(self) -> dict[str, Any] | str:
        """What the next line brings, or the last line of why it failed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._why()
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return self._why()

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _why(self) -> str:
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it wrote nothing"])[-1][:200]


def ask_once(python: str, name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any] | str:
    """One question to a process of its own."""
    worker = Worker(python, name, folder, options)
    told = worker.ask()
    worker.end()
    print(f"{name}: {told}", file=sys.stderr)
    return told


def measure(
    python: str, names: Sequence[str], folder: Path, saves: int, rounds: int, warm_up: int
) -> tuple[dict[str, Figures], int]:
    """What was found of each, and the bytes of the state."""
    found = {name: Figures() for name in names}
    options = {**_MODEL, "warm_up": warm_up, "do": "prepare"}
    prepared = ask_once(python, "prepare", folder / "prepare", options)
    assert isinstance(prepared, dict), prepared
    # All live at the same time, so there must be memory for all: the last is saved by itself.
    _save_in_turn(python, [name for name in names if name != RAW], folder, options, saves, found)
    _save_in_turn(python, [name for name in names if name == RAW], folder, options, 2, found)
    for number in range(rounds):
        for name in _from(number, names):
            if found[name].failed:
                continue
            told = ask_once(python, name, folder / name, {**options, "do": "restore"})
            if isinstance(told, str):
                found[name].failed = told
            elif told["digest"] != found[name].saves[-1]["digest"]:
                found[name].failed = "what was restored is not what was saved"
            else:
                found[name].restores.append(told)
    return found, prepared["bytes"]


def _save_in_turn(
    python: str,
    names: Sequence[str],
    folder: Path,
    options: dict[str, Any],
    saves: int,
    found: dict[str, Figures],
) -> None:
    asked = {**options, "do": "train"}
    workers = {name: Worker(python, name, folder / name, asked) for name in names}
    for number in range(saves + 1 if names else 0):
        for name in _from(number, names):
            if found[name].failed:
                continue
            told = workers[name].ask()
            print(f"{number} {name}: {told}", file=sys.stderr)
            if isinstance(told, str):
                found[name].failed = told
            elif number:
                found[name].saves.append(told)
            else:
                found[name].first = told
    for worker in workers.values():
        worker.end()


def _from(number: int, names: Sequence[str]) -> list[str]:
    """All in turn, each turn beginning with the next."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def rows_of(found: dict[str, Figures]) -> list[list[str]]:
    """The table."""
    rows = []
    for name, figures in found.items():
        seconds = [figures.median(w) for w in ("blocked_s", "durable_s", "warm_s", "cold_s")]
        blocked, durable, warm, cold = (f"{value:.2f}" for value in seconds)
        sizes = (figures.first.get("bytes", 0), figures.bytes, figures.extra_bytes)
        first, all_bytes, extra = (f"{size / 1e6:,.0f}" for size in sizes)
        rows.append([name, blocked, durable, first, all_bytes, warm, cold, extra])
    return rows


def targets(found: dict[str, Figures], state_bytes: int) -> list[tuple[str, bool]]:
    """Each target in words, and whether it is met."""
    dcp, updates, whole = found["DCP"], found[UPDATES], found[WHOLE]
    blocked = _against(updates, dcp, "blocked_s")
    at_once = _against(updates, dcp, "at_once_s")
    fewer = len(updates.saves) * state_bytes / max(updates.bytes, 1)
    # Both save the same, and are read by the same code.
    theirs = Figures(restores=[*dcp.restores, *found["DCP, asynchronous"].restores])
    least = {name: found[name].median("warm_s") / theirs.median("warm_s") for name in (WHOLE, RAW)}
    checks = [1 - one["unchecked_cpu_s"] / one["checked_cpu_s"] for one in whole.restores]
    hashing = statistics.median(checks) if checks else float("inf")
    return [
        (
            f"training blocked for {blocked:.1%} of DCP's save (target 5 %), "
            f"{at_once:.1%} where all is copied before it goes on",
            blocked <= 0.05,
        ),
        (f"updates take {fewer:.2f} times fewer bytes than the state (target 3.2)", fewer >= 3.2),
        *(
            (f"{name}: restored in {ratio:.2f} of DCP's time (target 1)", ratio <= 1)
            for name, ratio in least.items()
        ),
        (
            f"checking hashes takes {hashing:.1%} of a restore's CPU time (target 10 %)",
            hashing <= 0.1,
        ),
    ]


def _against(ours: Figures, theirs: Figures, what: str) -> float:
    """What ours is blocked for, of what theirs is in the same turn."""
    turns = zip(ours.saves, theirs.saves, strict=False)
    ratios = [mine[what] / other["blocked_s"] for mine, other in turns if what in mine]
    return statistics.median(ratios) if ratios else float("inf")


def report(found: dict[str, Figures], state_bytes: int, saves: int, rounds: int) -> str:
    """The section of RESULTS.md."""
    header = [
        "saved by",
        "blocked, s",
        "durable, s",
        "first save, MB",
        f"{saves} more saves, MB",
        "restore, s",
        "from disk, s",
        "extra memory, MB",
    ]
    facts = {
        "versions": ", ".join(_PEERS),
        "command": results.command(),
        "load of the machine at the end": results.busy(),
    }
    failed = [f"{name} failed: {f.failed}" for name, f in found.items() if f.failed]
    met = [f"{'met' if ok else 'MISSED'}: {words}" for words, ok in targets(found, state_bytes)]
    lines = [
        f"A GPT of {state_bytes / 12e6:.1f} million parameters in training on text, by torch's "
        f"fused AdamW: {state_bytes / 1e6:,.0f} MB of fp32\nweights and moments, one process a "
        f"peer, one thread for the model. Peers save in turn, {saves} times after\nthe first, each "
        "while its next step is made; medians. *Blocked* is how long that step waits, for the\n"
        "call and before it changes the state. *Durable* is until the peer says that all is saved; "
        "torch_checkpointing\ndoes not wait for the disk, the others do. *Restore* is into memory "
        f"that is there, files in the page\ncache, in {rounds} fresh processes each; that of "
        f"updates replays {saves} of them on a whole commit. Extra\nmemory is what saving adds to "
        "the peak of a step. All restores gave the bits that were saved.",
        results.table(header, rows_of(found)),
        "\n".join(f"- {line}" for line in met + failed),
    ]
    title = "Checkpoints: ours beside DCP, torch_checkpointing and moonclip"
    return results.section(title, facts, "\n\n".join(lines))


def main() -> int:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", action="store_true", help="make the environment of the peers")
    parser.add_argument("--write", action="store_true", help="put the section into RESULTS.md")
    parser.add_argument("--saves", type=int, default=20, help="consecutive saves after the first")
    parser.add_argument("--rounds", type=int, default=3, help="restores of each")
    parser.add_argument("--warm-up", type=int, default=100, help="steps before the first save")
    parser.add_argument("--only", action="append", help="a peer; may be given several times")
    parser.add_argument("--scratch", type=Path, help="folder on the disk that is measured")
    args = parser.parse_args()
    if args.setup:
        set_up()
    names = [name for name in NAMES if not args.only or name in args.only]
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        python = str(VENV / "bin" / "python")
        folder = Path(scratch)
        found, size = measure(python, names, folder, args.saves, args.rounds, args.warm_up)
    if args.only:
        print(results.table(["peer", *"bdfmrce"], rows_of(found)))
        return 0
    text = report(found, size, args.saves, args.rounds)
    print(text)
    if args.write:
        results.write(text)
    met = all(ok for _, ok in targets(found, size))
    return 0 if met and not any(f.failed for f in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
