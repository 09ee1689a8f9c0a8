"""What the conductor makes of heartbeats: who hangs and who is slow, and where it was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from surviving_scene import make_job
from test_conduct_takeover import running

from meshwright.base.pulse import Phase, Pulse
from meshwright.conduct.beats import encode_sample, progress_key
from meshwright.conduct.bench import Bench
from meshwright.conduct.limits import limits
from meshwright.conduct.members import State
from meshwright.conduct.muster import Muster
from meshwright.conduct.watching import Watch

MUSTER = Muster(make_job(4, cluster={"spares": 2, "nodes": 2}))
BEAT_S, STEP_S = 0.05, 0.5


def pulse(step: int, phase: Phase, begun: int, waits_for: int | None = None) -> Pulse:
    """Of a rank at `phase` of a step of `STEP_S`."""
    stepped_ns = int(step * STEP_S * 1e9)
    return Pulse(1, 1, step, phase, begun, begun, waits_for, 0, stepped_ns, stepped_ns // 2, 0)


class Theatre:
    """Four ranks, as their agents see them; each beat is `BEAT_S` after the one before."""

    def __init__(self) -> None:
        self.bench, self.watches = Bench(MUSTER), {n: Watch(n, n) for n in range(4)}
        self.now_s = 0.0
        self.epoch = 1  # of the table that the agents know
        self.state: State = running(MUSTER)

    def beat(self, pulses: dict[int, Pulse]) -> list[int]:
        """One more; the members that are named."""
        self.now_s += BEAT_S
        seen = [self.watches[n].look(self.now_s, pulses[n], "S") for n in range(4)]
        told = [encode_sample(sample) for sample in seen]
        for node in range(2):
            mine = [said for n, said in enumerate(told) if self.state.members[n].node == node]
            self.bench.take(node, mine, self.epoch, self.state)
        times_s = self.bench.step_log.step_times_s
        state = replace(self.state, limits=limits(30.0, times_s))
        return [verdict.member for verdict in self.bench.verdicts(state, self.now_s)]

    def train(self, steps: int) -> None:
        """Steps in which nothing happens."""
        for beat in range(int(steps * STEP_S / BEAT_S)):
            step = 1 + int(beat * BEAT_S / STEP_S)
            all_get_on = {n: pulse(step, Phase.FORWARD, beat) for n in range(4)}
            assert self.beat(all_get_on) == []


def test_a_hang_is_named_within_three_steps_and_no_sooner_than_a_slow_step_could_end() -> None:
    theatre = Theatre()
    theatre.train(20)
    stuck = {n: pulse(21, Phase.REDUCE, 500, waits_for=2) for n in (0, 1, 3)}
    stuck[2] = pulse(21, Phase.BACKWARD, 480)
    begun_s = theatre.now_s
    while not (named := theatre.beat(stuck)):
        assert theatre.now_s - begun_s < 10.0
    assert named == [2]
    assert 2 * STEP_S < theatre.now_s - begun_s <= 3 * STEP_S + 2 * BEAT_S


def test_nobody_is_named_for_having_waited_for_one_who_was_lost() -> None:
    """A table is out, and the agents have not given it to the others yet."""
    theatre = Theatre()
    theatre.train(20)
    state, waiting = theatre.state, {n: pulse(21, Phase.REDUCE, 500, waits_for=2) for n in range(4)}
    table = tuple(4 if n == 2 else n for n in range(4))
    theatre.bench.samples[4] = Watch(None, 4).look(0.0, pulse(0, Phase.IDLE, 0), "S")
    members = {**state.members, 2: replace(state.members[2], ended=True)}
    theatre.state = replace(state, epoch=2, table=table, members=members)
    for _ in range(int(4 * STEP_S / BEAT_S)):
        assert theatre.beat(waiting) == []
    theatre.epoch = 2
    assert theatre.beat(waiting) != []  # their agents here do not count anew


@pytest.mark.parametrize(("phase", "limit_s"), [(Phase.EVALUATE, 30.0), (Phase.CHECKPOINT, 120.0)])
def test_nothing_is_said_of_a_long_evaluation_or_checkpoint(phase: Phase, limit_s: float) -> None:
    """One evaluates or writes for longer than fifty steps take; the others wait for it."""
    theatre = Theatre()
    theatre.train(20)
    waits = {n: pulse(21, phase, 500, waits_for=2) for n in (0, 1, 3)}
    for _ in range(int(0.95 * limit_s / BEAT_S)):
        assert theatre.beat({**waits, 2: pulse(21, phase, 480)}) == []
    for _ in range(int(0.1 * limit_s / BEAT_S)):
        named = theatre.beat({**waits, 2: pulse(21, phase, 480)})
    assert named == [2]


@pytest.mark.parametrize("alive", [True, False])
def test_a_verdict_on_one_that_got_on_before_it_was_killed_is_owned_up_to(alive: bool) -> None:
    theatre = Theatre()
    theatre.train(10)
    still = pulse(11, Phase.BACKWARD, 480)
    theatre.beat(dict.fromkeys(range(4), still))
    theatre.bench.condemn(2)
    last = pulse(11, Phase.REDUCE, 481) if alive else still
    found = theatre.bench.proved_alive(2, list(progress_key(last)))
    assert (found is not None) is alive
    assert theatre.bench.proved_alive(2, progress_key(last)) is None  # told once
    assert theatre.bench.proved_alive(1, progress_key(last)) is None  # nobody gave it up
