"""Members and agents for `simulation.py`: what they do, without processes and in made-up time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.conduct.lease import lapsed
from meshwright.conduct.protocol import Exit

SIGKILL = 9


class Clock:
    """Calls functions at their time, in an order that the seed decides alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` in `delay_s`."""
        self._count += 1
        heapq.heappush(self._calls, (self.now_s + delay_s, self._count, call))

    def step(self) -> bool:
        """Let the next call happen; false if there is none."""
        if not self._calls:
            return False
        self.now_s, _, call = heapq.heappop(self._calls)
        call()
        return True


@dataclass
class SimMember:
    """A worker: `epoch` and `rank` are what it believes, `step` how far its state has come (-1: it
    has none)."""

    number: int
    up: bool = False
    alive: bool = True
    frozen_s: float | None = None
    epoch: int = 0
    rank: int = -1
    step: int = -1
    executing: list[int] | None = None
    came_by: str | None = None  # the folder in memory that it began from


class Line:
    """One connection: in order, late, and gone with all that is under way when it is cut."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.open = clock, True
        self._next_s = {"up": 0.0, "down": 0.0}

    def send(self, way: str, deliver: Callable[[], None]) -> None:
        """Have `deliver` called later, if the line still stands then."""
        delay_s = self.clock.random.choice((0.001, 0.01, 0.2))
        self._next_s[way] = max(self._next_s[way], self.clock.now_s + delay_s)
        self.clock.after(
            self._next_s[way] - self.clock.now_s, lambda: deliver() if self.open else None
        )


@dataclass
class SimAgent:
    """The agent of a node, as `agent.Agent` is."""

    node: int
    clock: Clock
    lease_s: float
    alive: bool = True
    members: dict[int, SimMember] = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)
    ended: list[Exit] = field(default_factory=list)
    kept: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    count: int = 0
    table: dict[str, Any] | None = None
    line: Line | None = None
    hear: Callable[[dict[str, Any]], None] | None = None  # the conductor's ear for this line
    renewed_s: float = 0.0
    progress_s: float = 0.0
    stopped: bool = False  # its members run no instruction

    def report(self, event: str, **fields: Any) -> None:
        """Say something that no conductor may miss."""
        self.count += 1
        said = {"n": self.count, "event": event, **fields}
        self.kept.append((self.count, said))
        self.send(said)

    def send(self, said: dict[str, Any]) -> None:
        """Say something now or never."""
        if self.line is not None and self.line.open and self.hear is not None:
            hear = self.hear
            self.line.send("up", lambda: hear(said))

    def join(self, line: Line, hear: Callable[[dict[str, Any]], None]) -> None:
        """Have a conductor again: say what there is, and all that may not have been taken."""
        self.line, self.hear, self.renewed_s = line, hear, self.clock.now_s
        census = [
            {
                "member": m.number,
                "pid": m.number,
                "addresses": ["x"] if m.up else [],
                "ready": m.up,
                "executing": m.executing,
            }
            for m in self.members.values()
            if m.alive
        ]
        ended = [asdict(end) for end in self.ended]
        hello = {"table": self.table, "members": census, "ended": ended}
        self.send({"event": "hello", "launched": list(self.launched), **hello})
        for _, said in self.kept:
            self.send(said)

    def obey(self, request: dict[str, Any]) -> None:
        """One request of the conductor."""
        if not self.alive:
            return
        match request["op"]:
            case "ack":
                self.renewed_s = max(self.renewed_s, request["at"])
                self.kept = [(n, said) for n, said in self.kept if n > request["n"]]
                if self.stopped:
                    self.stopped = False
                    for member in self.members.values():
                        self._tell(member)
            case "table":
                self._take_table(request)
            case "launch":
                self._launch(request["member"])
            case "kill":
                self.end(request["member"], SIGKILL)
            case "kill_all":
                for number in list(self.members):
                    self.end(number, SIGKILL)
            case "stop":
                for number in request["members"]:
                    self.end(number, None)

    def _take_table(self, table: dict[str, Any]) -> None:
        if self.table is not None and table["epoch"] <= self.table["epoch"]:
            return
        self.table = table
        for member in self.members.values():
            self._tell(member)

    def _tell(self, member: SimMember) -> None:
        table = self.table
        if table is None or not member.alive:
            return
        held = {number: int(rank) for rank, number in table["members"].items()}
        delay_s = self.clock.random.choice((0.001, 0.02, 0.1))

        def accept() -> None:
            if member.alive and not self.stopped and table["epoch"] > member.epoch:
                member.epoch, member.rank = table["epoch"], held.get(member.number, -1)
                through = table["through"]
                begins = through and not through["saving"] and member.rank >= 0
                if begins and member.came_by != through["folder"]:
                    member.step, member.came_by = through["step"], through["folder"]
                if member.step < 0 <= member.rank and member.rank not in table["lost"]:
                    member.step = 0  # it begins where the run began

        self.clock.after(delay_s, accept)

    def _launch(self, number: int) -> None:
        if number in self.launched:
            return
        self.launched.append(number)
        member = self.members[number] = SimMember(number)
        self._tell(member)

        def come_up() -> None:
            if self.stopped:
                self.clock.after(0.5, come_up)
            elif member.alive and self.alive:
                member.up = True
                self.report("up", member=number)

        self.clock.after(self.clock.random.uniform(0.1, 2.0), come_up)

    def end(self, number: int, signal: int | None) -> None:
        """A member dies by `signal`, or returns (None)."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        member.alive = False
        code, returned = (None, False) if signal else (0, True)
        end = Exit(-1, number, code, signal, returned, 0.0, member=number)
        self.ended.append(end)
        if self.alive:
            if signal and self.clock.random.random() < 0.5:
                self.report("dying", member=number)
            self.report("exit", **asdict(end))

    def die(self) -> None:
        """The agent dies, and its members with it."""
        self.alive = False
        for member in self.members.values():
            member.alive = False
        if self.line is not None:
            self.line.open = False

    def beat(self) -> None:
        """Once in a while: say that it lives, or stop its members when they may not go on."""
        now_s = self.clock.now_s
        frozen = [
            (m.number, now_s - m.frozen_s)
            for m in self.members.values()
            if m.alive and m.frozen_s is not None and not self.stopped
        ]
        said = {"event": "beat", "n": self.count, "at": now_s, "frozen": frozen}
        self.send({**said, "progress": self.progress_s})
        self.stopped |= lapsed(now_s, self.renewed_s, self.progress_s, self.lease_s)
        if self.line is not None and now_s - self.renewed_s > self.lease_s / 3:
            self.line.open = False  # cut without a word
