"""The kernel tells of an end before the parent can wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from meshwright.conduct.exiting import is_exiting


def test_a_process_is_exiting_once_it_is_killed_and_when_it_is_gone() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper) as process:
        stat_fd = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY)
        assert not is_exiting(stat_fd)
        process.kill()
        deadline_s = time.monotonic() + 30.0
        while not is_exiting(stat_fd):  # nobody has waited for it yet
            assert time.monotonic() < deadline_s
        assert process.returncode is None
        process.wait()
    assert is_exiting(stat_fd)
    os.close(stat_fd)


def test_a_name_with_brackets_does_not_mislead() -> None:
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        stat_fd = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY)
        assert b") 4 4 4 (" in os.pread(stat_fd, 1024, 0)
        assert not is_exiting(stat_fd)
        process.kill()
        os.close(stat_fd)


RENAMED = """
import time
open("/proc/self/comm", "w").write("a) 4 4 4 (")
print(flush=True)
time.sleep(60)
"""
