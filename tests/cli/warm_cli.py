"""The command line in this process, with one launcher for all its runs: importing torch is most of
what a short run takes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.cli.app import run
from meshwright.cli.session import WORKER
from meshwright.conduct.local import LocalEngine


@dataclass(frozen=True)
class WarmCli:
    """`meshwright` with `cwd` as its current directory, as `cli_runs.Cli` is with processes."""

    cwd: Path
    engine: LocalEngine

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run to the end. Jobs must not be of runs that survive, which have other launchers."""
        out, err, command = io.StringIO(), io.StringIO(), ["meshwright", *map(str, args)]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.cwd)
            patch.setattr(sys, "argv", command)
            patch.setattr("meshwright.cli.train.start_engine", lambda *_: _lent(self.engine))
            code = run()
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    def ok(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run to the end, which must be a good one."""
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return done


@contextmanager
def _lent(engine: LocalEngine) -> Iterator[LocalEngine]:
    yield engine


@contextmanager
def warm_cli(cwd: Path, env: dict[str, str]) -> Iterator[WarmCli]:
    """One, with `env` in the environment of this process and of the workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with LocalEngine.start(WORKER) as engine:
            yield WarmCli(cwd, engine)
