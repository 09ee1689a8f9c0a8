"""The launcher and the engine around it, with real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import RunError
from meshwright.base.events import Kind
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.protocol import Exit

HERE = Path(__file__).parent
LIMIT_S = 20.0

PARENT = """
import sys
from pathlib import Path
from meshwright.conduct.local import LocalEngine
engine = LocalEngine.start("fake_trainer")
pids = engine.launch("fake_trainer:wait", 3, Path(sys.argv[1]), {})
ready = 0
while ready < 3:
    ready += len(engine.poll(20.0))
print(engine._process.pid, *pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{tmp_path}", prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would hide a lost buffer


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine.start("fake_trainer") as engine:
        yield engine


def collect(engine: LocalEngine, exits: int) -> tuple[list[dict[str, Any]], dict[int, Exit]]:
    """Messages and ends until `exits` workers have ended, in the order they came."""
    messages: list[dict[str, Any]] = []
    ends: dict[int, Exit] = {}
    while len(ends) < exits:
        heard = engine.poll(LIMIT_S)
        assert heard, "nothing heard"
        for item in heard:
            if isinstance(item, Exit):
                ends[item.rank] = item
            else:
                assert item["rank"] not in ends, "a worker spoke after its end"
                messages.append(item)
    return messages, ends


def await_gone(pidfds: list[int]) -> bool:
    """Whether all these processes end within `LIMIT_S`; closes the descriptors."""
    try:
        return all(select.select([pidfd], [], [], LIMIT_S)[0] for pidfd in pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def test_launches_follow_each_other_in_one_launcher(engine: LocalEngine, tmp_path: Path) -> None:
    for world in (3, 1, 4):
        pids = engine.launch("fake_trainer:steps", world, tmp_path, {"steps": 2})
        messages, ends = collect(engine, world)
        assert tuple(ends[rank].pid for rank in range(world)) == pids
        assert not any(end.failed for end in ends.values())
        progress = [(m["rank"], m["step"]) for m in messages if m["kind"] == Kind.PROGRESS]
        assert sorted(progress) == [(rank, step) for rank in range(world) for step in (1, 2)]


def test_a_worker_holds_only_its_own_things(engine: LocalEngine, tmp_path: Path) -> None:
    engine.launch("fake_trainer:describe_self", 3, tmp_path, {"key": [1, "a"]})
    _, ends = collect(engine, 3)
    assert not any(end.failed for end in ends.values())
    for rank in range(3):
        said = json.loads((tmp_path / f"rank-{rank}.log").read_text())
        assert said == {
            "extra_fds": [],
            "store": rank == 0,
            "args": {"key": [1, "a"]},
            "world": 3,
            "default_signals": True,
            "threads": 1,
            "omp": "1",
            "gloo": "lo",
        }


def test_signals_that_the_parent_ignores_are_as_usual_in_workers(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        engine = LocalEngine.start("fake_trainer")
    finally:
        signal.signal(signal.SIGHUP, before)
    with engine:
        engine.launch("fake_trainer:describe_self", 1, tmp_path, {})
        collect(engine, 1)
    assert json.loads((tmp_path / "rank-0.log").read_text())["default_signals"]


def test_ends_are_told_apart(engine: LocalEngine, tmp_path: Path) -> None:
    acts = {
        "0": {"at": 1, "do": "SIGSEGV"},
        "1": {"at": 1, "do": "raise lines"},
        "2": {"at": 1, "do": "sys.exit"},
        "3": {"at": 1, "do": "os._exit", "code": 7},
    }
    engine.launch("fake_trainer:steps", 5, tmp_path, {"acts": acts})
    _, ends = collect(engine, 5)
    assert (ends[0].code, ends[0].signal) == (None, signal.SIGSEGV)
    log = (tmp_path / "rank-0.log").read_text()
    assert log.startswith("about to die\n")  # printed, and never flushed by the worker
    assert "Segmentation fault" in log
    assert (ends[1].code, ends[1].signal) == (1, None)
    assert (tmp_path / "rank-1.log").read_text().endswith("\nValueError: first line\n")
    assert (ends[2].code, ends[2].returned) == (0, False)
    assert (ends[3].code, ends[3].returned) == (7, False)
    assert not ends[4].failed


def test_one_launch_at_a_time_and_stop(engine: LocalEngine, tmp_path: Path) -> None:
    engine.launch("fake_trainer:wait", 2, tmp_path, {})
    with pytest.raises(RunError, match="2 workers of a launch still run"):
        engine.launch("fake_trainer:wait", 2, tmp_path, {})
    engine.stop(signal.SIGTERM)
    _, ends = collect(engine, 2)
    assert {end.signal for end in ends.values()} == {signal.SIGTERM}
    engine.launch("fake_trainer:steps", 1, tmp_path, {})
    assert not collect(engine, 1)[1][0].failed


def test_an_entry_that_is_not_there_is_refused(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"AttributeError.*no_such"):
        engine.launch("fake_trainer:no_such", 2, tmp_path, {})
    engine.launch("fake_trainer:steps", 1, tmp_path, {})
    assert not collect(engine, 1)[1][0].failed


def test_an_import_that_fails_shows_why(tmp_path: Path) -> None:
    with (
        LocalEngine.start("no_such_module") as engine,
        pytest.raises(RunError, match=r"died \(exit code 1\).*No module named 'no_such_module'"),
    ):
        engine.launch("no_such_module:main", 1, tmp_path, {})


def test_an_import_that_leaves_a_thread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with (
        LocalEngine.start("threaded") as engine,
        pytest.raises(RunError, match="importing threaded left 2 threads"),
    ):
        engine.launch("threaded:main", 1, tmp_path, {})


def test_an_import_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep({LIMIT_S})\n")
    with LocalEngine.start("slow") as engine:
        assert not engine.wait_warm(0.0)
        with pytest.raises(RunError, match=r"still imports slow after 0\.2 s: it wrote nothing"):
            engine.launch("slow:main", 1, tmp_path, {}, timeout_s=0.2)


def test_leaving_the_engine_leaves_no_worker(tmp_path: Path) -> None:
    with LocalEngine.start("fake_trainer") as engine:
        pids = engine.launch("fake_trainer:wait", 3, tmp_path, {})
        pidfds = [os.pidfd_open(pid) for pid in pids]
    assert select.select(pidfds, [], [], 0)[0] == pidfds
    assert await_gone(pidfds)
    engine.close()


def test_kill_9_of_the_launcher_takes_its_workers_along(
    engine: LocalEngine, tmp_path: Path
) -> None:
    pids = engine.launch("fake_trainer:wait", 3, tmp_path, {})
    pidfds = [os.pidfd_open(pid) for pid in pids]
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"launcher for fake_trainer died \(by SIGKILL\)"):
        collect(engine, 1)
    engine.close()
    assert await_gone(pidfds)


@pytest.mark.parametrize("victim", ["parent", "parent and launcher frozen"])
def test_kill_9_of_the_parent_leaves_no_process(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        pidfds = [os.pidfd_open(pid) for pid in pids]
        if victim != "parent":  # end of file on the control socket alone would not do
            os.kill(pids[0], signal.SIGSTOP)
        parent.send_signal(signal.SIGKILL)
        assert await_gone(pidfds)
