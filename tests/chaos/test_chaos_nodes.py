"""Machines that are lost with all that is on them, and come back: over real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_machines import Conducted, Outpost, hired
from chaos_network import Network, network
from test_chaos_members import (  # noqa: F401 (fixtures)
    Ended,
    Stage,
    agree,
    hashes,
    kept_at,
    stage,
    tokens,
)

from meshwright.base.events import Kind
from meshwright.conduct.limits import limits
from meshwright.conduct.rundir import read_lines

_BOUND_S = 60.0
LEASE_S = limits(3.0).lease_agent_s  # of the job "machines"


@pytest.fixture(scope="module")
def cables() -> Iterator[Network]:
    with network() as made:
        yield made


def wait_for(what: Callable[[], object], words: Callable[[], str] = str) -> None:
    """Until `what` is true; not for ever."""
    deadline_s = time.monotonic() + _BOUND_S
    while not what():
        assert time.monotonic() < deadline_s, f"it did not happen\n{words()}"
        time.sleep(0.02)


def steps(run: Path) -> list[int]:
    """Those with metrics so far."""
    metrics = run / "metrics.jsonl"
    return [line["step"] for line in read_lines(metrics)] if metrics.exists() else []


def events(run: Path, *kinds: Kind) -> list[dict[str, Any]]:
    """The stored events of these kinds."""
    path = run / "events.jsonl"
    return [e for e in read_lines(path) if e["kind"] in kinds] if path.exists() else []


def last_words(folder: Path) -> str:
    """The end of each log."""
    return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in folder.rglob("*.log"))


def test_case_5_the_machine_of_the_conductor_is_lost_and_another_takes_its_part(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
    tmp_path: Path,
) -> None:
    """Ranks of the other machine wait, and are stopped once their agent has no lease; a conductor
    there adopts them, and a spare there takes the lost rank."""
    here, plain = stage("machines")
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    args = {**here.args, **kept_at(checkpoints), "faults": []}
    words = partial(last_words, tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(Conducted(cables, run, args, hired=True))
        lost, kept = stack.enter_context(hired(cables, run, 2, LEASE_S))
        wait_for(lambda: len(steps(run)) >= 8, words)
        os.kill(first.pid, signal.SIGKILL)
        lost.kill()
        before = dict(kept.members())
        wait_for(lambda: {state for _, state in kept.members()} == {"T"}, words)
        heir = stack.enter_context(Conducted(cables, run, args, at=1, adopt=True))
        wait_for(lambda: heir.ended(0.0) is not None, words)
        assert heir.ended(0.0) == 0, words()
    assert len(before) == 2
    [done] = events(run, Kind.TAKEOVER_DONE)
    assert (done["ranks"], done["members"], done["lost_steps"]) == ([0], {"0": 2}, 0)
    assert [loss["cause"] for loss in events(run, Kind.RANK_LOST)] == ["the agent of node 0 died"]
    assert agree(hashes(checkpoints), plain.checkpoints)
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    assert losses == plain.losses


def without_spares(here: Stage) -> Stage:
    """Its job without spares, which goes on until it is ended."""
    tables = here.args["job"]
    job = {**tables["job"], "steps": 10**6, "eval_every": 10**6}
    tables = {**tables, "job": job, "cluster": {**tables["cluster"], "spares": 0}}
    checkpoint = {**tables["checkpoint"], "every": 10**6}
    return replace(here, args={**here.args, "job": {**tables, "checkpoint": checkpoint}})


def losses_without_faults(here: Stage, last: int) -> dict[int, float]:
    """Those of the steps up to `last`."""
    found: dict[int, float] = {}
    orchestra = here.begin(spares=0)
    try:
        while last not in found:
            orchestra.turn()
            found = {s["step"]: s["loss"] for s in orchestra.said if s["kind"] == Kind.METRICS}
    finally:
        orchestra.close()
    return found


def test_a_repaired_node_rejoins_and_the_run_grows_back(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
    tmp_path: Path,
) -> None:
    """Two replicas on two machines; the second is lost, and its agent is started again."""
    here = without_spares(stage("machines")[0])
    run, words = tmp_path / "run", partial(last_words, tmp_path)
    args = {**here.args, **kept_at(tmp_path / "checkpoints"), "faults": []}
    with ExitStack() as stack:
        stack.enter_context(Conducted(cables, run, args, hired=True))
        _, lost = stack.enter_context(hired(cables, run, 2, LEASE_S))
        wait_for(lambda: len(steps(run)) >= 8, words)
        lost.kill()
        wait_for(lambda: len(events(run, Kind.RESIZED)) == 1, words)
        stack.enter_context(Outpost(cables, run, 1, LEASE_S))
        wait_for(lambda: len(events(run, Kind.RESIZED)) == 2, words)
        grown = events(run, Kind.RESIZED)[1]["step"]
        wait_for(lambda: steps(run)[-1] >= grown + 8, words)
    assert [(e["before"], e["after"]) for e in events(run, Kind.RESIZED)] == [
        ("dp2", "one process"),
        ("one process", "dp2"),
    ]
    assert [event["node"] for event in events(run, Kind.NODE_BACK)] == [1]
    done = steps(run)
    assert done == list(range(1, done[-1] + 1))
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    plain = losses_without_faults(here, done[-1])
    assert losses == pytest.approx({step: plain[step] for step in done}, rel=1e-5)
