"""What NCCL asks of us, as far as it can be seen without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.plan.layout import Schedule
from meshwright.train.comm import Clock, Pending
from meshwright.train.parallel.mail import open_channels
from meshwright.train.parallel.messages import Wiring

CPU = torch.device("cpu")


@dataclass
class Noted:
    """An axis that notes who would meet whom: (group, source, target)."""

    name: str
    me: int
    log: list[tuple[str, int, int]] = field(default_factory=list)

    def send(self, _x: torch.Tensor, index: int) -> Pending:
        self.log.append((self.name, self.me, index))
        return Pending(None, Clock())

    def receive(self, _x: torch.Tensor, index: int) -> Pending:
        self.log.append((self.name, index, self.me))
        return Pending(None, Clock())


def meetings(wiring: Wiring, rank: int) -> list[tuple[str, int, int]]:
    """What `rank` does, in its order."""
    log: list[tuple[str, int, int]] = []
    axes = {name: Noted(name, rank, log) for name in ("down", "up")}
    mesh: Any = SimpleNamespace(at=SimpleNamespace(pp=rank), **axes)
    open_channels(mesh, wiring, CPU)
    return log


@pytest.mark.parametrize(
    ("schedule", "pp", "stages"),
    [("1f1b", 2, 2), ("1f1b", 4, 4), ("interleaved", 2, 4), ("interleaved", 4, 8), ("zbv", 4, 8)],
)
def test_ranks_that_will_talk_meet_and_none_waits_for_ever(
    schedule: Schedule, pp: int, stages: int
) -> None:
    wiring = Wiring(schedule, pp, stages)
    left = [meetings(wiring, rank) for rank in range(pp)]
    met = set()
    while any(left):
        fronts = [todo[0] for todo in left if todo]
        both = next((m for m in fronts if fronts.count(m) == 2), None)
        assert both is not None, f"stuck at {fronts}"
        met.add(both)
        for rank in both[1:]:
            left[rank].pop(0)
    for stage in range(stages - 1):
        here, there = wiring.rank_of(stage), wiring.rank_of(stage + 1)
        if here != there:
            for a, b in ((here, there), (there, here)):
                assert ("down" if a < b else "up", a, b) in met


@dataclass
class FakeEvent:
    """A CUDA event of a GPU that is `now` seconds on."""

    gpu: SimpleNamespace
    at: float | None = None

    def record(self) -> None:
        self.at = self.gpu.enqueued

    def query(self) -> bool:
        return self.at is not None and self.at <= self.gpu.now

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None and end.at is not None
        return (end.at - self.at) * 1e3


def test_on_a_gpu_the_streams_waiting_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(now=0.0, enqueued=0.0)

    class Work:
        def wait(self) -> None:
            gpu.enqueued += 2.0  # returns at once; the stream will be held up

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(gpu))
    clock, work = Clock(), Work()
    waited: Any = Pending(work, clock)
    waited.wait()
    assert clock.take().get("comm", 0.0) == 0.0  # the GPU is not there yet
    gpu.now = 2.0
    assert clock.take()["comm"] == pytest.approx(2.0)
    assert "comm" not in clock.take()
