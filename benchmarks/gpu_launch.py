"""Runs one case of `gpu.py` with one of the trainers, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from gpu_case import WARM_UP, Case
from gpu_titan import CASE, logged_steps

OURS, PEER = "Meshwright", "torchtitan"
_HERE = Path(__file__).parent
_ROOT = _HERE.parent
VENV = _ROOT / ".venv-bench-gpu"
PYTHON = VENV / "bin" / "python"


@dataclass(frozen=True)
class Run:
    """One launch that came to its end; speeds are those of the steps after the warm-up."""

    tokens_per_s: list[float]
    losses: list[float]
    memory_gib: float

    @property
    def speed(self) -> float:
        """The median step's."""
        return median(self.tokens_per_s)


def set_up() -> None:
    """Make the peer's environment, or bring it up to date."""
    if not PYTHON.exists():
        venv.create(VENV, symlinks=True, with_pip=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")
    named = ["torch==2.13.0", "torchtitan==0.3.0", "torchao"]
    subprocess.run([str(PYTHON), "-m", "pip", "install", *named], check=True)


def launch(trainer: str, case: Case, peer_python: Path, timeout_s: float) -> Run | str:
    """Train `case`; or the last line of why it failed."""
    if trainer == PEER and not peer_python.exists():
        return f"{peer_python} is not there: run it with --setup first"
    if timeout_s <= 0:
        return "there was no time left"
    try:
        with tempfile.TemporaryDirectory() as scratch:  # torchtitan leaves files where it runs
            done = subprocess.run(
                _command(trainer, case, peer_python),
                cwd=scratch,
                env=_environment(case),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:.0f} s"
    run = (titan_run if trainer == PEER else our_run)(done.stdout, case)
    if done.returncode == 0 and len(run.losses) == case.steps:
        return run
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}; it wrote nothing"


def our_run(log: str, case: Case) -> Run:
    """What `gpu_ours.py` wrote; lines that are no JSON come from libraries."""
    steps = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return Run(
        tokens_per_s=[case.tokens / step["step_s"] for step in steps[WARM_UP:]],
        losses=[step["loss"] for step in steps],
        memory_gib=max((step["memory_gib"] for step in steps), default=0.0),
    )


def titan_run(log: str, _case: Case) -> Run:
    """What torchtitan wrote."""
    steps = logged_steps(log)
    return Run(
        tokens_per_s=[step.tokens_per_s for step in steps[WARM_UP:]],
        losses=[step.loss for step in steps],
        memory_gib=max((step.memory_gib for step in steps), default=0.0),
    )


def _command(trainer: str, case: Case, peer_python: Path) -> list[str]:
    if trainer == OURS:
        return [sys.executable, str(_HERE / "gpu_ours.py"), json.dumps(asdict(case))]
    named = ["--module", "gpu_titan", "--config", "configured"]
    return [str(peer_python.absolute()), "-m", "torchtitan.train", *named]


def _environment(case: Case) -> dict[str, str]:
    """What torchrun would set for one rank, and the case."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": 1,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        CASE: json.dumps(asdict(case)),
    }
    return {**os.environ, **{key: str(value) for key, value in own.items()}}
