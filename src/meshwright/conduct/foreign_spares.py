"""The warm spares of a foreign script: made when nothing else needs the processor, and handed out
when ranks start."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.conduct.foreign_processes import Child, Command, Spare, start_spare
from meshwright.conduct.processes import read_process

_MOST_DEAD = 2  # of one filling: more of them cannot import what they are told to


@dataclass
class Spares:
    """As many as `wanted`, which import `preload`."""

    command: Command
    wanted: int
    preload: Sequence[str]
    environment: Mapping[str, str]
    logs: Path
    _ready: list[Spare] = field(default_factory=list)
    _made: int = 0
    _dead: int = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Those that wait to be used."""
        return tuple(spare.child.pid for spare in self._ready)

    @property
    def broken(self) -> Path | None:
        """The log of a spare, if they die while they get warm."""
        return self._log(self._made - 1) if self._dead > _MOST_DEAD else None

    def take(self, environment: Mapping[str, str], log: Path) -> Child | None:
        """A spare that becomes a rank, the warmest first; None if there is none."""
        self._drop_dead()
        self._ready.sort(key=lambda spare: not spare.warm())
        if not self._ready or self.command.spare is None:
            return None
        return self._ready.pop(0).become(self.command.spare, environment, log)

    def refill(self) -> None:
        """Start one more, if some are missing and none is getting warm."""
        if self.warm() < len(self._ready) or len(self._ready) >= self.wanted:
            return
        if self.command.spare is None or self.broken:
            return
        log = self._log(self._made)
        self._made += 1
        interpreter = self.command.words[0]
        self._ready.append(start_spare(interpreter, self.preload, self.environment, log))

    def warm(self) -> int:
        """How many could become a rank at once."""
        self._drop_dead()
        return sum(spare.warm() for spare in self._ready)

    def end(self) -> None:
        """Kill all of them."""
        for spare in self._ready:
            spare.control.close()
            spare.child.send(signal.SIGKILL)
            spare.child.reap()
        self._ready = []

    def _drop_dead(self) -> None:
        for spare in list(self._ready):
            process = read_process(spare.child.pid)
            if process is None or process.state == "Z":
                spare.control.close()
                spare.child.reap()
                self._ready.remove(spare)
                self._dead += 1

    def _log(self, number: int) -> Path:
        return self.logs / f"spare-{number}.log"
