"""What can be seen of a script that knows nothing of us, and who is stuck by it.

Seen from outside are: the state of its process, its CPU time, what it writes to its log, and, if it
likes, a file that it touches at each step (`MESHWRIGHT_PROGRESS`). Not seen is what a rank waits
for. So a job that says nothing for too long is stuck, which is certain enough to restart all of it;
which rank is at fault is told only where one differs from all others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.conduct.foreign_decide import Cause, Trouble
from meshwright.conduct.processes import Process
from meshwright.conduct.watching import LONGEST_LOOK_S

_KNOWN_SIGNS = 3  # before that it is starting, and may import, compile, download
_STARTS = 4.0  # times the longest stall
_SLOWEST_SIGNS = 3.0  # times the longest silence between two signs of life so far
_BUSY = 0.1  # share of a core
_FAR = 3.0
_STEP = re.compile(rb"\s*(?:step\D{0,3})?([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Look:
    """One rank at one moment; times count only as far as they were watched, in seconds."""

    rank: int
    beats: bool  # it uses its progress file; then nothing else counts as a sign of life
    signs: int
    quiet_s: float  # since its last sign of life
    longest_s: float  # silence between two signs, so far
    state: str
    state_s: float
    cpu_share: float  # of one core, since its last sign
    step: int | None


@dataclass
class Watcher:
    """Turns what is seen of one rank's process into looks."""

    rank: int
    log: Path
    progress: Path
    step: int | None = None  # the last that it has told
    _seen_s: float | None = None
    _marks: dict[str, tuple[int, int]] = field(default_factory=dict)
    _signs: int = 0
    _beats: bool = False
    _quiet_s: float = 0.0
    _longest_s: float = 0.0
    _state: str = ""
    _state_s: float = 0.0
    _cpu_s: float = 0.0

    def look(self, now_s: float, process: Process) -> Look:
        """See what is new at `now_s`, of a clock that only goes forward."""
        first = self._seen_s is None
        gap_s = 0.0 if self._seen_s is None else min(now_s - self._seen_s, LONGEST_LOOK_S)
        self._seen_s = now_s
        self._quiet_s += gap_s
        self._state_s = self._state_s + gap_s if process.state == self._state else 0.0
        self._state = process.state
        beat, said = self._changed(self.progress), self._changed(self.log)
        if beat:
            self._beats = True
            self._read_step()
        if first or beat or (said and not self._beats):
            self._take_sign(process, counts=not first)
        # Below a tenth of a second the kernel's ticks say nothing.
        share = (process.cpu_s - self._cpu_s) / max(self._quiet_s, 0.1)
        return Look(
            rank=self.rank,
            beats=self._beats,
            signs=self._signs,
            quiet_s=self._quiet_s,
            longest_s=self._longest_s,
            state=self._state,
            state_s=self._state_s,
            cpu_share=share,
            step=self.step,
        )

    def last_look(self) -> None:
        """See what step it has told before its end."""
        if self._beats or self._changed(self.progress):
            self._read_step()

    def _read_step(self) -> None:
        """Take the step out of the progress file, if there is one: it may be half written."""
        try:
            found = _STEP.match(self.progress.read_bytes()[:64])
        except OSError:
            return
        if found:
            self.step = int(found[1])

    def _take_sign(self, process: Process, counts: bool) -> None:
        if counts:
            self._signs += 1
            if self._signs > 1:  # before the first it was starting
                self._longest_s = max(self._longest_s, self._quiet_s)
        self._quiet_s, self._cpu_s = 0.0, process.cpu_s

    def _changed(self, path: Path) -> bool:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        mark = stat.st_mtime_ns, stat.st_size
        before = self._marks.get(path.name)
        self._marks[path.name] = mark
        # What is there at the first look is of an earlier incarnation.
        return mark != before and (before is not None or self._quiet_s > 0)


def judge(looks: Sequence[Look], longest_stall_s: float, frozen_s: float) -> Cause | None:
    """What holds the job up, or None; `looks` are of all ranks that live.

    A process stopped for `frozen_s` is frozen. A job is hung when no rank has given a sign of life
    for the longest stall, or for three times the longest silence it has had so far.
    """
    for look in looks:
        if look.state == "T" and look.state_s >= frozen_s:
            return Cause(Trouble.FROZEN, look.rank, "stopped (state T)")
        if look.state in ("t", "D") and min(look.state_s, look.quiet_s) >= longest_stall_s:
            return Cause(Trouble.FROZEN, look.rank, f"held by the kernel (state {look.state})")
    # Where some ranks tell of their steps, those that do not are left out: rank 0 alone may print.
    telling = [look for look in looks if look.beats] or list(looks)
    if not telling or any(look.quiet_s < _limit_s(look, longest_stall_s) for look in telling):
        return None
    return Cause(Trouble.HANG, culprit(looks), "no progress")


def _limit_s(look: Look, longest_stall_s: float) -> float:
    if look.signs < _KNOWN_SIGNS:
        return _STARTS * longest_stall_s
    return max(longest_stall_s, _SLOWEST_SIGNS * look.longest_s)


def culprit(looks: Sequence[Look]) -> int | None:
    """The one rank that differs from all others: behind them in steps; or busy where they wait
    (they poll), or idle where they are busy (their collectives spin). None where none does."""
    if len(looks) == 1:
        return looks[0].rank
    steps = {look.rank: look.step for look in looks if look.step is not None}
    behind = [rank for rank, step in steps.items() if step < max(steps.values())]
    if len(steps) == len(looks) and len(behind) == 1:
        return behind[0]
    return _alone({look.rank: look.cpu_share for look in looks})


def _alone(shares: Mapping[int, float]) -> int | None:
    """The rank with far more CPU time than all others, else the one with far less; relative, since
    a busy machine gives nobody a whole core."""
    *_, second, most = sorted(shares, key=shares.__getitem__)
    if shares[most] >= _BUSY and shares[most] >= _FAR * shares[second]:
        return most
    least, next_to_it, *_ = sorted(shares, key=shares.__getitem__)
    alone = len(shares) > 2 and shares[next_to_it] >= _BUSY  # of two, either might be the odd one
    return least if alone and shares[next_to_it] >= _FAR * shares[least] else None
