"""Sets up the environment of the peers, and runs one of them on fresh processes."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workload import Load

RANKS = 2
WARM_UP = 3  # steps
_HERE = Path(__file__).parent
_ROOT = _HERE.parent
VENV = _ROOT / ".venv-bench"
PYTHON = VENV / "bin" / "python"
_LAUNCH_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Course:
    """A load, and how many steps of it are timed."""

    load: Load
    steps: int


@dataclass(frozen=True)
class Run:
    """One launch of a peer that came to its end."""

    step_s: float  # median
    losses: list[float]
    versions: dict[str, str]


def set_up() -> None:
    """Make the environment of the peers, or bring it up to date."""
    if not PYTHON.exists():
        venv.create(VENV, symlinks=True, with_pip=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")
    command = [str(PYTHON), "-m", "pip", "install"]
    for pins in (_ROOT / "constraints.txt", _HERE / "constraints-bench.txt"):
        command += ["--constraint", str(pins)]
    command += ["torch==2.13.0", "accelerate", "deepspeed", "--editable", str(_ROOT)]
    subprocess.run(command, check=True)


def launch(name: str, course: Course) -> Run | str:
    """Train with peer `name` in fresh processes; or the last line of why it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        out, port = Path(scratch) / "out.json", _free_port()
        command = [str(PYTHON), str(_HERE / "peers_worker.py"), name, "--out", str(out)]
        command += ["--load", json.dumps(asdict(course.load))]
        command += ["--steps", str(WARM_UP + course.steps)]
        logs = [Path(scratch) / f"rank{rank}.log" for rank in range(RANKS)]
        ranks = [_start(command, rank, port, log) for rank, log in enumerate(logs)]
        try:
            failed = _wait(ranks)
        except TimeoutError as error:
            return str(error)
        if failed is None:
            return _as_run(json.loads(out.read_text(encoding="utf-8")))
        return _last_line(logs[failed])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _start(command: Sequence[str], rank: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=_environment(rank, port), stdout=file, stderr=subprocess.STDOUT
        )


def _environment(rank: int, port: int) -> dict[str, str]:
    """What torchrun would set, one thread a rank, and the peers told that this is a CPU."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "LOCAL_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "MKL_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": VENV / "torch_extensions",
        "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}",  # DeepSpeed looks for ninja
    }
    return {**os.environ, **{key: str(value) for key, value in own.items()}}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """A rank that failed, or None when all are done; none is left running.

    Raises TimeoutError if they take too long.
    """
    deadline_s = time.monotonic() + _LAUNCH_TIMEOUT_S
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                return next(index for index, code in enumerate(codes) if code)
            if None not in codes:
                return None
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not done after {_LAUNCH_TIMEOUT_S:g} s")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _as_run(told: dict[str, Any]) -> Run:
    """From what rank 0 wrote."""
    return Run(statistics.median(told["step_s"][WARM_UP:]), told["losses"], told["versions"])
