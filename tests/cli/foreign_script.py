"""A script as a user might have it, with nothing but the standard library: it meets its peers at
each step, saves every fourth, goes on from what it saved, and has a fault where it is told to.

`foreign_script.py FOLDER STEPS [FAULT:RANK:STEP:TIMES]...`: a fault happens in the first TIMES
incarnations that come to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LIMIT_S = 120.0


def main() -> None:
    """Work through the steps."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    meeting = folder / f"meeting-{os.environ['MASTER_PORT']}"
    meeting.mkdir(exist_ok=True)
    saved = folder / "saved"
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    for step in range(first, steps + 1):
        if "MUTE" not in os.environ:
            Path(os.environ["MESHWRIGHT_PROGRESS"]).write_text(f"{step}")
        for fault in sys.argv[3:]:
            what, rank, at, times = fault.split(":")
            if (RANK, step) == (int(rank), int(at)) and int(times) > RESTARTS:
                misbehave(what, step)
        meet(meeting, step)
        if RANK == 0:
            sys.stdout.write(f"step {step} of incarnation {RESTARTS}\n")
            sys.stdout.flush()
            if step % 4 == 0:
                saved.with_suffix(".new").write_text(f"{step}")
                saved.with_suffix(".new").replace(saved)
        time.sleep(float(os.environ.get("STEP_S", "0.01")))
    (folder / f"done-{RANK}").touch()


def meet(folder: Path, step: int) -> None:
    """Wait for all ranks, as a collective does: without a sign, and hardly any CPU time."""
    (folder / f"{step}-{RANK}").touch()
    begun_s = time.monotonic()
    while any(not (folder / f"{step}-{rank}").exists() for rank in range(WORLD)):
        time.sleep(0.005)
        if time.monotonic() - begun_s > LIMIT_S:
            raise TimeoutError(f"rank {RANK} waited for {LIMIT_S} s")


def misbehave(what: str, step: int) -> None:
    """Do as told."""
    if what == "raise":
        raise ValueError(f"bad value at step {step}")
    if what == "loop":
        spin_in_evaluation()
    if what == "child":  # a helper in a session of its own, which nobody ends
        helper = [sys.executable, "-c", "import time; time.sleep(1e6)"]
        subprocess.Popen(helper, start_new_session=True)
        os._exit(3)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    os.kill(os.getpid(), signal.Signals[what])


def spin_in_evaluation() -> None:
    """Compute for ever."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < LIMIT_S:
        pass


if __name__ == "__main__":
    main()
