"""The members of one agent: forked, spoken to, heard, watched and buried."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import Any

from meshwright.base import pulse
from meshwright.base.events import Kind, WorkerContext
from meshwright.conduct.beats import at_work, progress_key
from meshwright.conduct.exiting import is_exiting
from meshwright.conduct.forking import (
    Ends,
    Entry,
    become_worker,
    reap,
    require_single_thread,
    resolve,
)
from meshwright.conduct.processes import read_process
from meshwright.conduct.protocol import (
    Exit,
    LineBuffer,
    Message,
    member_log_path,
    parse_message,
)
from meshwright.conduct.verdicts import Sample
from meshwright.conduct.watching import Watch
from meshwright.conduct.wire import Link

MOST_MEMBERS = 4096  # of a run, all that ever were
_PIPE_BYTES = 1 << 20  # the most an unprivileged user may ask for (pipe(7))
_READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


@dataclass
class _Child:
    member: int
    pid: int
    pidfd: int
    orders: Link
    watch: Watch
    stat_fd: int  # /proc/PID/stat, open: read often
    dying: bool = False
    addresses: list[str] = field(default_factory=list)
    ready: bool = False
    executing: list[int] | None = None  # epoch and step
    sample: Sample | None = None


class Brood:
    """All members that one agent has forked and not yet buried."""

    def __init__(self, secret: str, hosts: tuple[str, ...] = ()) -> None:
        self._secret, self._hosts = secret, hosts
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}
        self._ends = Ends(MOST_MEMBERS)
        self._pulse_fd = pulse.create(MOST_MEMBERS)
        self._pulse = pulse.PulseReader(self._pulse_fd)
        self._pipe, self._event_fd = os.pipe()
        fcntl(self._event_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._pipe, False)
        self._lines = LineBuffer()
        self.launched: list[int] = []  # all members that ever were
        self.ended: list[Exit] = []
        self.table: dict[str, Any] | None = None  # the newest that was given to the members

    # --- forking

    def launch(
        self,
        entry: str,
        world: int,
        log_dir: Path,
        args: dict[str, Any],
        members: Iterable[tuple[int, int]],
        not_inherited: Sequence[int],
    ) -> None:
        """Fork `members`, (number, first rank or -1) each; those that exist already stay.

        Raises whatever the import of `entry` raises, and RunError if it has left threads.
        """
        function = resolve(entry)
        require_single_thread(entry)
        for member, rank in members:
            if member not in self.launched:
                self.launched.append(member)
                context = WorkerContext(
                    rank=rank,
                    world=world,
                    store_port=0,
                    store_fd=None,
                    event_fd=self._event_fd,
                    args=args,
                    member=member,
                    pulse_fd=self._pulse_fd,
                    secret=self._secret,
                    hosts=self._hosts,
                )
                self._fork(context, function, member_log_path(log_dir, member), not_inherited)

    def _fork(
        self, context: WorkerContext, entry: Entry, log: Path, not_inherited: Sequence[int]
    ) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:

            def prepare() -> WorkerContext:
                stats = [child.stat_fd for child in self._children.values()]
                for descriptor in [*self.descriptors(), *stats, *not_inherited, ours.fileno()]:
                    os.close(descriptor)
                fields = {**context.__dict__, "orders_fd": theirs.detach()}
                return WorkerContext(**fields)

            become_worker(self._pid, log, self._ends, context.member, entry, prepare)
        theirs.close()
        watch = Watch(None, context.member, "")
        stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        child = _Child(context.member, pid, os.pidfd_open(pid), Link(ours), watch, stat_fd)
        self._children[context.member] = child
        if self.table is not None:
            child.orders.send(self.table)

    def descriptors(self) -> list[int]:
        """What to wait for; none of it is for members."""
        found = [self._pipe]
        for child in self._children.values():
            found += [child.pidfd, child.orders.fileno()]
        return found

    # --- what they say

    def messages(self) -> list[Message]:
        """What members have said."""
        found: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PIPE_BYTES // _READ_BYTES + 1):
                for line in self._lines.feed(os.read(self._pipe, _READ_BYTES)):
                    if (message := parse_message(line)) is None:
                        _log.warning("dropped a line that is no message: %.200r", line)
                    else:
                        self._note(message)
                        found.append(message)
        return found

    def _note(self, message: Message) -> None:
        """Keep what a later conductor has to know."""
        child = self._children.get(message.get("member", -1))
        if child is None:
            return
        match message["kind"]:
            case Kind.MEMBER_UP:
                child.addresses = list(message["addresses"])
            case Kind.SPARE_READY:
                child.ready = True
            case Kind.EXECUTING:
                child.executing = [message["epoch"], message["step"]]

    def census(self) -> list[dict[str, Any]]:
        """All members that live, for a conductor that may not know them."""
        return [
            {
                "member": child.member,
                "pid": child.pid,
                "addresses": child.addresses,
                "ready": child.ready,
                "executing": child.executing,
            }
            for child in self._children.values()
        ]

    # --- what they are told

    @property
    def epoch(self) -> int:
        """Of the newest table that the members were given; 0: of none."""
        return 0 if self.table is None else int(self.table["epoch"])

    def order(self, line: dict[str, Any], members: Sequence[int] | None) -> None:
        """Tell `members`, or all of them. A table that is not newer than the last is dropped."""
        if line.get("op") == "table":
            if line["epoch"] <= self.epoch:
                return
            self.table = line
            held = {member: int(rank) for rank, member in line["members"].items()}
            for child in self._children.values():
                child.watch = Watch(held.get(child.member), child.member, "")
                if child.sample is not None:
                    child.sample = replace(child.sample, quiet_s=0.0, state_s=0.0)
        for child in self._chosen(members):
            child.orders.send(line)

    def unsent(self) -> list[int]:
        """Descriptors of members that have not read all that they were told; flushes the others."""
        for child in self._children.values():
            child.orders.flush()
        return [c.orders.fileno() for c in self._children.values() if c.orders.has_unsent]

    def signal(self, number: signal.Signals, members: Sequence[int] | None) -> None:
        """Send a signal to `members`, or to all."""
        for child in self._chosen(members):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, number)

    def resume(self) -> None:
        """Let all go on that were stopped; how long they have been quiet counts anew."""
        for child in self._children.values():
            child.watch, child.sample = Watch(child.watch.rank, child.member, ""), None
        self.signal(signal.SIGCONT, None)

    def _chosen(self, members: Sequence[int] | None) -> list[_Child]:
        if members is None:
            return list(self._children.values())
        return [self._children[member] for member in members if member in self._children]

    # --- how they are

    def lives(self) -> bool:
        """Whether any member is left."""
        return bool(self._children)

    def look(self, now_s: float) -> None:
        """Take a sample of every member."""
        for child in self._children.values():
            process = read_process(child.pid)
            state = process.state if process else "Z"
            beat = self._pulse.read(child.member)
            child.sample = child.watch.look(now_s, beat, state)

    def samples(self) -> list[Sample]:
        """The newest of those that hold a rank."""
        found = (child.sample for child in self._children.values())
        return [sample for sample in found if sample is not None]

    def is_stopped(self) -> bool:
        """Whether any member is: this cannot wait to be told."""
        return any(sample.state == "T" for sample in self.samples())

    def at_work(self) -> bool:
        """Whether any member is busy with something, rather than waiting."""
        return any(at_work(sample) for sample in self.samples())

    def progress(self) -> dict[int, tuple[int, ...]]:
        """By member, what changes when it gets on."""
        return {sample.member: progress_key(sample.pulse) for sample in self.samples()}

    def dying(self) -> list[int]:
        """Members that the kernel has begun to end since the last call, and that are not done.

        Their memory is freed before their end can be seen by `ends`: tens of milliseconds.
        """
        found = []
        for child in self._children.values():
            _, returned, _ = self._ends.read(child.member)
            if not child.dying and not returned and is_exiting(child.stat_fd):
                child.dying = True
                found.append(child.member)
        return found

    def ends(self) -> list[Exit]:
        """Members that have died since the last call, buried now."""
        poller = select.poll()
        by_pidfd = {child.pidfd: child for child in self._children.values()}
        for pidfd in by_pidfd:
            poller.register(pidfd, select.POLLIN)
        found = [self._bury(by_pidfd[pidfd]) for pidfd, _ in poller.poll(0)]
        self.ended += found
        return found

    def _bury(self, child: _Child) -> Exit:
        seen_ts = time.time()
        code, number = reap(child.pidfd)
        child.orders.close()
        os.close(child.stat_fd)
        del self._children[child.member]
        ended_ts, returned, peer_lost = self._ends.read(child.member)
        ts = ended_ts or seen_ts
        progress = progress_key(self._pulse.read(child.member))
        return Exit(-1, child.pid, code, number, returned, ts, peer_lost, child.member, progress)

    def end_all(self) -> None:
        """Kill every member and wait for it; nothing is reported."""
        self.signal(signal.SIGKILL, None)
        for child in list(self._children.values()):
            self._bury(child)
