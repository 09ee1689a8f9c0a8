"""What a worker is doing, in memory that it shares with the agent of its machine.

One record of 64 bytes a member in one memfd: the worker writes its own with one `pack_into`, the
agent reads all of them as often as it likes. No lock, no system call, no thread, and a worker that
is frozen, stuck in a loop or dead leaves its last record behind.

A record is written front to back, between two copies of a count of writes; a reader takes the rear
copy, the record, then the front copy, and tries again where the two differ. That is exact where
stores become visible in order (x86). Elsewhere, and of a worker that does not run in the middle of
a write, a record may mix two neighbouring writes, which does no harm: each field is one of the two,
and verdicts rest on records that have not changed for long.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from typing import NamedTuple

RECORD_BYTES = 64
NOBODY = 0  # `waits_for` of one who waits for no one
SOMEBODY = 0xFFFF_FFFF  # of one who waits, and does not say for whom

# Between the two counts: epoch, step, waits_for, begun, stamp, stepped, busy, waited, open, phase.
# Unpadded ("="): after the front count, all fields are aligned.
_BODY = struct.Struct("=IIIQQQQQHH")
_COUNT_BYTES = 4
_COUNTS = RECORD_BYTES // _COUNT_BYTES  # places of a count in a record
_MOST_OPEN = 0xFFFF  # operations under way; more are told as this many
_TRIES = 10_000
_UNMOVED = 100  # of them in which the record stays as it is


class Phase(IntEnum):
    """What a worker is at."""

    IDLE = 0  # a spare, or not begun: nothing is expected of it
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCE = 4
    VOTE = 5
    OPTIMIZER = 6
    MIRROR = 7
    EVALUATE = 8
    CHECKPOINT = 9
    TAKEOVER = 10


# Not part of a step: their time says nothing about how fast a rank is. As plain numbers, which
# hash several times as fast as the names.
_ASIDE = frozenset(
    phase.value for phase in (Phase.IDLE, Phase.EVALUATE, Phase.CHECKPOINT, Phase.TAKEOVER)
)


class Pulse(NamedTuple):
    """One record as it was read. Times are of CLOCK_MONOTONIC, which a machine's processes share.

    `busy_ns`, `waited_ns` and `stepped_ns` are as of the beginning of `step`, so that differences
    between two steps are exact however seldom records are read.
    """

    writes: int  # changes with every write, modulo 2**32
    epoch: int
    step: int
    phase: Phase
    begun: int  # operations of the fabric that were begun, ever
    done: int  # and ended
    waits_for: int | None  # member; None: waits for nobody; SOMEBODY: for one unknown
    stamp_ns: int  # of the last write
    stepped_ns: int  # when `step` began
    busy_ns: int  # time in the steps before `step` in no wait: neither for others nor for a core
    waited_ns: int  # time in waits for others before `step`

    @property
    def waits(self) -> bool:
        """Whether it is in a wait for another member."""
        return self.waits_for is not None


def create(members: int) -> int:
    """A descriptor of memory for `members` records, all idle; children may inherit it."""
    fd = os.memfd_create("meshwright-pulse", os.MFD_CLOEXEC)
    os.ftruncate(fd, members * RECORD_BYTES)
    return fd


class PulseWriter:
    """A worker's side: one write of about 2 us for each thing that it begins or ends.

    For one thread, that which makes it. Operations may overlap; waits do not. Whoever sleeps or is
    held up by its disk is busy; who waits for a core is not (proc_pid_schedstat(5)). Where the
    kernel does not count that, busy is who uses a core.
    """

    def __init__(self, fd: int, member: int) -> None:
        """Take the record of `member`, numbered from 0. Raises ValueError if it has none."""
        size = os.fstat(fd).st_size
        if not 0 <= member < size // RECORD_BYTES:
            raise ValueError(f"member {member}: the pulse has {size // RECORD_BYTES} records")
        self._memory = memoryview(mmap.mmap(fd, size))
        self._counts = self._memory.cast("I")
        self._front = member * _COUNTS
        self._rear = self._front + _COUNTS - 1
        self._body = _body(member)
        self._writes, self._epoch, self._step = 0, 0, 0
        self._phase = int(Phase.IDLE)
        self._aside = True  # in a spell that belongs to no step
        self._begun = self._done = 0
        self._waits_for = NOBODY
        self._wait_ns = self._waited_ns = 0
        # Of the waits for others, and of the one under way: in how much of it a core was there.
        self._wait_delayed_ns = self._idle_ns = 0
        self._schedstat = _open_schedstat()
        self._stepped_ns = self._step_busy_ns = self._step_waited_ns = 0
        # Busy time that belongs to no step, and where the present such spell began.
        self._aside_ns, self._aside_from_ns = 0, self._busy_ns(time.monotonic_ns())

    def enter(self, phase: Phase) -> None:
        """Say what comes next in this step."""
        self._phase = code = phase.value
        if (code in _ASIDE) is not self._aside:
            self._turn()
        self._write(time.monotonic_ns())

    def step(self, epoch: int, step: int, phase: Phase = Phase.DATA) -> None:
        """Say that `step` begins (or begins again, in a newer epoch) with `phase`.

        A wait or operations that an exception has cut short are forgotten.
        """
        if self._aside:
            self._turn()
        now_ns = time.monotonic_ns()
        self._end_wait(now_ns)
        self._waits_for, self._done = NOBODY, self._begun
        self._epoch, self._step, self._phase = epoch, step, phase.value
        self._stepped_ns, self._step_waited_ns = now_ns, self._waited_ns
        self._step_busy_ns = self._busy_ns(now_ns) - self._aside_ns
        self._write(now_ns)

    def begin(self) -> None:
        """Count an operation of the fabric that begins."""
        self._begun += 1
        self._write(time.monotonic_ns())

    def end(self) -> None:
        """Count one that has ended."""
        if self._done < self._begun:
            self._done += 1
        self._write(time.monotonic_ns())

    def wait(self, member: int | None = None) -> None:
        """Say that nothing goes on here before `member` has sent (None: before some other has).

        May be said again with another one while the wait lasts.
        """
        now_ns = time.monotonic_ns()
        if not self._waits_for:
            self._wait_ns, self._wait_delayed_ns = now_ns, self._delayed_ns()
        self._waits_for = SOMEBODY if member is None else member + 1
        self._write(now_ns)

    def resume(self) -> None:
        """Say that the wait is over."""
        now_ns = time.monotonic_ns()
        self._end_wait(now_ns)
        self._waits_for = NOBODY
        self._write(now_ns)

    def _end_wait(self, now_ns: int) -> None:
        if self._waits_for:
            waited_ns = now_ns - self._wait_ns
            self._waited_ns += waited_ns
            self._idle_ns += waited_ns - (self._delayed_ns() - self._wait_delayed_ns)

    def _busy_ns(self, now_ns: int) -> int:
        """All of it, from some moment on; not to be asked in a wait."""
        if self._schedstat is None:
            return time.thread_time_ns()
        return now_ns - self._delayed_ns() - self._idle_ns

    def _delayed_ns(self) -> int:
        """How long the thread has waited for a core, ever."""
        if self._schedstat is None:
            return 0
        return int(os.pread(self._schedstat, 64, 0).split()[1])

    def close(self) -> None:
        """Let go of the memory; the record stays as it is."""
        if self._schedstat is not None:
            os.close(self._schedstat)
        self._counts.release()
        self._memory.release()

    def _turn(self) -> None:
        now_ns = self._busy_ns(time.monotonic_ns())
        if self._aside:
            self._aside_ns += now_ns - self._aside_from_ns
        else:
            self._aside_from_ns = now_ns
        self._aside = not self._aside

    def _write(self, now_ns: int) -> None:
        self._writes = writes = (self._writes + 1) & 0xFFFF_FFFF
        still_open = self._begun - self._done
        # Not by pack_into, which clears what it writes to before it writes.
        body = _BODY.pack(
            self._epoch,
            self._step,
            self._waits_for,
            self._begun,
            now_ns,
            self._stepped_ns,
            self._step_busy_ns,
            self._step_waited_ns,
            still_open if still_open < _MOST_OPEN else _MOST_OPEN,
            self._phase,
        )
        self._counts[self._front] = writes
        self._memory[self._body] = body
        self._counts[self._rear] = writes


class PulseReader:
    """The agent's side."""

    def __init__(self, fd: int) -> None:
        """Map the records of `create`."""
        size = os.fstat(fd).st_size
        self.members = size // RECORD_BYTES
        self._memory = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        self._counts = self._memory.cast("I")

    def read(self, member: int) -> Pulse:
        """The last whole record of `member`. Raises IndexError if it has none."""
        if not 0 <= member < self.members:
            raise IndexError(f"member {member}: the pulse has {self.members} records")
        front, body = member * _COUNTS, _body(member)
        before, unmoved = (-1, -1), 0
        for _ in range(_TRIES):
            rear_count = self._counts[front + _COUNTS - 1]
            record = bytes(self._memory[body])
            front_count = self._counts[front]
            # Given up only on a writer that stands still: of one that goes on while we wait for a
            # core, count and record may be of writes far apart.
            unmoved = unmoved + 1 if (rear_count, front_count) == before else 0
            if front_count == rear_count or unmoved == _UNMOVED:
                break
            before = rear_count, front_count
        return _pulse(rear_count, _BODY.unpack(record))

    def close(self) -> None:
        """Let go of the memory."""
        self._counts.release()
        self._memory.release()


def _open_schedstat() -> int | None:
    """That of this thread; None where the kernel keeps none."""
    try:
        found = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if len(os.pread(found, 64, 0).split()) < 2:
        os.close(found)
        return None
    return found


def _body(member: int) -> slice:
    """Where a record lies, its counts left out."""
    first = member * RECORD_BYTES
    return slice(first + _COUNT_BYTES, first + RECORD_BYTES - _COUNT_BYTES)


def _pulse(writes: int, body: tuple[int, ...]) -> Pulse:
    epoch, step, waits_for, begun, stamp, stepped, busy, waited, still_open, phase = body
    whom = None if waits_for == NOBODY else waits_for - (waits_for != SOMEBODY)
    done = begun - still_open
    return Pulse(writes, epoch, step, Phase(phase), begun, done, whom, stamp, stepped, busy, waited)
