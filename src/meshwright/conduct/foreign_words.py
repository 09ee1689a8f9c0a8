"""One line on an incident, with what the log of the rank at fault says about it."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.conduct.foreign_decide import Cause, Trouble

_TAIL_BYTES = 1 << 15
_LAST_LINE_CHARS = 300
# Of faulthandler: the thread that the signal met, then its frames, innermost first.
_STACK = re.compile(r'^Current thread .*\n\s+File "([^"]+)", line ([0-9]+) in (\S+)', re.MULTILINE)


def describe(cause: Cause, step: int | None, log: Path, start_bytes: int) -> str:
    """One line that names rank, step, cause and log; `start_bytes` of the log are older."""
    at = "" if step is None else f" at step {step}"
    if cause.rank is None:
        return f"no rank makes progress{at}, and none differs from the others; logs: {log.parent}"
    said, rank = _tail(log, start_bytes), f"rank {cause.rank}"
    match cause.trouble:
        case Trouble.EXIT:
            what = f"failed{at} with {cause.what}: {last_line(log, start_bytes)}"
        case Trouble.SIGNAL:
            what = f"died{at} by {cause.what}"
        case Trouble.FROZEN:
            what = f"was {cause.what}{at}"
        case Trouble.HANG:
            stacks = _STACK.findall(said)
            where = " in {2}, {0}:{1}".format(*stacks[-1]) if stacks else ""
            what = f"hung{at}{where}"
    return f"{rank} {what}; log: {log}"


def last_line(log: Path, start_bytes: int) -> str:
    """The last line with anything on it that was written after `start_bytes`."""
    lines = _tail(log, start_bytes).strip().splitlines()
    return lines[-1].strip()[:_LAST_LINE_CHARS] if lines else "it wrote nothing"


def _tail(log: Path, start_bytes: int) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start_bytes, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
