"""Links between machines that are slow or cut while the conductor is reached by others: ranks get
out of their way, and nothing of the run is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_machines import Conducted, hired
from chaos_mesh import Mesh, mesh
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

DESK = 3  # the machine of the conductor
_BOUND_S = 60.0


def assert_learnt_the_same(run: Run, plain: Ended) -> None:
    """No step was lost, and the bits are those of the run that nothing disturbed."""
    assert run.losses == plain.losses
    assert agree(hashes(run.checkpoints), plain.checkpoints)


@pytest.fixture(scope="module")
def laid() -> Iterator[Mesh]:
    with mesh(DESK + 1) as made:
        yield made


@pytest.fixture
def cables(laid: Mesh) -> Iterator[Mesh]:
    yield laid
    laid.heal()


class Run:
    """One on three machines, with the conductor on a fourth."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "run"
        self.checkpoints = folder / "checkpoints"

    def play(
        self,
        cables: Mesh,
        args: dict[str, Any],
        strikes: Mapping[int, Callable[[], object]],
        faults: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Have each of `strikes` called once that many steps are done, and wait for the end."""
        args = {**args, **kept_at(self.checkpoints), "faults": list(faults)}
        with Conducted(cables, self.path, args, at=DESK) as conductor:
            for step, strike in strikes.items():
                self.wait_for(step, conductor)
                strike()
            assert conductor.ended(_BOUND_S) == 0, self.words()

    def wait_for(self, step: int, conductor: Conducted) -> None:
        """Until so many steps are done."""
        deadline_s = time.monotonic() + _BOUND_S
        while self.step < step:
            assert conductor.ended(0.02) is None, self.words()
            assert time.monotonic() < deadline_s, self.words()

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def losses(self) -> dict[int, float]:
        metrics = self.path / "metrics.jsonl"
        lines = read_lines(metrics) if metrics.exists() else []
        return {line["step"]: line["loss"] for line in lines}

    def events(self, kind: Kind) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.path / "events.jsonl") if e["kind"] == kind]

    def words(self) -> str:
        logs = self.folder.rglob("*.log")
        return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in logs)


def test_ranks_leave_a_slow_link(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Mesh,
    tmp_path: Path,
) -> None:
    here, plain = stage("three machines")
    run = Run(tmp_path)
    run.play(cables, here.args, {10: lambda: cables.slow_down(0, 1, mbit=2.0)})
    told = [alert["link"] for alert in run.events(Kind.ALERT) if "slower" in alert["what"]]
    assert told[0] == [0, 1]
    moves = [e["advice"] for e in run.events(Kind.ADVICE) if e["advice"].startswith("ranks")]
    assert moves[0] == "ranks [0] move from node 0 to [2]: a link holds them up"
    assert not run.events(Kind.RANK_LOST)
    assert_learnt_the_same(run, plain)


@pytest.mark.parametrize(
    ("cut_off", "from_"),
    [(1, (0, 2)), (0, (1, 2)), (1, (0,))],
    ids=["a node", "the first", "a link"],
)
def test_a_data_link_is_cut_and_the_control_link_lives(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Mesh,
    tmp_path: Path,
    cut_off: int,
    from_: tuple[int, ...],
) -> None:
    """Exactly one recovery, of the node that is cut off, or of either side where that is not to be
    told; nobody is killed, and the old rank is fenced: it becomes a spare under the new table."""
    here, plain = stage("three machines")
    run = Run(tmp_path)
    run.play(cables, here.args, {10: lambda: cables.cut_off(cut_off, *from_)})
    [lost] = run.events(Kind.RANK_LOST)
    rank = lost["rank"]
    assert rank == (cut_off if len(from_) == 2 else 0)
    assert (lost["member"], lost["cause"]) == (rank, f"node {rank} is cut off")
    [done] = run.events(Kind.TAKEOVER_DONE)
    assert (done["members"], done["lost_steps"]) == ({str(rank): 3}, 0)
    fenced = [e["epoch"] for e in run.events(Kind.SPARE_READY) if e["member"] == rank]
    assert fenced == [done["epoch"]]
    assert_learnt_the_same(run, plain)


def test_a_control_link_is_cut_and_the_data_link_lives(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Mesh,
    tmp_path: Path,
) -> None:
    """For several times as long as the lease: no restart, one alert."""
    here, plain = stage("three machines")
    slow = {"kind": "slow", "phase": "forward", "share": 2.5, "step": 11, "member": 0}
    run = Run(tmp_path)
    marks: list[float] = []

    def mark(strike: Callable[[], object]) -> None:
        strike()
        marks.append(time.time())

    cut = {10: lambda: mark(lambda: cables.cut(1, DESK)), 34: lambda: mark(cables.heal)}
    run.play(cables, here.args, cut, faults=[slow])
    begun, ended = marks  # at other times a busy machine may keep an agent from speaking
    alerts = [alert for alert in run.events(Kind.ALERT) if alert["node"] == 1]
    told = [alert["what"] for alert in alerts if begun < alert["ts"] < ended]
    assert len(told) == 1 and told[0].endswith("its ranks are left alone")
    for kind in (Kind.RANK_LOST, Kind.TAKEOVER_DONE, Kind.HANG):
        assert not run.events(kind)
    lines = list(read_lines(run.path / "metrics.jsonl"))
    cut_s = sum(line["step_time_s"] for line in lines if 10 < line["step"] <= 34)
    stall_s = here.args["job"]["resilience"]["longest_stall_s"]
    assert cut_s > limits(stall_s, [0.0] * 8).lease_conductor_s
    assert_learnt_the_same(run, plain)


def test_case_4_control_and_data_links_are_cut(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Mesh,
    tmp_path: Path,
) -> None:
    """Case 4 of ../shared/cases/fault-tolerance.md: the lapsed lease alone has all survivors leave
    the sum that they are at. One recovery, and by then the agent has stopped its rank."""
    here, plain = stage("three machines")
    run = Run(tmp_path)
    run.play(cables, here.args, {10: lambda: cables.cut_off(1, 0, 2, DESK)})
    [lost] = run.events(Kind.RANK_LOST)
    assert (lost["rank"], lost["cause"]) == (1, "node 1 is silent and nobody gets on")
    [done] = run.events(Kind.TAKEOVER_DONE)
    assert (done["members"], done["lost_steps"]) == ({"1": 3}, 0)
    assert_learnt_the_same(run, plain)


def test_case_5_the_machine_of_the_conductor_is_lost(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    cables: Mesh,
    tmp_path: Path,
) -> None:
    """Case 5: agents find the next conductor at another address, and nobody's work is lost."""
    here, plain = stage("three machines")
    run = Run(tmp_path)
    slow = {"kind": "slow", "phase": "forward", "share": 4.0, "step": 1, "member": 0}
    args = {**here.args, **kept_at(run.checkpoints), "faults": [slow]}
    with (
        Conducted(cables, run.path, args, at=DESK, hired=True) as first,
        hired(cables, run.path, DESK, lease_s=_BOUND_S),
    ):
        run.wait_for(10, first)
        cables.cut_off(DESK, *range(DESK))
        os.kill(first.pid, signal.SIGKILL)
        with Conducted(cables, run.path, args, at=2, adopt=True) as second:
            assert second.ended(_BOUND_S) == 0, run.words()
    assert not run.events(Kind.RANK_LOST)
    assert_learnt_the_same(run, plain)
