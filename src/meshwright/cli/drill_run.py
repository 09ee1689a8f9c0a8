"""One run of a drill, in a process that may be killed: `python -m meshwright.cli.drill_run PLAN`.

PLAN is a JSON file: `job` (a path), `run` (a folder), `faults` (of `DrillFault`), `adopt`. Beside
the run, `drill.jsonl` tells when each step was done and which faults were brought about.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.base.errors import MeshwrightError
from meshwright.base.events import Kind
from meshwright.cli.corpus import prepare_job
from meshwright.cli.drill_plan import DrillFault
from meshwright.cli.session import Session, start_engine
from meshwright.conduct.conductor import Status
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals
from meshwright.plan.job import load_job

NOTES = "drill.jsonl"
_CUT_S = 2.0
_SIGNALS = {"segfault": signal.SIGSEGV, "freeze": signal.SIGSTOP}


class Chaos:
    """Does harm from outside, at the steps that are planned."""

    def __init__(
        self, run: Path, faults: list[DrillFault], done: int, longest_stall_s: float
    ) -> None:
        self._notes, self._longest_stall_s = run / NOTES, longest_stall_s
        self._faults = faults
        self._left = [fault for fault in faults if fault.armed is None][done:]

    @property
    def armed(self) -> list[dict[str, Any]]:
        """The faults that members bring about themselves."""
        return [armed for fault in self._faults if (armed := fault.armed) is not None]

    def on_event(self, fleet: Fleet, message: Mapping[str, Any]) -> None:
        """Note when steps are done; strike when one begins that a fault is planned for."""
        if message["kind"] == Kind.METRICS:
            self._note({"step": message["step"], "ts": message["ts"]})
        elif message["kind"] == Kind.PROGRESS and self._is_due(message["step"]):
            self._strike(fleet, self._left.pop(0), message["member"])

    def _is_due(self, step: int) -> bool:
        return bool(self._left) and step >= self._left[0].step

    def _note(self, note: Mapping[str, Any]) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def _strike(self, fleet: Fleet, fault: DrillFault, member: int) -> None:
        self._note({"fault": fault.kind, "ts": time.time()})
        match fault.kind:
            case "cut link":
                fleet.cut(fault.node or 0, _CUT_S)
            case "cut data":
                fleet.sever(fault.node or 0, _CUT_S)
            case "cut both":  # for longer than any lease
                fleet.sever(fault.node or 0, 2 * self._longest_stall_s)
                fleet.cut(fault.node or 0, 2 * self._longest_stall_s)
            case "kill agent":
                if (pid := fleet.pid(fault.node or 0)) is not None:
                    os.kill(pid, signal.SIGKILL)
            case "kill conductor":
                os.kill(os.getpid(), signal.SIGKILL)
            case kind:
                fleet.signal_member(member, _SIGNALS.get(kind, signal.SIGKILL))


def main() -> int:
    """Run it; 0 where it was finished."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    run, job = Path(plan["run"]), load_job(Path(plan["job"]))
    faults = [DrillFault(**fields) for fields in plan["faults"]]
    chaos = Chaos(run, faults, _brought_about(run), job.resilience.longest_stall_s)
    console = Console(stderr=True)
    with StopSignals() as signals, start_engine(job) as engine:
        data = prepare_job(job, console)
        made = RunDir.open_existing(run) if plan["adopt"] else RunDir.create_at(run)
        with made as rundir:
            session = Session(
                engine, rundir, job, data, console, signals, adopt=plan["adopt"], harm=chaos
            )
            outcome = session.run(None)
    if outcome.error:
        sys.stderr.write(f"{outcome.error}\n")
    return 0 if outcome.status is Status.FINISHED else 1


def _brought_about(run: Path) -> int:
    """How many faults from outside an earlier conductor of this run has brought about."""
    notes = run / NOTES
    if not notes.exists():
        return 0
    return sum("fault" in json.loads(line) for line in notes.read_text().splitlines())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
