"""`meshwright run`: any script that torchrun or jax.distributed would start, kept alive."""

from __future__ import annotations

import shutil
import sys
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.errors import InputError, RunError
from meshwright.cli.options import log_console
from meshwright.conduct.foreign import Outcome, Settings, supervise
from meshwright.conduct.foreign_decide import Result, Rules
from meshwright.conduct.foreign_processes import Command, command
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals

_RUNS = Path("runs")
_INTERRUPTED = 130
_LONG_LIFE = 10.0  # times the longest stall

# For `app.command`: all that follows the program is the program's own.
CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}


def run(
    words: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARG]...", help="What to run.")],
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks to start.")] = 1,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restarts in all, whatever the cause.")
    ] = 10,
    longest_stall_s: Annotated[
        float,
        typer.Option("--longest-stall-s", help="Silence of all ranks that counts as a hang."),
    ] = 300.0,
    spares: Annotated[
        int, typer.Option("--spares", min=0, help="Processes that wait with imports done.")
    ] = 0,
    preload: Annotated[
        list[str] | None, typer.Option("--preload", metavar="MODULE", help="What spares import.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace-s", help="Between SIGTERM and SIGKILL after an incident.")
    ] = 1.0,
    jax: Annotated[
        bool, typer.Option("--jax", help="Let jax.distributed.initialize() find its arguments.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run; default runs/PROGRAM-N.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show what rank 0 writes.")] = False,
) -> int:
    """Start a script's ranks, watch them, and start them again from its own checkpoints."""
    for option, value in (("--longest-stall-s", longest_stall_s), ("--grace-s", grace_s)):
        if not value > 0:
            raise InputError(f"{option} {value:g}: not a time in seconds; give one above 0")
    known = _look_up(words, spares, preload or [])
    rules = Rules(nproc, max_restarts, grace_s, long_life_s=_LONG_LIFE * longest_stall_s)
    settings = Settings(known, rules, longest_stall_s, spares, tuple(preload or ()), jax)
    console = log_console()

    def note(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with StopSignals() as signals:
        made = RunDir.create_at(run_dir) if run_dir else RunDir.create(_RUNS, _name(known))
        with made as rundir:
            signals.only_count()
            show = None if quiet else FileIO(sys.stdout.fileno(), "w", closefd=False)
            outcome = supervise(settings, rundir, signals.count, note, show)
            return _conclude(outcome, rundir.path, note)


def _look_up(words: list[str], spares: int, preload: list[str]) -> Command:
    """The command, once it is clear that it can be run, and by spares if there are any."""
    program = shutil.which(words[0])
    if program is None:
        raise InputError(f"{words[0]}: no such program; give one after --, as in: -- python x.py")
    known = command([program, *words[1:]])
    if spares and known.spare is None:
        raise InputError(
            f"--spares {spares}: a spare can run `python SCRIPT` and `python -m MODULE` alone, not "
            f"`{' '.join(words[:2])}`; leave it out"
        )
    if preload and not spares:
        raise InputError(f"--preload {preload[0]}: is for spares; add --spares N")
    script = known.spare[0] if known.spare else None
    if script and script != "-m" and not Path(script).is_file():
        raise InputError(f"{script}: no such script; give the path of one")
    return known


def _name(known: Command) -> str:
    """What the run is called: the script or module, else the program."""
    spare = known.spare or (known.words[0],)
    return Path(spare[1] if spare[0] == "-m" else spare[0]).stem


def _conclude(outcome: Outcome, path: Path, note: Any) -> int:
    """Say how it ended; the exit code."""
    if outcome.result is Result.FAILED:
        raise RunError(outcome.error or "the script failed")
    restarts = f", after {outcome.restarts} restarts" if outcome.restarts else ""
    step = f" at step {outcome.step}" if outcome.step is not None else ""
    note(f"{outcome.result}{step}{restarts}; run: {path}")
    return 0 if outcome.result is Result.FINISHED else _INTERRUPTED
