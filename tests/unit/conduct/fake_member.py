"""A member without a trainer: obeys tables, counts steps, and keeps its state in a folder.

`args`: `folder` (one file a rank, its step), `steps`, `step_s`, and `acts`: by member,
`{"at": step, "do": "raise" | "hang" | "slow" | "SIGKILL" | ...}`; `late`: a member that is slow
to come up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.base.events import EventWriter, Kind, WorkerContext
from meshwright.base.pulse import Phase, PulseWriter
from meshwright.conduct.protocol import LineBuffer

LIMIT_S = 20.0


def main(context: WorkerContext) -> None:
    """Be a member until stopped, or until all steps are done."""
    Fake(context).live()


class Fake:
    """One member."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.orders_fd is not None and context.pulse_fd is not None
        self.context, self.args = context, context.args
        self.orders = socket.socket(fileno=context.orders_fd)
        self.lines = LineBuffer()
        self.pulse = PulseWriter(context.pulse_fd, context.member)
        self.rank, self.world, self.epoch, self.step, self.stopped = -1, 0, 0, 0, False
        self.waits_for: int | None = None
        self.pace = 1.0
        self.member_of: dict[int, int] = {}
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.born_s = time.monotonic()

    def say(self, kind: Kind, **fields: Any) -> None:
        """To the agent."""
        said = {"member": self.context.member, "epoch": self.epoch, **fields}
        EventWriter(self.context.event_fd, self.rank).emit(kind, **said)

    def live(self) -> None:
        """All of it."""
        if self.context.member == self.args.get("late"):
            time.sleep(1.0)
        self.say(Kind.MEMBER_UP, addresses=[f"unix:@fake-{os.getpid()}"])
        if self.context.rank < 0:
            self.say(Kind.SPARE_READY)
        while not self.done():
            self.hear(None if self.rank < 0 else 0.0)
            if time.monotonic() - self.born_s > LIMIT_S:
                raise TimeoutError("nobody ended this member")
            if self.rank >= 0 and not self.done() and not self.waits():
                self.take_step()
        if self.stopped and self.rank == 0:
            self.say(Kind.RUN_INTERRUPTED, step=self.step)

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.stopped or self.step >= int(self.args["steps"])

    def waits(self) -> bool:
        """Whether some other rank is a step behind, which it waits for a moment."""
        behind = next((r for r in range(self.world) if self.reached(r) < self.step), None)
        if behind is None:
            self.pulse.resume()
            self.waits_for = None
            return False
        if behind != self.waits_for:
            self.pulse.wait(self.member_of[behind])
            self.waits_for = behind
        time.sleep(0.002)
        return True

    def reached(self, rank: int) -> int:
        """The last step that a rank has done."""
        try:
            return int(self.file(rank).read_text() or 0)
        except FileNotFoundError:
            return 0

    def take_step(self) -> None:
        """One step; its result is on disk when the next begins."""
        step = self.step + 1
        self.pulse.step(self.epoch, step)
        self.say(Kind.PROGRESS, step=step)
        self.act(step)
        time.sleep(self.pace * self.args.get("step_s", 0.005))
        self.step = step
        self.show()
        self.tell()

    def tell(self) -> None:
        """What rank 0 says after a step."""
        if self.rank == 0:
            self.say(Kind.METRICS, step=self.step, loss=1.0 / self.step, step_time_s=0.01)

    def show(self) -> None:
        """Let others know what this rank has done."""
        partial = self.file(self.rank).with_suffix(f".{self.context.member}")
        partial.write_text(str(self.step))
        partial.replace(self.file(self.rank))

    def file(self, rank: int) -> Path:
        """What a rank has come to."""
        return Path(self.args["folder"]) / f"rank-{rank}"

    def hear(self, timeout_s: float | None) -> None:
        """Obey what has come."""
        wait_s = LIMIT_S if timeout_s is None else timeout_s
        if select.select([self.orders], [], [], wait_s)[0]:
            for line in self.lines.feed(self.orders.recv(1 << 16)):
                self.obey(json.loads(line))

    def obey(self, order: dict[str, Any]) -> None:
        """One order."""
        if order["op"] == "stop":
            self.stopped = True
            return
        held = {member: int(rank) for rank, member in order["members"].items()}
        self.epoch, self.world = order["epoch"], len(held)
        self.member_of = {rank: number for number, rank in held.items()}
        self.rank = held.get(self.context.member, -1)
        if self.rank < 0:
            self.pulse.enter(Phase.IDLE)
            self.say(Kind.SPARE_READY)
            return
        if self.rank in order["lost"]:
            self.step = self.reached(self.rank)
        self.show()
        self.say(Kind.EXECUTING, step=self.step)
        if self.step:
            self.tell()  # the last words of the member before may be lost

    def accuse(self, step: int, certain: bool) -> None:
        """This member itself, or its twins too."""
        found = {"suspects": [self.rank], "members": [self.context.member], "redo": False}
        self.say(Kind.CORRUPT, step=step, what="its state changed", certain=certain, **found)

    def act(self, step: int) -> None:
        """Do what was told for this step."""
        acts = self.args.get("acts", {})
        act = acts.get(str(self.context.member), acts.get("*"))
        if act is None or act["at"] != step:
            return
        if act["do"] == "raise":
            raise ValueError(f"bad value on member {self.context.member}")
        if act["do"] == "slow":
            self.pace = 1.05
            return
        if act["do"] in ("corrupt", "dispute"):
            self.accuse(step, certain=act["do"] == "corrupt")
            time.sleep(LIMIT_S)
        if act["do"] == "hang":
            self.pulse.enter(Phase.BACKWARD)
            time.sleep(LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.Signals[act["do"]])
        time.sleep(0.05)
