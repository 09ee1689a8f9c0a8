"""Spares become ranks whenever they are told to, and nothing that a rank starts is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.conduct import foreign_processes as processes
from meshwright.conduct.foreign_processes import command
from meshwright.conduct.foreign_spares import Spares

LIMIT_S = 60.0
SCRIPT = """\
import json, os, sys
told = [sys.argv[1:], os.environ["RANK"], __name__, sys.path[0], "late" in sys.modules]
print(json.dumps(told))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, and a module `late` that is imported when there is a file `go`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()
    waiting = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n"
    (tmp_path / "modules" / "late.py").write_text(waiting + "    time.sleep(0.005)\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_spare_becomes_a_rank_warm_or_not(script: Path, warm: bool, as_module: bool) -> None:
    folder = script.parent
    spare = processes.start_spare(sys.executable, ["late"], {}, folder / "spare.log")
    assert not spare.warm()
    if warm:
        (folder / "go").touch()
        _await(spare.warm)
    argv = ["-m", "train", "a", "b"] if as_module else [str(script), "a", "b"]
    if as_module:
        script.rename(folder / "modules" / "train.py")
    rank = spare.become(argv, {"RANK": "7"}, folder / "rank.log")
    (folder / "go").touch()
    assert rank.reap() == 0, (folder / "spare.log").read_text()
    said = json.loads((folder / "rank.log").read_text())
    assert said[:3] == [["a", "b"], "7", "__main__"]
    assert said[3] == (os.getcwd() if as_module else str(folder))  # noqa: PTH109
    assert said[4]


def test_a_spare_ends_with_its_supervisor(script: Path) -> None:
    spare = processes.start_spare(sys.executable, [], {}, script.parent / "spare.log")
    _await(spare.warm)
    spare.control.close()
    assert spare.child.reap() == 0


def test_spares_are_made_one_after_another_and_given_up_if_they_die(script: Path) -> None:
    known = command([sys.executable, str(script)])
    spares = Spares(known, 2, ["late"], {}, script.parent)
    try:
        spares.refill()
        spares.refill()
        assert len(spares.pids) == 1  # the first is not warm yet
        (script.parent / "go").touch()
        _await(lambda: _filled(spares).warm() == 2)
        os.kill(spares.pids[0], signal.SIGKILL)
        _await(lambda: spares.warm() == 1)
        taken = spares.take({"RANK": "0"}, script.parent / "rank.log")
        assert taken is not None
        assert taken.reap() == 0
        assert spares.broken is None
    finally:
        spares.end()
    broken = Spares(known, 1, ["no_such"], {}, script.parent)
    _await(lambda: _filled(broken).broken is not None)
    assert broken.pids == ()


def test_all_that_a_rank_leaves_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    """Its child is in another session, and its grandchild in another one still."""
    processes.adopt_orphans()
    mine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = frozenset(processes.descendants())
    pids = tmp_path / "pids"
    leave = (
        "import os, time\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.setsid()\n"
        f" log = os.open({str(pids)!r}, os.O_APPEND | os.O_WRONLY | os.O_CREAT)\n"
        " os.write(log, b'%d ' % os.getpid())\n"
        " time.sleep(1e6)\n"
    )
    rank = processes.start([sys.executable, "-c", leave], {}, tmp_path / "log")
    assert rank.reap() == 0
    _await(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    left = {int(pid) for pid in pids.read_text().split()}
    assert left == set(processes.descendants(before))
    processes.end_orphans(before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    assert mine.poll() is None
    mine.communicate(b"\n")


def _filled(spares: Spares) -> Spares:
    spares.refill()
    return spares


def _await(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
