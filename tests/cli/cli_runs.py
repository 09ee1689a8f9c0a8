"""The real command line in a folder of its own: started, watched and read back."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind

PROGRAM = Path(sys.executable).with_name("meshwright")
LIMIT_S = 300.0  # of anything a test waits for: a guard against hanging, not a measure
STEPS = 24

# 8 ranks; a step takes tens of milliseconds, so that a signal sent after one finds the run alive.
JOB = """\
[job]
name = "small"
steps = {steps}
eval_every = 12

[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn_hidden = 64
vocab = 320
max_seq_len = 64

[data]
source = {source}
seq_len = 32
global_batch = 8

[layout]
dp_replicate = 2
tp = 2
pp = 2
micro_batch = 2

[cluster]
ref = "local:8"

[optimizer]
lr = 3e-3
warmup_steps = 4

[checkpoint]
every = 2
"""

ONE_PROCESS = (
    *("-o", "layout.dp_replicate=1", "-o", "layout.tp=1", "-o", "layout.pp=1"),
    *("-o", "cluster.ref=local:1"),
)


def write_job(path: Path, corpus: Path, steps: int = STEPS) -> Path:
    """A job file that trains a very small Llama on `corpus` as dp2 x tp2 x pp2."""
    path.write_text(JOB.format(steps=steps, source=json.dumps(str(corpus))))
    return path


@dataclass(frozen=True)
class Cli:
    """`meshwright` with `cwd` as its current directory and `cache` for its prepared corpora."""

    cwd: Path
    cache: Path
    program: tuple[str, ...] = (str(PROGRAM),)
    extra_env: dict[str, str] = field(default_factory=dict)

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self._command(args),
            cwd=self.cwd,
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def ok(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run to the end, which must be a good one."""
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return done

    @contextmanager
    def started(self, *args: str | Path) -> Iterator[Running]:
        """A command under way; it is killed if it still is when the block is left."""
        process = subprocess.Popen(
            self._command(args),
            cwd=self.cwd,
            env=self._env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield Running(process)
        finally:
            process.kill()
            process.communicate(timeout=LIMIT_S)

    def _command(self, args: tuple[str | Path, ...]) -> list[str]:
        return [*self.program, *map(str, args)]

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.extra_env, "MESHWRIGHT_CACHE": str(self.cache)}


@dataclass(frozen=True)
class FinishedRun:
    """A run that nothing disturbed, and what its command said."""

    path: Path
    job_file: Path
    said: subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Running:
    """A command that was started. It says little enough to fit its pipes."""

    process: subprocess.Popen[str]

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until `what` holds, while the command runs."""
        await_true(lambda: self.process.poll() is not None or what())
        assert what(), f"ended before: {self.process.communicate()}"

    def wait_for_step(self, run: Path, step: int) -> None:
        """Until the metrics of `step` are written."""
        self.wait_for(lambda: len(lines(run / "metrics.jsonl")) >= step)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def launcher(self) -> int:
        """The process that forks the workers."""
        (pid,) = children(self.process.pid)
        return pid

    def workers(self) -> list[int]:
        """Pids of the ranks that live, the oldest first."""
        return children(self.launcher())


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, in the order of their pids."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(after_name[1]) == pid and after_name[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def await_true(what: Callable[[], bool]) -> None:
    """Watch until `what` holds, for at most `LIMIT_S`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not what() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def all_end(pids: list[int]) -> bool:
    """Whether all these processes end within `LIMIT_S`."""
    deadline_s = time.monotonic() + LIMIT_S
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([pidfd], [], [], left_s)[0]:
                return False
        finally:
            os.close(pidfd)
    return True


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file. Numbers with a fraction stay text: their bits count."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line, parse_float=str) for line in text.splitlines(True) if line[-1] == "\n"]


def events(run: Path, kind: Kind) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in lines(run / "events.jsonl") if event["kind"] == kind]


def learning(run: Path) -> list[tuple[Any, ...]]:
    """What each step computed, down to the bit, the evaluations included."""
    steps = [("step", m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in metrics(run)]
    return [*steps, *(("eval", e["step"], e["loss"]) for e in events(run, Kind.EVALUATED))]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return lines(run / "metrics.jsonl")


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Contents of every file below `folder`, None for folders; the lock of a run is left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


def one_error_line(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one line of a command that complained, and did nothing else."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
