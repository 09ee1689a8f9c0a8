"""What is seen of a script that tells nothing, or a little, and what is made of it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.conduct.foreign_decide import Cause, Trouble
from meshwright.conduct.foreign_environment import Ports, Shared, defaults, of_rank
from meshwright.conduct.foreign_looks import Look, Watcher, culprit, judge
from meshwright.conduct.foreign_processes import command
from meshwright.conduct.foreign_words import describe
from meshwright.conduct.processes import Process
from meshwright.conduct.watching import LONGEST_LOOK_S

STALL_S, FROZEN_S = 10.0, 0.2
IDLE = Process("S", 1, 0.0)


def look(
    rank: int,
    quiet_s: float = 20.0,
    signs: int = 9,
    cpu: float = 0.0,
    step: int | None = None,
    state: str = "S",
    state_s: float = 0.0,
) -> Look:
    return Look(rank, step is not None, signs, quiet_s, 1.0, state, state_s, cpu, step)


def verdict(*looks: Look) -> Cause | None:
    return judge(looks, STALL_S, FROZEN_S)


def test_one_that_is_stopped_is_frozen_and_nobody_else() -> None:
    assert verdict(look(0), look(1, 0.1, state="T", state_s=0.19)) is None
    found = verdict(look(0), look(1, 0.1, state="T", state_s=0.2))
    assert found == Cause(Trouble.FROZEN, 1, "stopped (state T)")


def test_one_held_by_the_kernel_is_frozen_only_after_the_longest_stall() -> None:
    assert verdict(look(0, 0.0), look(1, 9.9, state="D", state_s=9.9)) is None
    found = verdict(look(0, 0.0), look(1, 10.0, state="D", state_s=10.0))
    assert found == Cause(Trouble.FROZEN, 1, "held by the kernel (state D)")


def test_silence_of_all_is_a_hang_and_a_word_of_one_is_none() -> None:
    assert verdict(look(0), look(1)) == Cause(Trouble.HANG, None, "no progress")
    assert verdict(look(0), look(1, 9.9)) is None


def test_where_ranks_tell_of_steps_a_log_that_grows_is_no_progress() -> None:
    """A stuck rank's peer writes warnings for ever."""
    warns = look(2, quiet_s=0.1)
    found = verdict(look(0, step=5), look(1, step=4), warns)
    assert found is not None
    assert found.trouble is Trouble.HANG


def test_a_start_may_take_longer_and_so_may_what_took_long_before() -> None:
    starting = look(0, quiet_s=39.0, signs=1)
    assert verdict(starting) is None
    assert verdict(replace(starting, quiet_s=40.0)) is not None
    slow = replace(look(0, quiet_s=59.0), longest_s=20.0)
    assert verdict(slow) is None
    assert verdict(replace(slow, quiet_s=60.0)) is not None


@pytest.mark.parametrize(
    ("looks", "rank"),
    [
        ([look(0, step=7), look(1, step=6), look(2, step=7)], 1),
        ([look(0, step=7), look(1, step=6), look(2, step=6)], None),
        ([look(0, cpu=0.01), look(1, cpu=0.98), look(2, cpu=0.02)], 1),  # peers poll
        ([look(0, cpu=1.0), look(1, cpu=0.0), look(2, cpu=1.0)], 1),  # peers spin
        ([look(0, cpu=1.0), look(1, cpu=0.0)], 0),  # of two, the loop rather than the wait
        ([look(0, cpu=0.0), look(1, cpu=0.0)], None),
        ([look(0, cpu=0.2), look(1, cpu=0.3), look(2, cpu=0.5)], None),
        ([look(0, cpu=0.02), look(1, cpu=0.3), look(2, cpu=0.05)], 1),  # on a busy machine
        ([look(0, cpu=0.001), look(1, cpu=0.02), look(2, cpu=0.001)], None),
        ([look(0)], 0),
    ],
)
def test_a_rank_is_named_only_if_it_differs_from_all_others(
    looks: list[Look], rank: int | None
) -> None:
    assert culprit(looks) == rank


def test_a_watcher_counts_signs_and_the_time_between_them(tmp_path: Path) -> None:
    log, progress = tmp_path / "log", tmp_path / "progress"
    log.write_text("of an earlier incarnation\n")
    progress.write_text("99")
    watcher = Watcher(0, log, progress)
    seen = watcher.look(0.0, IDLE)
    assert (seen.signs, seen.beats, seen.step) == (0, False, None)
    log.write_text("of an earlier incarnation\nnow\n")
    assert watcher.look(0.1, IDLE).signs == 1
    quiet = watcher.look(0.3, Process("S", 1, 0.2))
    assert [quiet.quiet_s, quiet.cpu_share] == pytest.approx([0.2, 1.0])
    with log.open("a") as file:
        file.write("more\n")
    seen = watcher.look(0.4, IDLE)
    assert [seen.signs, seen.longest_s] == pytest.approx([2, 0.3])


def test_a_progress_file_counts_alone_once_it_is_used(tmp_path: Path) -> None:
    log, progress = tmp_path / "log", tmp_path / "progress"
    watcher = Watcher(0, log, progress)
    watcher.look(0.0, IDLE)
    progress.touch()
    assert (seen := watcher.look(0.1, IDLE)).beats
    assert seen.step is None
    log.write_text("a warning\n")
    assert watcher.look(0.2, IDLE).quiet_s == pytest.approx(0.1)
    progress.write_text("step 12\n")
    seen = watcher.look(0.3, IDLE)
    assert (seen.step, seen.quiet_s, seen.signs) == (12, 0.0, 2)
    progress.write_text("13")
    assert watcher.look(0.4, IDLE).step == 13
    progress.write_text("")  # it is being written
    assert watcher.look(0.5, IDLE).step == 13
    progress.write_text("14")
    watcher.last_look()
    assert watcher.step == 14


def test_time_that_nobody_watched_does_not_count(tmp_path: Path) -> None:
    watcher = Watcher(0, tmp_path / "log", tmp_path / "progress")
    watcher.look(0.0, IDLE)
    assert watcher.look(3600.0, IDLE).quiet_s == LONGEST_LOOK_S


def test_ranks_are_told_what_torchrun_and_jax_would_tell_them(tmp_path: Path) -> None:
    shared = Shared(4, 1111, 2222, 2, 5, "run-1", tmp_path, jax=False)
    told = of_rank(shared, 3, tmp_path / "p")
    assert [told[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "3", "4"]
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("127.0.0.1", "1111")
    assert told["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert told["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:2222"
    assert (told["JAX_PROCESS_ID"], told["JAX_NUM_PROCESSES"]) == ("3", "4")
    assert not any(name.startswith("OMPI") for name in told)
    as_jax = of_rank(replace(shared, jax=True), 3, tmp_path / "p")
    assert (as_jax["OMPI_COMM_WORLD_RANK"], as_jax["OMPI_COMM_WORLD_SIZE"]) == ("3", "4")


def test_what_the_user_has_set_is_left_alone() -> None:
    assert defaults({}, world=2)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in defaults({"OMP_NUM_THREADS": "8"}, world=2)
    assert "OMP_NUM_THREADS" not in defaults({}, world=1)


def test_ports_are_kept_from_others_and_free_for_the_ranks() -> None:
    with Ports() as ports:
        assert ports.master != ports.coordinator
        with socket.socket() as server:
            with pytest.raises(OSError, match="in use"):
                server.bind(("127.0.0.1", ports.master))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", ports.master))
            server.listen()


@pytest.mark.parametrize(
    ("words", "spare"),
    [
        ("python x.py --lr 1", ("x.py", "--lr", "1")),
        ("/usr/bin/python3.11 -u x.py", ("x.py",)),
        ("python -m train.main a", ("-m", "train.main", "a")),
        ("python -c pass", None),
        ("python -m", None),
        ("python", None),
        ("bash x.sh", None),
    ],
)
def test_what_a_spare_can_run(words: str, spare: tuple[str, ...] | None) -> None:
    assert command(words.split()).spare == spare


STACK = """\
Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "train.py", line 33 in evaluate
  File "train.py", line 90 in <module>
"""


@pytest.mark.parametrize(
    ("cause", "said", "line"),
    [
        (
            Cause(Trouble.EXIT, 1, "exit code 1"),
            "x\nValueError: no\n",
            "with exit code 1: ValueErr",
        ),
        (Cause(Trouble.EXIT, 1, "exit code 3"), "", "with exit code 3: it wrote nothing"),
        (Cause(Trouble.SIGNAL, 1, "SIGKILL"), "x", "rank 1 died at step 4 by SIGKILL; log: "),
        (Cause(Trouble.HANG, 1, ""), STACK, "rank 1 hung at step 4 in evaluate, train.py:33; log"),
        (Cause(Trouble.HANG, 1, ""), "", "rank 1 hung at step 4; log"),
        (Cause(Trouble.FROZEN, 1, "stopped (state T)"), "", "was stopped (state T) at step 4"),
        (Cause(Trouble.HANG, None, ""), STACK, "no rank makes progress at step 4, and none"),
    ],
)
def test_an_incident_is_one_line(tmp_path: Path, cause: Cause, said: str, line: str) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("RuntimeError: of an earlier incarnation\n" + said)
    found = describe(cause, 4, log, start_bytes=len("RuntimeError: of an earlier incarnation\n"))
    assert line in found
    assert "\n" not in found
    assert os.fspath(tmp_path) in found
