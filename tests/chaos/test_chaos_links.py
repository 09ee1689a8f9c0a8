"""Networks that are lost or slow under a run: two machines in small, with two cables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_machines import Conducted
from chaos_network import CABLES, Network, network
from chaos_orchestra import Orchestra, Said
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
from meshwright.conduct.links import REPORTS, LinkLog
from meshwright.conduct.rundir import read_lines

_BOUND_S = 60.0


@pytest.fixture(scope="module")
def cables() -> Iterator[Network]:
    with network() as made:
        yield made


def test_a_lost_path_costs_no_step_and_no_bit(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
) -> None:
    """The first cable is lost at step 3, and comes back when the second is lost at step 6."""
    here, plain = stage("pair")
    lost: list[int] = []

    def cut(_: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.METRICS and said["step"] in (3, 6) and said["step"] not in lost:
            lost.append(said["step"])
            cables.set_cable(1, up=said["step"] == 6)
            cables.set_cable(2, up=said["step"] == 3)

    ended, orchestra = here.play(spares=0, on_said=cut, place=cables.enter)
    assert lost == [3, 6]
    assert ended == plain
    assert not orchestra.takeovers
    told = _links(orchestra)
    assert {host for one in told for host in one["lost"]} == {*cables.hosts(0), *cables.hosts(1)}
    assert not any(one["cut"] for one in told)


def _links(orchestra: Orchestra) -> list[dict[str, Any]]:
    return [peer for said in orchestra.said if said["kind"] == Kind.LINK for peer in said["peers"]]


def _endless(here: Stage) -> Stage:
    """Of so many steps that it ends when it is ended."""
    tables = here.args["job"]
    job = {**tables["job"], "steps": 10**6, "eval_every": 10**6}
    tables = {**tables, "job": job, "checkpoint": {**tables["checkpoint"], "every": 10**6}}
    return replace(here, args={**here.args, "job": tables})


@pytest.mark.parametrize("phase", ["backward", "vote"])
def test_a_chip_that_dies_is_replaced_across_the_network(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
    phase: str,
) -> None:
    here, plain = stage("twins")
    faults = [{"member": 3, "step": 4, "phase": phase}, {"member": 0, "step": 7, "phase": phase}]
    ended, orchestra = here.play(faults, place=lambda member: cables.enter(member % 2))
    assert ended == plain
    assert [taken.lost for taken in orchestra.takeovers] == [[3], [0]]


class Watched:
    """A run on two machines, and what is known of their link."""

    def __init__(self, here: Stage, cables: Network, faults: list[dict[str, Any]]) -> None:
        self.log, self.reports, self.step = LinkLog(), dict[tuple[int, int], int](), 0
        self.orchestra = _endless(here).begin(faults, 0, self._hear, cables.enter)

    def _hear(self, _: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.LINK:
            self.log.see(said["member"], said["peers"], {0: 0, 1: 1})
            for peer in said["peers"]:
                ends = said["member"], peer["peer"]
                self.reports[ends] = self.reports.get(ends, 0) + 1
        self.step = max(self.step, said.get("step", 0))

    def until(self, what: Callable[[], object]) -> None:
        """Let it run."""
        while not what():
            self.orchestra.turn()

    def until_told(self, reports: int) -> None:
        """Let it run until each member has told so often."""
        most = min(self.reports.values(), default=0) + reports
        self.until(lambda: len(self.reports) == 2 and min(self.reports.values()) >= most)


def test_a_slow_network_is_named(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
) -> None:
    watched = Watched(stage("pair")[0], cables, [])
    try:
        watched.until_told(REPORTS + 1)
        assert watched.log.slow() == ()
        cables.slow_down(1, mbit=2.0)
        watched.until(watched.log.slow)
    finally:
        watched.orchestra.close()
        cables.free(1)
    [link] = watched.log.slow()
    assert link.nodes == (0, 1) and link.times > 5


def test_a_slow_chip_is_not_taken_for_a_slow_network(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
) -> None:
    slow: dict[str, Any] = {
        "member": 1,
        "step": 100,
        "phase": "forward",
        "kind": "slow",
        "share": 12.0,
    }
    watched = Watched(stage("pair")[0], cables, [slow])
    try:
        watched.until(lambda: watched.step > slow["step"])
        watched.until_told(REPORTS + 1)
    finally:
        watched.orchestra.close()
    assert watched.log.slow() == ()


def test_when_both_cables_are_lost_there_is_one_recovery(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Network,
    tmp_path: Path,
) -> None:
    """The conductor is on machine 0 and hears nothing of machine 1 any more, whose ranks end."""
    here, plain = stage("machines")
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    args = {**here.args, **kept_at(checkpoints), "faults": []}
    with Conducted(cables, run, args) as conductor:
        try:
            _wait_for(lambda: _steps(run) >= 10 or conductor.ended(0.0) is not None)
            for cable in CABLES:
                cables.set_cable(cable, up=False)
            assert conductor.ended(_BOUND_S) == 0, _words(tmp_path)
        finally:
            for cable in CABLES:
                cables.set_cable(cable, up=True)
    events = list(read_lines(run / "events.jsonl"))
    [done] = [event for event in events if event["kind"] == Kind.TAKEOVER_DONE]
    assert (done["ranks"], done["members"]) == ([1], {"1": 3})
    assert done["cause"] == "node 1 is silent and nobody gets on"
    assert agree(hashes(checkpoints), plain.checkpoints)
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    assert losses == plain.losses


def _steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return sum(1 for _ in read_lines(metrics)) if metrics.exists() else 0


def _words(folder: Path) -> str:
    return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in folder.rglob("*.log"))


def _wait_for(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + _BOUND_S
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
