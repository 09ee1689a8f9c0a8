"""Engine `local` with real processes: whatever dies when, a run is started once, and is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import Kind
from meshwright.cli import session, warmed
from meshwright.conduct.rundir import read_lines
from meshwright.control.engines import launch
from meshwright.control.engines.engine import ClusterOrder, Fault, RunOrder, RunReport
from meshwright.control.engines.local import LocalProcesses
from meshwright.control.engines.processes import ProcessId, hands, kill, process_id
from meshwright.control.engines.runs import CONDUCTOR_GONE, last_step
from meshwright.control.engines.warm import Waiting
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, Health, NodeAction, RunState

LIMIT_S = 120.0  # of anything a test waits for: a guard against hanging, not a measure
LONG = 100_000  # steps, of a run that does not end by itself
JOB = """\
[job]
name = "small"
steps = {steps}
eval_every = {steps}
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
kv_heads = 2
ffn_hidden = 32
vocab = 300
max_seq_len = 32
[data]
source = "{source}"
seq_len = 32
global_batch = 2
[layout]
dp_replicate = {ranks}
micro_batch = 1
[cluster]
ref = "local:{ranks}"
[checkpoint]
every = 2
[resilience]
redundancy = "{redundancy}"
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalProcesses]:
    """One service's, with a conductor that is warm if there was time for it."""
    engine = LocalProcesses()
    yield engine
    engine.close()


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Corpora are prepared once, and here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MESHWRIGHT_CACHE", str(folder))
        corpus = folder / "corpus"
        corpus.mkdir()
        for number in range(12):
            text = "".join(f"def f{n}_{number}(x):\n    return x * {n}\n\n" for n in range(60))
            (corpus / f"m{number}.py").write_text(text)
        yield corpus


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOrder]:
    """One node of two chips; what a test leaves running on it is killed."""
    spec = ClusterSpec(name="here", engine="local", nodes=1, chips_per_node=2, spares=0)
    yield ClusterOrder("c", spec, 2, tmp_path / "home", time.time())
    for file in tmp_path.glob("*.launch"):
        run_dir = file.with_suffix("")
        found = launch.read(run_dir)
        if found is not None and launch.is_held(run_dir):
            kill([ProcessId(found.pid, found.start)])
        kill(hands(run_dir).all)


@pytest.fixture
def order(tmp_path: Path, _cache: Path) -> Callable[..., RunOrder]:
    def make(
        steps: int = 4, attempt: int = 1, ranks: int = 1, redundancy: str = "none"
    ) -> RunOrder:
        job = tmp_path / "job.toml"
        job.write_text(JOB.format(steps=steps, source=_cache, ranks=ranks, redundancy=redundancy))
        chips = tuple((0, chip) for chip in range(ranks))
        return RunOrder("j", attempt, tmp_path / "run", job, chips, ranks, time.time())

    return make


def wait(
    engine: LocalProcesses,
    cluster: ClusterOrder,
    run: RunOrder,
    what: Callable[[RunReport], bool],
) -> RunReport:
    """Until what is seen of a run is as wanted."""
    deadline_s = time.monotonic() + LIMIT_S
    while not what(report := engine.look(cluster, run)):
        assert time.monotonic() < deadline_s, report
        assert not report.state.ended, (report, launch.log_file(run.run_dir).read_text())
        time.sleep(0.01)
    return report


def wait_for(
    engine: LocalProcesses, cluster: ClusterOrder, run: RunOrder, state: RunState
) -> RunReport:
    return wait(engine, cluster, run, lambda report: report.state is state)


def count(run: RunOrder, kind: Kind) -> int:
    return sum(event["kind"] == kind for event in read_lines(run.run_dir / "events.jsonl"))


def gone(process: ProcessId) -> bool:
    deadline_s = time.monotonic() + LIMIT_S
    while process_id(process.pid) == process and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return process_id(process.pid) != process


def test_a_run_is_started_once_and_found_by_another_service(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder]
) -> None:
    run = order()
    assert engine.look(cluster, run).state is RunState.ABSENT
    handle = engine.start(cluster, run)
    assert engine.start(cluster, run) == handle
    other = LocalProcesses()
    assert other.start(cluster, run) == handle
    assert other.look(cluster, run).state in (RunState.STARTING, RunState.RUNNING)
    wait_for(engine, cluster, run, RunState.FINISHED)
    assert other.look(cluster, run) == RunReport(RunState.FINISHED)
    assert other.start(cluster, run) == handle, "it has ended, and is not started again"
    assert count(run, Kind.RUN_STARTED) == 1
    other.close()


_SERVICE = """
import os, signal, sys, time
from pathlib import Path
from meshwright.control.engines import launch
from meshwright.control.engines.engine import ClusterOrder, RunOrder
from meshwright.control.engines.local import LocalProcesses
from meshwright.control.engines.warm import Waiting
from meshwright.control.spec import ClusterSpec

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(function):
    return lambda *args, **named: (function(*args, **named), die())

point, folder = sys.argv[1], Path(sys.argv[2])
match point:
    case "forked": launch.write = die
    case "written": Waiting.give = die
    case "given": Waiting.give = die_after(Waiting.give)
cluster = ClusterOrder("c", ClusterSpec(name="here", engine="local", nodes=1), 8, folder, 0.0)
run = RunOrder("j", 1, folder / "run", folder / "job.toml", ((0, 0),), 1, 0.0)
LocalProcesses().start(cluster, run)
die()
"""


@pytest.mark.parametrize("point", ["forked", "written", "given", "returned"])
def test_a_service_that_is_killed_while_it_starts_a_run(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder], point: str
) -> None:
    run = order(steps=0)  # a job that is refused: it says so once for each time it is started
    command = [sys.executable, "-c", _SERVICE, point, str(run.run_dir.parent)]
    service = subprocess.run(command, timeout=LIMIT_S, stderr=subprocess.DEVNULL)
    assert service.returncode == -signal.SIGKILL
    was_given = point in ("given", "returned")
    assert (engine.look(cluster, run).state is not RunState.ABSENT) == was_given
    engine.start(cluster, run)
    report = wait(engine, cluster, run, lambda report: report.state is RunState.FAILED)
    assert "job.steps" in report.message
    assert launch.log_file(run.run_dir).read_text().count("error: ") == 1
    assert not run.run_dir.exists()


def test_a_conductor_without_a_job_ends_with_its_service() -> None:
    waiting = Waiting.start(gently=True)
    process = waiting.let_go()
    assert process.wait(LIMIT_S) == 0
    assert gone(waiting.id)
    assert warmed.WORKER == session.WORKER


def test_stopped_gone_on_with_and_killed(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder]
) -> None:
    engine.observe(cluster, time.time())
    run = order(LONG)
    engine.start(cluster, run)
    wait(engine, cluster, run, lambda _: last_step(run.run_dir) >= 2)
    for _ in range(3):  # asking again is no second Ctrl-C, which would end it unsaved
        engine.stop(cluster, run, hard=False)
    assert wait_for(engine, cluster, run, RunState.STOPPED).message == ""
    assert count(run, Kind.RUN_INTERRUPTED) == 1

    again = order(LONG, attempt=2)
    assert engine.look(cluster, again).state is RunState.ABSENT
    engine.start(cluster, again)
    wait_for(engine, cluster, again, RunState.RUNNING)
    with pytest.raises(RunError, match="attempt 2"):
        engine.start(cluster, run)
    found = hands(run.run_dir)
    assert list(found.ranks) == [0]
    engine.stop(cluster, again, hard=True)
    assert engine.look(cluster, again) == RunReport(RunState.STOPPED, "killed on request")
    assert gone(found.ranks[0])
    *_, last = (e for e in read_lines(run.run_dir / "events.jsonl") if e["kind"] == "run_started")
    assert last["resumed_from"] > 0


def test_a_conductor_that_is_killed_is_lost_and_the_next_attempt_goes_on(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder]
) -> None:
    run = order(LONG)
    handle = engine.start(cluster, run)
    wait_for(engine, cluster, run, RunState.RUNNING)
    engine.observe(cluster, time.time())  # warms up the next conductor
    kill([ProcessId(handle["pid"], handle["start"])])
    wait_for(engine, cluster, run, RunState.LOST)
    assert engine.start(cluster, run) == handle, "this attempt is over"
    again = order(LONG, attempt=2)
    engine.start(cluster, again)
    wait_for(engine, cluster, again, RunState.RUNNING)
    assert engine.look(cluster, run).state is RunState.LOST


def test_agents_that_lose_their_conductor_get_another(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder]
) -> None:
    run = order(LONG, ranks=2, redundancy="twin")
    handle = engine.start(cluster, run)
    wait(engine, cluster, run, lambda _: last_step(run.run_dir) >= 1)
    engine.observe(cluster, time.time())  # warms up the next conductor
    ranks = hands(run.run_dir).ranks
    kill([ProcessId(handle["pid"], handle["start"])])
    wait(engine, cluster, run, lambda report: report.orphaned)  # its lock goes with it, not before
    assert engine.look(cluster, run) == RunReport(RunState.RUNNING, CONDUCTOR_GONE, orphaned=True)
    with pytest.raises(RunError, match="starts again"):  # it cannot save without one
        engine.stop(cluster, run, hard=False)
    other = LocalProcesses()
    assert other.start(cluster, run) != handle
    done = last_step(run.run_dir)
    wait(other, cluster, run, lambda _: count(run, Kind.RUN_STARTED) == 2)
    wait(other, cluster, run, lambda _: last_step(run.run_dir) > done)
    assert hands(run.run_dir).ranks == ranks, "they have trained on"
    other.stop(cluster, run, hard=False)
    wait_for(other, cluster, run, RunState.STOPPED)
    assert not hands(run.run_dir).all
    other.close()


def test_a_dead_chip_is_the_death_of_its_process_once(
    engine: LocalProcesses, cluster: ClusterOrder, order: Callable[..., RunOrder]
) -> None:
    run = order(LONG, ranks=2)
    engine.start(cluster, run)
    wait_for(engine, cluster, run, RunState.RUNNING)
    fault = Fault("f", FaultKind.CHIP_DEAD, 0, 1, 0.5, time.time(), None)
    cluster = ClusterOrder(**{**cluster.__dict__, "runs": [run], "faults": [fault]})
    assert engine.observe(cluster, time.time()).nodes[0].chips == (Health.HEALTHY, Health.FAILED)
    sample = engine.observe(cluster, time.time()).sample
    assert sample is not None
    assert (sample[:, 2] > 1e6).all(), "bytes of memory"
    with pytest.raises(ConfigError, match="chip_dead"):
        engine.inject(cluster, Fault("s", FaultKind.CHIP_SLOW, 0, 1, 0.5, time.time(), None))
    engine.inject(cluster, fault)
    report = wait_for(engine, cluster, run, RunState.FAILED)
    assert "rank 1 died" in report.message
    again = order(LONG, attempt=2, ranks=2)
    engine.start(cluster, again)
    wait_for(engine, cluster, again, RunState.RUNNING)
    ranks = hands(run.run_dir).ranks
    engine.inject(cluster, fault)  # asked for again by a service that was killed meanwhile
    assert hands(run.run_dir).ranks == ranks
    engine.destroy(cluster)
    engine.stop(cluster, again, hard=True)


def test_a_cluster_is_ready_after_its_self_test(
    engine: LocalProcesses, cluster: ClusterOrder
) -> None:
    steps = list(engine.deploy(cluster))
    assert [steps[0].phase, steps[-1].phase] == ["initialise", "ready"]
    progress = [step.progress for step in steps]
    assert progress == sorted(progress)
    figures = {name: value for step in steps for name, value in step.figures.items()}
    speeds = {"wire_gb_s", "write_gb_s", "fp32_gflops", "bf16_gflops", "fp8_gflops", "memory_gb_s"}
    assert speeds < figures.keys()
    assert all(value > 0 for value in figures.values())
    assert next(iter(engine.act(cluster, 0, NodeAction.DRAIN))).phase == "ready"


def test_a_folder_that_takes_nothing_fails_the_deployment(
    engine: LocalProcesses, cluster: ClusterOrder
) -> None:
    steps = engine.deploy(cluster)
    next(steps)
    cluster.home.rmdir()
    cluster.home.symlink_to(os.devnull)
    with pytest.raises(RunError, match="self-test of here"):
        list(steps)
