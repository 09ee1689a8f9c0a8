"""The shared record of a worker: what is written is read, whole, also while it is being written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from meshwright.base import pulse
from meshwright.base.pulse import SOMEBODY, Phase, PulseReader, PulseWriter


@pytest.fixture
def memory() -> Iterator[int]:
    fd = pulse.create(3)
    yield fd
    os.close(fd)


def test_a_record_has_64_bytes_and_begins_idle(memory: int) -> None:
    reader = PulseReader(memory)
    assert reader.members == 3
    assert os.fstat(memory).st_size == 3 * 64 == 3 * (pulse._BODY.size + 2 * 4)
    found = reader.read(2)
    assert (found.writes, found.phase, found.waits) == (0, Phase.IDLE, False)


def test_what_a_worker_writes_is_read_and_nothing_else_changes(memory: int) -> None:
    writer, reader = PulseWriter(memory, 1), PulseReader(memory)
    before_ns = time.monotonic_ns()
    writer.step(epoch=4, step=7)
    writer.enter(Phase.BACKWARD)
    writer.begin()
    writer.begin()
    writer.end()
    writer.wait(0)
    found = reader.read(1)
    assert (found.epoch, found.step, found.phase) == (4, 7, Phase.BACKWARD)
    assert (found.begun, found.done, found.waits_for) == (2, 1, 0)
    assert found.writes == 6
    assert before_ns <= found.stepped_ns <= found.stamp_ns <= time.monotonic_ns()
    writer.wait()
    assert reader.read(1).waits_for == SOMEBODY
    writer.resume()
    assert reader.read(1).waits_for is None
    assert reader.read(0).writes == reader.read(2).writes == 0


def test_a_step_begins_with_no_wait_and_no_open_operation(memory: int) -> None:
    """An exception may have cut them short."""
    writer, reader = PulseWriter(memory, 0), PulseReader(memory)
    writer.step(1, 1)
    writer.begin()
    writer.wait(2)
    writer.step(2, 1)
    found = reader.read(0)
    assert (found.epoch, found.begun, found.done, found.waits) == (2, 1, 1, False)


def test_time_in_steps_counts_and_time_between_them_does_not(memory: int) -> None:
    writer, reader = PulseWriter(memory, 0), PulseReader(memory)
    writer.step(1, 1)
    first = reader.read(0)
    spent_ns = _burn(20_000_000)
    writer.enter(Phase.EVALUATE)
    _burn(200_000_000)
    writer.enter(Phase.FORWARD)
    _burn(20_000_000)
    writer.step(1, 2)
    busy_ns = reader.read(0).busy_ns - first.busy_ns
    assert 2 * 20_000_000 <= busy_ns < 200_000_000, (busy_ns, spent_ns)


def test_waits_are_summed_by_step(memory: int) -> None:
    writer, reader = PulseWriter(memory, 0), PulseReader(memory)
    writer.step(1, 1)
    writer.wait(1)
    time.sleep(0.02)
    writer.wait(2)
    time.sleep(0.02)
    writer.resume()
    assert reader.read(0).waited_ns == 0  # as of the beginning of the step
    writer.step(1, 2)
    assert reader.read(0).waited_ns >= 40_000_000


def test_who_sleeps_is_busy_and_who_waits_for_others_is_not(memory: int) -> None:
    """A rank that is held up by its disk or its agent is as slow as one that computes slowly."""
    writer, reader = PulseWriter(memory, 0), PulseReader(memory)
    writer.step(1, 1)
    first = reader.read(0)
    time.sleep(0.05)
    writer.step(1, 2)
    slept = reader.read(0)
    writer.wait(1)
    time.sleep(0.3)
    writer.resume()
    writer.step(1, 3)
    waited = reader.read(0)
    assert slept.busy_ns - first.busy_ns >= 50_000_000
    assert waited.waited_ns - slept.waited_ns >= 300_000_000
    assert waited.busy_ns - slept.busy_ns < 250_000_000


def test_who_waits_for_a_core_is_not_busy(memory: int) -> None:
    """Three others want the core that this process is bound to."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        writer, reader = PulseWriter(memory, 0), PulseReader(memory)
        writer.step(1, 1)
        first, begun_ns = reader.read(0), time.monotonic_ns()
        spent_ns = _burn(100_000_000)
        writer.step(1, 2)
        wall_ns = time.monotonic_ns() - begun_ns
        busy_ns = reader.read(0).busy_ns - first.busy_ns
        assert spent_ns < 1.01 * busy_ns < 0.75 * wall_ns
    finally:
        os.sched_setaffinity(0, cores)
        for rival in rivals:
            rival.kill()
            rival.wait()


@pytest.mark.parametrize("member", [-1, 3])
def test_members_without_a_record_are_refused(memory: int, member: int) -> None:
    with pytest.raises(ValueError, match=f"member {member}"):
        PulseWriter(memory, member)
    with pytest.raises(IndexError, match=f"member {member}"):
        PulseReader(memory).read(member)


def test_no_record_is_ever_torn_and_a_killed_writer_leaves_its_last(memory: int) -> None:
    """Another process writes records whose fields belong together, as fast as it can."""
    child = os.fork()
    if child == 0:
        writer = PulseWriter(memory, 1)
        for step in range(1, 1 << 31):
            writer._begun = writer._done = step
            writer._epoch = writer._step = step
            writer._step_busy_ns = writer._stepped_ns = writer._step_waited_ns = step
            writer._write(step)
    reader = PulseReader(memory)
    try:
        seen = {_check_whole(reader) for _ in range(20_000)}
        while reader.read(1).step == 0:
            _check_whole(reader)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    last = reader.read(1)
    assert reader.read(1) == last
    assert last.step >= max(seen)


def test_a_record_torn_for_good_is_read_all_the_same(memory: int) -> None:
    """A writer that is killed in the middle of a write must not hold the reader up."""
    writer = PulseWriter(memory, 0)
    writer.step(1, 5)
    writer._counts[0] = 99
    assert PulseReader(memory).read(0).step == 5


def _check_whole(reader: PulseReader) -> int:
    found = reader.read(1)
    fields = {found.step, found.epoch, found.begun, found.done}
    fields |= {found.stamp_ns, found.busy_ns, found.stepped_ns, found.waited_ns}
    assert len(fields) == 1, found
    assert found.step - found.writes in (0, 1), found  # 1: it waits for a core before the rear
    return found.step


def _burn(cpu_ns: int) -> int:
    begun_ns = time.thread_time_ns()
    while (spent_ns := time.thread_time_ns() - begun_ns) < cpu_ns:
        pass
    return spent_ns
