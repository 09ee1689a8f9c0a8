"""One rank of a small model is killed: how long no new step is committed, and what is done again.

torchrun and `meshwright run` restart the same DDP script from its checkpoints; torchft goes on with
the replicas that are left; `meshwright train` gives the rank to a spare. Each in fresh processes,
in turn, and once more without the kill: the weights must have the same bits. `--setup` makes the
environment of the peers, which is that of `peers_train.py` and torchft.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import results
from peers_launch import PYTHON, VENV, set_up

from meshwright.conduct.foreign_processes import adopt_orphans, end_orphans

HERE = Path(__file__).parent
WORKER = HERE / "recovery_worker.py"
STEPS, KILL_AT, VICTIM = 80, 65, 1  # checkpoints are at 60 and 70
TORCHFT = "torchft==0.2.0"
JOB = f"""\
job = {{ name = "recovery", steps = {STEPS} }}
model = {{ preset = "tiny" }}
data = {{ seq_len = 128, global_batch = 4 }}
layout = {{ dp_replicate = 2 }}
cluster = {{ ref = "local:2", spares = 1 }}
resilience = {{ redundancy = "twin" }}
checkpoint = {{ every = 10 }}
"""
LIMIT_S = 240.0


Commands = Sequence[tuple[Sequence[str], Mapping[str, str]]]
"""Command lines, the ranks' after any that never ends, and what is added to their environment."""


@dataclass(frozen=True)
class Trial:
    """One run that came to its end."""

    step_s: float  # median time between two new steps
    stall_s: float  # longest time without a new step after the kill
    again: int  # steps that were committed a second time
    weights: str  # hash


@dataclass(frozen=True)
class Peer:
    """How one is started, watched and read, in a folder of its own."""

    note: str
    commands: Callable[[Path], Commands]
    steps: Callable[[Path], list[int]]  # committed so far, in their order
    victim: Callable[[Path], int]  # its pid
    weights: Callable[[Path], str | None]  # their hash, once it is done


def torchrun(folder: Path) -> Commands:
    """Restarts all from the last checkpoint."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    return [([str(PYTHON), *launch, *_worker("ddp", folder)], {})]


def supervised(folder: Path, spares: int) -> Commands:
    """The same by ours."""
    program = [str(PYTHON.with_name("meshwright")), "run", "--nproc", "2"]
    program += ["--run-dir", str(folder / "run")]
    if spares:
        program += ["--spares", str(spares), "--preload", "torch", "--preload", "peers"]
    return [([*program, "--", str(PYTHON), *_worker("ddp", folder)], {})]


def torchft(folder: Path, kind: str, heartbeat_ms: int, limit_ms: int) -> Commands:
    """A lighthouse and three replica groups of one rank each."""
    port = _free_port()
    house = [str(PYTHON.with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
    house += ["--min_replicas", "2", "--heartbeat_timeout_ms", str(limit_ms)]
    house += ["--quorum_tick_ms", str(min(100, heartbeat_ms))]
    found: list[tuple[Sequence[str], Mapping[str, str]]] = [(house, {})]
    for rank in range(3):
        told = {"RANK": str(rank), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        worker = _worker(kind, folder, "--heartbeat-ms", str(heartbeat_ms))
        found.append(([str(PYTHON), *worker], told))
    return found


def takeover(folder: Path) -> Commands:
    """Ours: the other replica holds the state, a spare takes the rank."""
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    program = [str(PYTHON.with_name("meshwright")), "train", str(folder / "job.toml")]
    return [([*program, "--run-dir", str(folder / "run")], {})]


def peers() -> Mapping[str, Peer]:
    """Every row of the table."""
    script = partial(Peer, steps=_told_steps, victim=_told_victim, weights=_told_weights)
    return {
        "torchrun": script("restart", torchrun),
        "meshwright run": script("restart", partial(supervised, spares=0)),
        "meshwright run, 2 spares": script("warm restart", partial(supervised, spares=2)),
        "torchft, its DDP": script(
            "2 of 3 active", partial(torchft, kind="torchft-ddp", heartbeat_ms=100, limit_ms=5000)
        ),
        "torchft, allreduce": script(
            "2 of 3 active", partial(torchft, kind="torchft", heartbeat_ms=100, limit_ms=5000)
        ),
        "torchft, allreduce, tuned": script(
            "limit 100 ms", partial(torchft, kind="torchft", heartbeat_ms=10, limit_ms=100)
        ),
        "meshwright train": Peer(
            "2 ranks, 1 spare", takeover, _metric_steps, _member_pid, _model_hash
        ),
    }


def _worker(kind: str, folder: Path, *options: str) -> list[str]:
    return [str(WORKER), kind, str(folder), "--steps", str(STEPS), *options]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def run(peer: Peer, kill: bool) -> Trial | str:
    """One run in fresh processes, or why it did not come to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with _started(peer.commands(folder), folder) as processes:
            seen_s, killed_s = _watch(peer, folder, processes, kill)
        if (weights := peer.weights(folder)) is None:
            lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "rror" in line]
            return (errors or lines or ["it wrote nothing"])[-1][:160]
        gaps = [(later - earlier, later) for earlier, later in pairwise(seen_s)]
        stall_s = max((gap_s for gap_s, at_s in gaps if at_s >= killed_s), default=0.0)
        steps = peer.steps(folder)
        again = len(steps) - len(set(steps))
        return Trial(statistics.median(gap_s for gap_s, _ in gaps), stall_s, again, weights)


@contextlib.contextmanager
def _started(commands: Commands, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "log").open("wb") as log:
            for command, told in commands:
                environment = {**os.environ, **common, **told}
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_orphans(())  # torchrun's ranks have sessions of their own


def _watch(
    peer: Peer, folder: Path, processes: Sequence[subprocess.Popen[bytes]], kill: bool
) -> tuple[list[float], float]:
    """When each new step was seen, and when the victim was killed; until all is over."""
    seen_s, highest, killed_s = list[float](), 0, inf
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for _ in range(max(peer.steps(folder), default=0) - highest):
            highest += 1
            seen_s.append(time.monotonic())
        if kill and killed_s == inf and highest >= KILL_AT:
            killed_s = time.monotonic()
            os.kill(peer.victim(folder), signal.SIGKILL)
        ranks = processes[-3:] if len(processes) > 1 else processes  # a lighthouse never ends
        if all(process.poll() is not None for process in ranks):
            break
        if len(processes) > 1 and peer.weights(folder):  # a rank that is left might wait for ever
            break
        time.sleep(0.002)
    return seen_s, killed_s


def _told_steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in _lines(folder / "rank-0.jsonl")]


def _told_victim(folder: Path) -> int:
    return int(_lines(folder / f"rank-{VICTIM}.jsonl")[-1]["pid"])


def _told_weights(folder: Path) -> str | None:
    told = {path.read_text(encoding="utf-8") for path in folder.glob("weights-*")}
    return " ".join(sorted(told)) or None


def _metric_steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in _lines(folder / "run" / "metrics.jsonl")]


def _member_pid(folder: Path) -> int:
    """The process that writes the log of the member."""
    log = folder / "run" / "logs" / f"member-{VICTIM}.log"
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if link.readlink() == log:
                return int(link.parts[2])
    raise RuntimeError(f"nobody writes {log}")


def _model_hash(folder: Path) -> str | None:
    model = folder / "run" / "model" / "model.safetensors"
    return hashlib.sha256(model.read_bytes()).hexdigest()[:16] if model.exists() else None


def _lines(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def row(name: str, note: str, found: Sequence[Trial | str], undisturbed: Trial | str) -> list[str]:
    """One line of the table."""
    done = [trial for trial in found if isinstance(trial, Trial)]
    survived = f"{len(done)} of {len(found)}"
    if not done:
        return [name, note, survived, "", "", "", ""]
    stalls = sorted(trial.stall_s for trial in done)
    same = isinstance(undisturbed, Trial) and {t.weights for t in done} == {undisturbed.weights}
    return [
        name,
        note,
        survived,
        f"**{statistics.median(stalls) * 1e3:.0f}**",
        f"{stalls[0] * 1e3:.0f} to {stalls[-1] * 1e3:.0f}",
        f"{max(trial.again for trial in done)}",
        "yes" if same else "no",
    ]


def main() -> int:
    """Measure, print, and say whether ours came through."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--setup", action="store_true", help="make .venv-bench first")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each")
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    if options.setup:
        set_up()
        pins = ["--constraint", str(HERE.parent / "constraints.txt")]
        subprocess.run([str(PYTHON), "-m", "pip", "install", *pins, TORCHFT], check=True)
    if not PYTHON.exists():
        print(f"{VENV.name} is not there: run it with --setup first", file=sys.stderr)
        return 2
    adopt_orphans()
    chosen = {n: p for n, p in peers().items() if not options.only or n in options.only}
    undisturbed = {name: run(peer, kill=False) for name, peer in chosen.items()}
    found: dict[str, list[Trial | str]] = {name: [] for name in chosen}
    for number in range(options.rounds):
        for name, peer in chosen.items():
            found[name].append(trial := run(peer, kill=True))
            print(f"round {number + 1}: {name}: {trial}", file=sys.stderr)
    rows = [row(name, chosen[name].note, found[name], undisturbed[name]) for name in chosen]
    text = report(rows, options.rounds)
    print(text)
    if options.write:
        results.write(text)
    ours = [trial for name in chosen if name.startswith("mesh") for trial in found[name]]
    return 1 if any(isinstance(trial, str) for trial in ours) else 0


def report(rows: Sequence[Sequence[str]], rounds: int) -> str:
    """The section of RESULTS.md."""
    header = ["trainer", "how", "came through", "stall, ms", "range", "steps again", "same bits"]
    facts = {
        "command": results.command(),
        "load of the machine at the end": results.busy(),
        "versions": f"torch 2.13.0+cpu, {TORCHFT}",
    }
    body = (
        f"`tiny`, 4 x 128 tokens a step, gloo; rank {VICTIM} gets SIGKILL after step {KILL_AT} of "
        f"{STEPS}, {rounds} times.\nStall: the longest time without a new step after that. Steps "
        "again: committed a second time.\n\n"
    )
    return results.section(
        "A killed rank: time to the next step", facts, body + results.table(header, rows)
    )


if __name__ == "__main__":
    sys.exit(main())
