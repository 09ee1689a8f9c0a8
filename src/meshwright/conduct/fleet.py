"""The conductor's side of its agents: starts them, lets them in, and keeps the lines to them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.conduct.agent import Home
from meshwright.conduct.hosts import own_hosts, this_machine
from meshwright.conduct.rundir import ADDRESS_FILE, RunDir
from meshwright.conduct.warm import WarmProcess
from meshwright.conduct.wire import Door, Link

_log = logging.getLogger(__name__)

_STRANGER_S = 5.0  # to prove that one is none


@dataclass(frozen=True)
class Hello:
    """An agent has come, or come back, and says what it has: `agent.Agent._hello`."""

    node: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """An agent says something."""

    node: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """The connection to an agent has ended."""

    node: int


@dataclass(frozen=True)
class Dead:
    """The process of an agent has ended."""

    node: int


@dataclass(frozen=True)
class Asked:
    """A user of the run asks for something; `link` waits for one answer."""

    link: Link
    fields: dict[str, Any]


Heard = Hello | Report | Cut | Dead | Asked


@dataclass
class _Agent:
    """What is known of one agent."""

    pid: int
    pidfd: int | None
    instance: str = ""
    link: Link | None = None
    taken: int = 0  # reports up to this one have been taken
    members: set[int] = field(default_factory=set)  # that it was told to launch


class Fleet:
    """All agents of one run. A context manager: leaving it leaves no process behind."""

    def __init__(
        self,
        preload: str,
        here: frozenset[int] | None = None,
        nursery: WarmProcess | None = None,
    ) -> None:
        self.here = here
        self._hosts = own_hosts(os.environ)
        self._nursery = nursery or WarmProcess("meshwright.conduct.nursery", preload, [], [])
        self._listeners: list[socket.socket] = []
        self._doors: dict[Door, float] = {}
        self._agents: dict[int, _Agent] = {}
        self._asking: list[Link] = []
        self._cut_until_s: dict[int, float] = {}
        self._banned: set[str] = set()
        self._run = Path()
        self._secret = ""
        self.generation = 0  # how many conductors the run had before this one

    @classmethod
    def start(cls, preload: str, here: frozenset[int] | None = None) -> Fleet:
        """Start to import the module `preload`; returns at once. The agents of the nodes `here` are
        started by this process, those of all others by somebody on their machine (`outpost.py`);
        None: all are here. Raises InputError if an address of this machine is wrong."""
        return cls(preload, here)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_warm(self, timeout_s: float) -> bool:
        """Whether agents can be forked, waiting up to `timeout_s`. Raises RunError if they never
        can."""
        return self._nursery.wait_warm(timeout_s)

    def open(self, rundir: RunDir) -> None:
        """Listen for the agents of the run in `rundir`, and write down where."""
        self._run = rundir.path.resolve()
        self._secret = rundir.secret()
        self.generation = rundir.generation() + 1
        for host in ("127.0.0.1", *self._hosts):
            listener = socket.create_server((host, 0), backlog=128)
            listener.setblocking(False)
            self._listeners.append(listener)
        addresses = [listener.getsockname()[:2] for listener in self._listeners]
        said = {"address": addresses[0], "addresses": addresses, "pid": os.getpid()}
        said["generation"] = self.generation
        said |= {"here": None if self.here is None else sorted(self.here)}
        said |= {"machine": this_machine()}
        rundir.write_text(ADDRESS_FILE, json.dumps(said))

    def spawn(self, node: int, lease_s: float) -> None:
        """Start an agent; one of that node that may still live is killed, and never let in again.
        Nothing happens where somebody else starts it.

        Raises RunError if the process that forks them has died.
        """
        if self.here is not None and node not in self.here:
            return
        self._forget(node)
        home = Home(node, str(self._run), self._secret, lease_s)
        answer = self._nursery.ask({"op": "spawn", **asdict(home)}, "spawned", timeout_s=30.0)
        pid = int(answer["pid"])
        self._agents[node] = _Agent(pid, _open_pidfd(pid))

    def _forget(self, node: int) -> None:
        agent = self._agents.pop(node, None)
        if agent is None:
            return
        if agent.instance:
            self._banned.add(agent.instance)
        if agent.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(agent.pidfd, signal.SIGKILL)
            os.close(agent.pidfd)
        if agent.link is not None:
            agent.link.close()

    def send(self, node: int, request: Mapping[str, Any]) -> None:
        """Tell one agent, if it can be reached."""
        agent = self._agents.get(node)
        if agent is not None and agent.link is not None:
            agent.link.send(request)
            if request["op"] == "launch":
                agent.members |= {member for member, _ in request["members"]}

    def send_all(self, request: Mapping[str, Any]) -> None:
        """Tell every agent that can be reached."""
        for node in self._agents:
            self.send(node, request)

    def taken(self, node: int, number: int) -> bool:
        """Whether report `number` of an agent has been taken before; it has from now on."""
        agent = self._agents[node]
        before = number <= agent.taken
        agent.taken = max(agent.taken, number)
        return before

    def acknowledge(self, node: int, at_s: float, lease_s: float) -> None:
        """Tell an agent what was taken of its reports, and that its lease is renewed."""
        if agent := self._agents.get(node):
            self.send(node, {"op": "ack", "n": agent.taken, "at": at_s, "lease_s": lease_s})

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens."""
        return self._listeners[0].getsockname() if self._listeners else None

    def pid(self, node: int) -> int | None:
        """The process of an agent."""
        agent = self._agents.get(node)
        return None if agent is None else agent.pid

    def signal_member(self, member: int, number: signal.Signals) -> None:
        """Have a signal sent to a member, wherever it is."""
        self.send_all({"op": "signal", "signal": number.name, "members": [member]})

    def cut(self, node: int, seconds: float) -> None:
        """Have the line to an agent cut for a while, as a broken network would."""
        self._cut_until_s[node] = time.monotonic() + seconds
        agent = self._agents.get(node)
        if agent is not None and agent.link is not None:
            agent.link.broken = True

    def sever(self, node: int, seconds: float) -> None:
        """Have members of a node and of all others cut off from each other for a while, as if their
        network were broken; lines to agents are not."""
        if (agent := self._agents.get(node)) is not None:
            broken = {"members": sorted(agent.members), "seconds": seconds}
            self.send_all({"op": "sever", "node": node, **broken})

    # --- what is heard

    def poll(self, timeout_s: float) -> list[Heard]:
        """What has come, waiting up to `timeout_s` for the first of it."""
        self._wait(timeout_s)
        heard = self._admit()
        for node, agent in list(self._agents.items()):
            heard += self._read(node, agent)
        heard += self._requests()
        return heard

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        for listener in self._listeners:
            poller.register(listener, select.POLLIN)
        agents = [agent.link for agent in self._agents.values() if agent.link is not None]
        for link in [*agents, *self._asking, *(door.link for door in self._doors)]:
            if link.broken:
                timeout_s = 0.0
            else:
                poller.register(link, select.POLLIN | (select.POLLOUT if link.has_unsent else 0))
        for agent in self._agents.values():
            if agent.pidfd is not None:
                poller.register(agent.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def _admit(self) -> list[Heard]:
        """Let in those who have proved that they know the secret."""
        now_s = time.monotonic()
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock, _ = listener.accept()
                    self._doors[Door(Link(sock), self._secret, self._admits)] = now_s
        heard: list[Heard] = []
        for door, since_s in list(self._doors.items()):
            hello = door.answer()
            if hello is not None:
                del self._doors[door]
                heard += self._welcome(door.link, hello)
            elif door.link.broken or now_s - since_s > _STRANGER_S:
                if not door.proven:
                    _log.warning("refused a connection that did not prove itself")
                door.link.close()
                del self._doors[door]
        return heard

    def _admits(self, hello: dict[str, Any]) -> bool:
        """Not while the line is cut: who got an answer would take its lease for renewed."""
        return time.monotonic() >= self._cut_until_s.get(hello.get("node", -1), 0.0)

    def _welcome(self, link: Link, hello: dict[str, Any]) -> list[Heard]:
        node = hello.get("node")
        if not isinstance(node, int):
            self._asking.append(link)
            return []
        if hello["instance"] in self._banned:
            link.send({"op": "quit"})
            link.close()
            return []
        agent = self._agents.get(node)
        if agent is None or (agent.instance and agent.instance != hello["instance"]):
            if agent is not None:
                self._forget(node)
            here = hello.get("machine") == this_machine()
            pidfd = _open_pidfd(hello["pid"]) if here else None
            agent = self._agents[node] = _Agent(hello["pid"], pidfd)
        if agent.link is not None:
            agent.link.close()
        agent.link, agent.instance = link, hello["instance"]
        agent.members |= set(hello["launched"])
        return [Hello(node, hello)]

    def _read(self, node: int, agent: _Agent) -> list[Heard]:
        heard: list[Heard] = []
        if agent.link is not None:
            agent.link.flush()
            cut = agent.link.broken  # before: what a cut line still holds is not delivered
            if not cut:
                heard += [Report(node, fields) for fields in agent.link.receive()]
            if agent.link.broken:
                agent.link.close()
                agent.link = None
                heard.append(Cut(node))
        if agent.pidfd is not None and _has_ended(agent.pidfd):
            os.close(agent.pidfd)
            agent.pidfd = None
            heard.append(Dead(node))
        return heard

    def _requests(self) -> list[Heard]:
        heard: list[Heard] = []
        for link in list(self._asking):
            asked = link.receive()
            heard += [Asked(link, fields) for fields in asked]
            if link.broken:
                link.close()
                self._asking.remove(link)
        return heard

    def close(self) -> None:
        """End all agents, their members with them, and wait until they are gone."""
        self.send_all({"op": "quit"})
        for agent in self._agents.values():
            if agent.pidfd is not None and not _has_ended(agent.pidfd, timeout_s=2.0):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(agent.pidfd, signal.SIGKILL)
                _has_ended(agent.pidfd, timeout_s=2.0)
        self._let_go()
        self._nursery.close()

    def _let_go(self) -> None:
        links = [agent.link for agent in self._agents.values() if agent.link is not None]
        for link in [*links, *self._asking, *(door.link for door in self._doors)]:
            link.close()
        for agent in self._agents.values():
            if agent.pidfd is not None:
                os.close(agent.pidfd)
        self._agents, self._asking, self._doors = {}, [], {}
        for listener in self._listeners:
            listener.close()
        self._listeners = []


def _open_pidfd(pid: int) -> int | None:
    """None where there is no such process any more."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
