"""Who holds a run up is named, and nobody who does not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from meshwright.base.pulse import SOMEBODY, Phase, Pulse
from meshwright.conduct.limits import Limits, limits, quantile
from meshwright.conduct.processes import read_process
from meshwright.conduct.stragglers import WINDOW_STEPS, StepLog
from meshwright.conduct.verdicts import Frozen, Hang, Sample, judge
from meshwright.conduct.watching import LONGEST_LOOK_S, LONGEST_STOPPED_LOOK_S, Watch

USUAL = limits(30.0, [0.1] * 20)  # hangs after 1 s
LONG_S = 5.0


def pulse(
    step: int = 7,
    phase: Phase = Phase.FORWARD,
    waits_for: int | None = None,
    begun: int = 100,
    busy_ns: int = 0,
    epoch: int = 1,
    stepped_ns: int = 0,
) -> Pulse:
    return Pulse(1, epoch, step, phase, begun, begun, waits_for, 0, stepped_ns, busy_ns, 0)


def sample(
    member: int,
    quiet_s: float = LONG_S,
    phase: Phase = Phase.FORWARD,
    waits_for: int | None = None,
    begun: int = 100,
    state: str = "S",
    state_s: float = 0.0,
    role: str = "",
    step: int = 7,
) -> Sample:
    now = pulse(step, phase, waits_for, begun)
    return Sample(member, member, role, now, quiet_s, state, state_s)


def hung(samples: Sequence[Sample], limits: Limits = USUAL) -> list[tuple[int, bool]]:
    found = judge(samples, limits)
    assert all(isinstance(verdict, Hang) for verdict in found)
    return [(verdict.member, verdict.certain) for verdict in found if isinstance(verdict, Hang)]


def test_the_rank_that_others_wait_for_is_named_through_others() -> None:
    """0 waits for 1, 1 for 2; 2 does nothing; 3 waits and does not know for whom."""
    ranks = [
        sample(0, waits_for=1, phase=Phase.REDUCE),
        sample(1, waits_for=2),
        sample(2, phase=Phase.BACKWARD, quiet_s=6.0),
        sample(3, waits_for=SOMEBODY),
    ]
    assert judge(ranks, USUAL) == (Hang(2, 2, 7, Phase.BACKWARD, 6.0, certain=True),)


def test_nobody_is_named_while_anyone_gets_on() -> None:
    stuck = [sample(0, waits_for=1), sample(1)]
    assert hung(stuck) == [(1, True)]
    assert hung([*stuck, sample(2, quiet_s=0.2)]) == []
    assert hung([sample(0, waits_for=1), sample(1, quiet_s=0.9)]) == []


def test_waiting_is_not_getting_on_whatever_the_phase() -> None:
    """The others wait in the barrier of a checkpoint for one that never came to it."""
    ranks = [sample(0, waits_for=1, phase=Phase.CHECKPOINT), sample(1, phase=Phase.FORWARD)]
    assert hung(ranks) == [(1, True)]


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [(Phase.EVALUATE, 30.0), (Phase.CHECKPOINT, 120.0), (Phase.TAKEOVER, 30.0), (Phase.DATA, 1.0)],
)
def test_phases_have_limits_of_their_own(phase: Phase, limit_s: float) -> None:
    """One is stuck in an evaluation: named in under a minute, and not before its time."""
    assert hung([sample(0, waits_for=1), sample(1, limit_s - 0.1, phase)]) == []
    assert hung([sample(0, waits_for=1), sample(1, limit_s, phase)]) == [(1, True)]


def test_of_those_that_nobody_waits_for_none_is_named_if_waits_are_told() -> None:
    """Member 2 is slow in its data, but it is 1 that 0 waits for."""
    ranks = [sample(0, waits_for=1), sample(1), sample(2, phase=Phase.DATA)]
    assert hung(ranks) == [(1, True)]


def test_a_spare_that_others_wait_for_is_named() -> None:
    keeper = Sample(None, 2, "", pulse(phase=Phase.IDLE), LONG_S)
    found = judge([sample(0, waits_for=2), sample(1, waits_for=0), keeper], USUAL)
    assert found == (Hang(None, 2, 7, Phase.IDLE, LONG_S, certain=True),)


def test_an_idle_spare_is_never_hung() -> None:
    spare = Sample(None, 1, "", pulse(phase=Phase.IDLE), 1e6)
    assert hung([sample(0, quiet_s=0.1), spare]) == []
    assert hung([spare]) == []


def test_a_circle_of_waits_names_the_one_behind_its_like_without_being_certain() -> None:
    """Stages have other counts; 3 is one operation behind 1, which does the same as it.
    4 waits for them, and none of them for 4."""
    ranks = [
        sample(0, waits_for=1, begun=50, role="pp0"),
        sample(1, waits_for=2, begun=90, role="pp1"),
        sample(2, waits_for=3, begun=50, role="pp0"),
        sample(3, waits_for=0, begun=89, role="pp1"),
        sample(4, waits_for=0, begun=1, role="pp0"),
    ]
    assert hung(ranks) == [(3, False)]


def test_the_one_a_step_behind_comes_first() -> None:
    ranks = [sample(0, waits_for=SOMEBODY), sample(1, waits_for=SOMEBODY, step=6, begun=200)]
    assert hung(ranks) == [(1, False)]


def test_all_silent_at_work_is_a_slow_step_until_the_longest_stall() -> None:
    assert hung([sample(0), sample(1)]) == []
    assert hung([sample(0, 29.9), sample(1, 29.9)]) == []
    assert hung([sample(0, 30.0), sample(1, 31.0)]) == [(1, False)]
    assert hung([sample(0, 30.0)]) == [(0, True)]


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_process_that_the_kernel_holds_is_frozen(state: str) -> None:
    limit_s = USUAL.frozen_s if state == "T" else USUAL.blocked_s
    others = [sample(0, waits_for=1), sample(2, quiet_s=0.0)]
    assert judge([*others, sample(1, state=state, state_s=limit_s * 0.99)], USUAL) == ()
    found = judge([*others, sample(1, state=state, state_s=limit_s)], USUAL)
    assert found == (Frozen(1, 1, state, limit_s),)


def test_where_one_is_frozen_nobody_else_is_hung() -> None:
    ranks = [sample(0, waits_for=1), sample(1, state="T", state_s=LONG_S), sample(2)]
    assert judge(ranks, USUAL) == (Frozen(1, 1, "T", LONG_S),)


def test_a_stopped_process_is_seen_at_once_and_a_running_one_is_not_taken_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch(0, 0)
    try:
        assert judge([_look(watch, child.pid, 0.0), sample(1, 0.0)], USUAL) == ()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert judge([_look(watch, child.pid, 1.0), sample(1, 0.0)], USUAL) == ()
        found = judge([_look(watch, child.pid, 1.01 + USUAL.frozen_s), sample(1, 0.0)], USUAL)
        assert [type(verdict) for verdict in found] == [Frozen]
    finally:
        child.kill()
        child.communicate()
    assert read_process(child.pid) is None


def test_a_process_tells_of_its_parent_and_its_cpu_time() -> None:
    found = read_process(os.getpid())
    assert found is not None
    assert (found.state, found.parent) == ("R", os.getppid())
    assert abs(found.cpu_s - time.process_time()) < 1.0


def test_silence_counts_only_as_far_as_it_was_watched() -> None:
    """The watcher did not run for an hour; then it sees for itself."""
    watch, still = Watch(0, 0), pulse()
    watch.look(0.0, still, "S")
    assert watch.look(3600.0, still, "S").quiet_s == LONGEST_LOOK_S
    assert watch.look(3600.1, still, "S").quiet_s == pytest.approx(LONGEST_LOOK_S + 0.1)
    assert watch.look(3600.2, pulse(begun=101), "S").quiet_s == 0.0
    assert watch.look(3600.3, pulse(begun=101), "D").state_s == 0.0
    assert watch.look(3600.4, pulse(begun=101), "D").state_s == pytest.approx(0.1)


def test_an_agent_that_is_late_needs_several_looks_to_call_a_process_frozen() -> None:
    """All of the machine stood still for a second: that is no evidence against anybody."""
    watch = Watch(0, 0)
    late = [watch.look(now_s, pulse(), "T") for now_s in (0.0, 1.0, 2.0)]
    assert judge([late[1], sample(1, 0.0)], USUAL) == ()
    assert late[2].state_s == 2 * LONGEST_STOPPED_LOOK_S
    on_time = Watch(0, 0)
    for look in range(5):
        seen = on_time.look(look * 0.02, pulse(), "T")
    assert seen.state_s == pytest.approx(0.08)
    assert [type(verdict) for verdict in judge([seen, sample(1, 0.0)], USUAL)] == [Frozen]


@pytest.mark.parametrize("stall_s", [0.5, 30.0, 600.0])
@pytest.mark.parametrize("step_s", [1e-3, 0.1, 50.0])
@pytest.mark.parametrize("steps", [0, 3, 100])
def test_limits_are_in_order_whatever_the_setting(
    stall_s: float, step_s: float, steps: int
) -> None:
    found = limits(stall_s, [step_s] * steps)
    assert found.lease_agent_s < found.lease_conductor_s
    assert 0 < found.frozen_s <= found.hang_s <= found.evaluate_s <= found.checkpoint_s
    assert found.hang_s <= max(stall_s, 3 * step_s)
    assert steps == 0 or found.hang_s >= 3 * step_s


def test_limits_grow_with_what_was_measured() -> None:
    assert limits(30.0).hang_s == 30.0  # nothing is known yet
    assert limits(30.0, [0.01] * 100).hang_s == 1.0
    assert limits(30.0, [0.01] * 90 + [2.0] * 10).hang_s == 6.0
    assert limits(30.0, evaluate_quiet_s=20.0).evaluate_s == 60.0
    assert limits(30.0, checkpoint_s=100.0).checkpoint_s == 300.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0


def test_a_rank_slower_by_5_percent_is_named_in_under_20_steps() -> None:
    for ranks in (2, 4, 8):
        for seed in range(10):
            named, wrong = race(seed, ranks, noise=0.01, slow=ranks - 1)
            assert named is not None, (ranks, seed)
            assert named < 20, (ranks, seed)
            assert wrong == set(), (ranks, seed)


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.1])
def test_noise_names_nobody(noise: float) -> None:
    """5 x 8 ranks x 150 steps; one step in ten is far slower, and steps vary together too."""
    wrong = [race(seed, 8, noise, steps=150)[1] for seed in range(5)]
    assert sum(map(len, wrong)) == 0


def test_roles_are_compared_each_with_its_like() -> None:
    """The last stage has the head to compute: no straggler."""
    log = StepLog()
    for step in range(1, 3 * WINDOW_STEPS):
        for rank in range(4):
            busy_ns = step * (50_000_000 if rank < 2 else 80_000_000)
            log.see(rank, rank, pulse(step=step, busy_ns=busy_ns))
    assert log.stragglers({0: "a", 1: "a", 2: "b", 3: "b"}) == ()
    slow = log.stragglers(dict.fromkeys(range(4), "all"))
    assert [straggler.rank for straggler in slow] == [2, 3]
    assert log.stragglers({0: "a", 1: "b", 2: "c", 3: "d"}) == ()


def test_a_new_member_begins_with_no_past() -> None:
    log = StepLog()
    for step in range(1, 3 * WINDOW_STEPS):
        log.see(0, 0, pulse(step=step, busy_ns=step * 60_000_000))
        log.see(1, 1, pulse(step=step, busy_ns=step * 50_000_000))
    roles = {0: "", 1: ""}
    (slow,) = log.stragglers(roles)
    assert (slow.rank, slow.member, round(slow.busy_ratio, 6)) == (0, 0, 1.2)
    assert not log.see(0, 9, pulse(step=step, busy_ns=1, epoch=2))
    assert log.stragglers(roles) == ()


def test_step_times_are_those_of_the_wall_and_skipped_looks_share() -> None:
    log = StepLog()
    log.see(0, 0, pulse(step=1))
    assert not log.see(0, 0, pulse(step=1))
    assert log.see(0, 0, pulse(step=5, stepped_ns=2_000_000_000, busy_ns=400_000_000))
    assert log.step_times_s == (0.5,)


def race(
    seed: int, ranks: int, noise: float, slow: int | None = None, steps: int = 70
) -> tuple[int | None, set[int]]:
    """After how many slow steps `slow` was named, and who was named wrongly; slow from step 40."""
    draw, log = random.Random(seed), StepLog()
    busy_s, roles = [0.0] * ranks, dict.fromkeys(range(ranks), "")
    named, wrong = None, set[int]()
    for step in range(1, steps):
        shared = draw.gauss(0.05, 0.005)
        for rank in range(ranks):
            log.see(rank, rank, pulse(step=step, busy_ns=int(busy_s[rank] * 1e9)))
            factor = 1.05 if rank == slow and step >= 40 else 1.0
            spike = 1 + draw.expovariate(3) if draw.random() < 0.1 else 1.0
            busy_s[rank] += shared * draw.gauss(1, noise) * factor * spike
        for straggler in log.stragglers(roles):
            if straggler.rank == slow and step >= 40:
                named = step - 40 if named is None else named
            else:
                wrong.add(straggler.rank)
    return named, wrong


def _look(watch: Watch, pid: int, now_s: float) -> Sample:
    process = read_process(pid)
    assert process is not None
    if now_s > 1.0:  # as an agent that looks all the time
        for part in range(10):
            watch.look(1.0 + (now_s - 1.0) * part / 10, pulse(), process.state)
    return watch.look(now_s, pulse(), process.state)
