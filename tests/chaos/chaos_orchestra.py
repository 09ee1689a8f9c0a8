"""The conductor's part in small: forks members, gives out tables, notes what was said and when.

Members are forked from the process of the tests, which must have no threads: what torch computed in
it before would leave some, and a member that inherits their locks waits for ever.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from meshwright.base import pulse
from meshwright.base.events import Kind, WorkerContext
from meshwright.conduct.protocol import die_with_parent
from meshwright.plan.homes import deal

Said = dict[str, Any]


@dataclass
class Player:
    """One member."""

    number: int
    pid: int
    pidfd: int
    orders: socket.socket
    addresses: list[str] = field(default_factory=list)
    ready: bool = False
    alive: bool = True
    status: int | None = None


@dataclass
class Takeover:
    """Seconds from the first loss that led to it: until the table was out, and until all ran."""

    epoch: int
    lost: list[int]
    begun_s: float
    ordered_s: float = 0.0
    done_s: float = 0.0
    waiting: set[int] = field(default_factory=set)
    by_shadow: list[int] = field(default_factory=list)  # ranks that their own shadow took


class Orchestra:
    """`world` ranks and `spares`, running `entry`."""

    def __init__(
        self,
        entry: Callable[[WorkerContext], object],
        args: dict[str, Any],
        world: int,
        spares: int,
        logs: Path,
        bound_s: float = 120.0,
        nodes: int = 1,
        place: Callable[[int], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Where spares shadow ranks, nobody begins before all spares are ready."""
        self.entry, self.args, self.world, self.logs = entry, args, world, logs
        self.place = place  # moves a member to its machine, and says the addresses of that
        self.epoch, self.members = 0, dict[int, int]()
        self.players: dict[int, Player] = {}
        self.said: list[Said] = []
        self.takeovers: list[Takeover] = []
        self.through: dict[str, Any] | None = None  # what every later table says
        self.shadow = args["job"]["resilience"]["redundancy"] == "shadow"
        self.shadows: dict[int, int] = {}
        self._ranks: set[int] = set()  # of the table before
        self.homes = {n: n % nodes for n in range(64)}
        self.on_said: Callable[[Orchestra, Said], object] = lambda _o, _s: None
        self._deadline_s = time.monotonic() + bound_s
        self._events, self._event_fd = os.pipe()
        os.set_blocking(self._events, False)
        self._rest = self._line = b""
        self._pulse_fd = pulse.create(64)
        self._hurt_s: dict[int, float] = {}
        self._lost: list[int] = []
        self._condemned: set[int] = set()
        self._poller = select.poll()
        self._poller.register(self._events, select.POLLIN)
        gc.collect()
        gc.freeze()
        for number in range(world + spares):
            self.launch(number)

    def launch(self, number: int) -> None:
        """One more member."""
        mine, theirs = socket.socketpair()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            mine.close()
            for player in self.players.values():
                player.orders.close()
                os.close(player.pidfd)
            self._be_member(number, theirs)
        theirs.close()
        self.players[number] = Player(number, pid, os.pidfd_open(pid), mine)
        self._poller.register(self.players[number].pidfd, select.POLLIN)

    def _be_member(self, number: int, orders: socket.socket) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            faulthandler.disable()
            log = os.open(self.logs / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR1)  # says where it is
            context = WorkerContext(
                rank=number,
                world=self.world,
                store_port=0,
                store_fd=None,
                event_fd=self._event_fd,
                args=self.args,
                member=number,
                orders_fd=orders.detach(),
                pulse_fd=self._pulse_fd,
                secret="secret",
                hosts=self.place(number),
            )
            self.entry(context)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def run(self) -> list[Said]:
        """To the end of all ranks; everything that was said. Raises AssertionError with the last
        words of whoever failed, or if the time is over."""
        try:
            while not self.over:
                self.turn()
            return self.said
        finally:
            self.close()

    @property
    def over(self) -> bool:
        """Whether every rank's member has returned."""
        held = [self.players[member] for member in self.members.values()]
        return bool(held) and all(player.status == 0 for player in held)

    def turn(self, timeout_s: float = 0.5) -> None:
        """Hear, and act."""
        assert time.monotonic() < self._deadline_s, f"time is over\n{self._where()}"
        for fd, _ in self._poller.poll(timeout_s * 1e3):
            if fd == self._events:
                self._hear()
            else:
                self._bury(fd)
        if not self.members:
            self._begin()
        elif self._lost:
            self._replace()
        elif self.shadow and not self.over:
            self._enlist()

    def _begin(self) -> None:
        first = {rank: rank for rank in range(self.world)}
        spares = [p for p in self.players.values() if p.number >= self.world]
        if all(player.addresses for player in self.players.values()):
            if not self.shadow or all(spare.ready for spare in spares):
                self.order(first, [])
            elif not self.epoch:
                self.order(first, [], to=spares)
                self.members = {}

    @property
    def free(self) -> list[int]:
        """Spares that are ready."""
        holders = set(self.members.values())
        ready = [p.number for p in self.players.values() if p.alive and p.ready]
        return [number for number in ready if number not in holders]

    def _enlist(self) -> None:
        spares = {p.number for p in self.players.values() if p.alive} - set(self.members.values())
        gone = not set(self.shadows.values()) <= spares
        if gone or (not self.shadows and self.free and spares == set(self.free)):
            self.order(self.members, [])

    def kill(self, member: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a member now."""
        self._hurt_s.setdefault(member, time.monotonic())
        os.kill(self.players[member].pid, number)

    def order(
        self,
        members: dict[int, int],
        lost: Sequence[int],
        resize: dict[str, Any] | None = None,
        through: dict[str, Any] | None = None,
        to: Sequence[Player] | None = None,
    ) -> None:
        """Give out a table; `to` all by default."""
        self._ranks, self.epoch, self.members = set(self.members), self.epoch + 1, members
        alive = {p.number: p for p in self.players.values() if p.alive}
        nodes = [self.homes[members[rank]] for rank in range(len(members))]
        dealt = self.shadows if len(members) == len(self._ranks) else {}
        self.shadows = deal(nodes, self.free, self.homes, dealt) if self.shadow else {}
        table = {
            "op": "table",
            "epoch": self.epoch,
            "members": {str(rank): member for rank, member in members.items()},
            "addresses": {str(n): player.addresses for n, player in alive.items()},
            "lost": list(lost),
            "shadows": {str(rank): member for rank, member in self.shadows.items()},
            "homes": {str(member): self.homes[member] for member in members.values()},
            "resize": resize,
            "through": through or self.through,
        }
        self._line = json.dumps(table).encode() + b"\n"
        for player in alive.values() if to is None else to:
            self._tell(player)

    def _tell(self, player: Player) -> None:
        with suppress(OSError):
            player.orders.sendall(self._line)

    def _replace(self) -> None:
        free = self.free
        lost = [rank for rank, member in self.members.items() if member in self._lost]
        if len(free) < len(lost):
            return  # one may still be getting ready
        taken = {r: self.shadows[r] for r in lost if self.shadows.get(r) in free}
        taken = {r: member for r, member in taken.items() if r == _first(taken, member)}
        free = [number for number in free if number not in taken.values()]
        by_shadow = sorted(taken)
        taken |= dict(zip([r for r in lost if r not in taken], free, strict=False))
        members = {**self.members, **taken}
        begun_s = min(self._hurt_s[member] for member in self._lost)
        if self.takeovers and not self.takeovers[-1].done_s:
            begun_s = self.takeovers.pop().begun_s
        self._lost = []
        self.order(members, lost)
        takeover = Takeover(self.epoch, lost, begun_s, time.monotonic() - begun_s)
        takeover.by_shadow = by_shadow
        takeover.waiting = set(members.values())
        self.takeovers.append(takeover)

    def _hear(self) -> None:
        data = os.read(self._events, 1 << 20)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            player = self.players[said["member"]]
            if said["kind"] == Kind.MEMBER_UP:
                player.addresses = said["addresses"]
                if self.members:
                    self._tell(player)
            elif said["kind"] == Kind.SPARE_READY:
                player.ready = True
            elif said["kind"] == Kind.EXECUTING and self.takeovers:
                taken = self.takeovers[-1]
                if said["epoch"] == taken.epoch:
                    taken.waiting.discard(player.number)
                    if not taken.waiting:
                        taken.done_s = time.monotonic() - taken.begun_s
            elif said["kind"] == Kind.CORRUPT:
                self._judge(said)
            self.said.append(said)
            self.on_said(self, said)

    def _judge(self, said: Said) -> None:
        """As the conductor does: who errs is replaced, and what may be told by it is done again."""
        if said["certain"]:
            self._condemned |= set(said["members"])
            for member in said["members"]:
                if self.players[member].alive:
                    self.kill(member)
        elif said["epoch"] == self.epoch:
            assert said["redo"], said["what"]
            self.order(self.members, [])

    def _bury(self, pidfd: int) -> None:
        player = next(p for p in self.players.values() if p.pidfd == pidfd)
        self._poller.unregister(pidfd)
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        player.alive, player.status = False, result.si_status if exited else -result.si_status
        if exited and player.status and player.number not in self._condemned:
            raise AssertionError(f"member {player.number} failed\n{self._words()}")
        if player.status and player.number in self.members.values():
            self._hurt_s.setdefault(player.number, time.monotonic())
            self._lost.append(player.number)

    def _where(self) -> str:
        """Where each member is, and its last words."""
        for player in self.players.values():
            if player.alive:
                os.kill(player.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"epoch {self.epoch}, {self.members}\n{self._words('/site-packages/')}"

    def _words(self, *but: str) -> str:
        told = []
        for log in sorted(self.logs.glob("*.log")):
            lines = log.read_text().splitlines()
            text = "\n".join(line for line in lines if not any(part in line for part in but))
            told.append(f"{log.name}: {text[-3000:]}")
        return "\n".join(told)

    def close(self) -> None:
        """Leave nothing behind."""
        for player in self.players.values():
            if player.alive:
                os.kill(player.pid, signal.SIGKILL)
                os.waitid(os.P_PIDFD, player.pidfd, os.WEXITED)
            os.close(player.pidfd)
            player.orders.close()
        for fd in (self._events, self._event_fd, self._pulse_fd):
            os.close(fd)


def _first(taken: dict[int, int], member: int) -> int:
    return min(rank for rank, found in taken.items() if found == member)
