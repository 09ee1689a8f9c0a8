"""What a launcher and its parent say to each other, and how lines come off a pipe.

Control runs over a socket pair, one JSON object per line.

Parent to launcher: `{"op": "launch", "entry": "module:function", "world", "log_dir", "args"}`,
`{"op": "stop", "signal": "SIGTERM"}`, `{"op": "quit"}`. End of file means quit.

Launcher to parent: `{"event": "warm"}`, `{"event": "launched", "pids"}`,
`{"event": "refused", "error"}`, `{"event": "exit", ...}` with the fields of `Exit`.

What workers say goes over a pipe of its own, in the format of `base/events.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Exit:
    """The end of one worker. Either `code` or `signal` is set, never both.

    `returned` is true when the entry point returned: an exit code of 0 without it is a worker
    that left early. `peer_lost` is true when it raised because another rank was gone or silent.
    `ts` is the Unix time in seconds at which the entry point ended where the
    worker could tell, else that at which the launcher saw the death.
    """

    rank: int
    pid: int
    code: int | None
    signal: int | None
    returned: bool
    ts: float
    peer_lost: bool = False
    member: int = -1  # of a run that survives: which process had the rank
    progress: tuple[int, ...] = ()  # and how far it had come, as `beats.progress_key` says it

    @property
    def failed(self) -> bool:
        """Whether the worker ended in any other way than by finishing its work."""
        return self.code != 0 or not self.returned


class LineBuffer:
    """Whole lines out of bytes that arrive split and joined in any way."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished_bytes(self) -> int:
        """What has come of a line that has no end yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without line ends; empty lines are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line]


def encode(fields: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def parse_message(line: bytes) -> Message | None:
    """A worker's message, or None for a line that is not one (a stray write to the pipe)."""
    try:
        message = json.loads(line)
        if isinstance(message, dict) and type(message.get("rank")) is int:
            return {**message, "kind": Kind(str(message.get("kind")))}
    except (ValueError, RecursionError):
        pass
    return None


def log_path(log_dir: Path, rank: int) -> Path:
    """Where standard output and error of a rank go."""
    return log_dir / f"rank-{rank}.log"


def member_log_path(log_dir: Path, member: int) -> Path:
    """Where those of a member of a run that survives go, whatever ranks it holds."""
    return log_dir / f"member-{member}.log"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
