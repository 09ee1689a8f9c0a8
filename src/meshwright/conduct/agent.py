"""The agent of one node: forks its members, watches them, and stands between them and the
conductor.

It is one loop that only ever waits in `select`, without threads, for the reason that
`launcher.py` gives. When the conductor is gone its members run on: what they say is kept until a
conductor has taken it, and `conductor.json` is read anew at each attempt to reach one. Members end
with their agent (the kernel sees to it).

An agent that can neither renew its lease nor see its members get on stops them: from then on they
run no instruction, so that others may have their ranks. They are not ended, for it may be that the
machine of the conductor is lost, and they hold the state. The next conductor that takes a heartbeat
has by then had those killed that it has given up; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.conduct.beats import encode_sample
from meshwright.conduct.brood import Brood
from meshwright.conduct.hosts import own_hosts, this_machine
from meshwright.conduct.lease import lapsed
from meshwright.conduct.reach import Tries
from meshwright.conduct.rundir import ADDRESS_FILE, lock_agent, mark_done
from meshwright.conduct.wire import Caller, Link

LOOK_S = 0.02  # between two looks at all members
HEARTBEAT_S = 0.05
_GLANCE_S = 0.005  # between two glances at who is dying
_DIAL_S = 0.2  # between two attempts to reach a conductor, and the most that one may take
_ANSWER_S = 2.0  # for a conductor that was reached to prove itself
_ORPHAN_S = 60.0  # without members and conductor: how long to keep what was said
_HELD_LEASES = 480.0  # so long members are kept that are stopped: a conductor waits as long
_OF_THE_MOMENT = frozenset({Kind.PROGRESS, Kind.LINK})  # of no use to a later conductor


@dataclass(frozen=True)
class Home:
    """Where an agent belongs. `lease_s` holds until a conductor says otherwise."""

    node: int
    run: str
    secret: str
    lease_s: float


class Agent:
    """Serves one node of one run."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = lock_agent(Path(home.run), home.node)
        self._instance = secrets.token_hex(8)
        self._link: Link | None = None
        self._caller: Caller | None = None
        self._brood = Brood(home.secret, own_hosts(os.environ))
        self._kept: deque[dict[str, Any]] = deque()  # reports that no conductor has taken
        self._count = 0
        self._lease_s = home.lease_s
        now_s = time.monotonic()
        self._renewed_s = self._progress_s = self._alone_s = now_s
        self._looked_s = self._beat_s = self._dialed_s = 0.0
        self._tries: Tries | None = None
        self._severed = -1, 0.0  # a node that a drill has cut off, and until when
        self._steps: dict[int, tuple[int, ...]] = {}
        self._stopped_s: float | None = None  # since when the members are stopped
        self._dials = 0  # which of the conductor's addresses is next
        self._done = False

    def serve(self) -> None:
        """Until told to quit, or nothing is left to do; no member is left then."""
        try:
            while not self._done:
                self._turn()
        finally:
            self._brood.end_all()
        mark_done(self._lock)

    def _turn(self) -> None:
        self._wait()
        ends = self._brood.ends()
        for said in self._brood.messages():  # all that the dead have said goes before their end
            if self._link or said["kind"] not in _OF_THE_MOMENT:
                self._report("said", message=said)
        for end in ends:
            self._report("exit", **asdict(end))
        for member in self._brood.dying():
            self._report("dying", member=member, ts=time.time())
        self._hear()
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(now_s)
        if self._link is None:
            self._seek(now_s)
        elif now_s - self._beat_s >= (LOOK_S if self._brood.is_stopped() else HEARTBEAT_S):
            self._beat(now_s)
        self._try(now_s)

    def _reach(self, request: dict[str, Any]) -> None:
        """Try to reach other nodes."""
        if self._tries is not None:
            self._tries.close()
        now_s, (gone, until_s) = time.monotonic(), self._severed
        places = {int(node): [(h, p) for h, p in of] for node, of in request["places"].items()}
        severed = [
            n for n in places if now_s < until_s and (n == gone) != (self._home.node == gone)
        ]
        self._tries = Tries(request["at"], places, now_s, severed)

    def _try(self, now_s: float) -> None:
        """Say which nodes are not reached, once that is known."""
        if self._tries is not None and (missing := self._tries.missing(now_s)) is not None:
            if self._link is not None:
                said = {"at": self._tries.asked_s, "missing": sorted(missing)}
                self._link.send({"event": "reach", **said})
            self._tries = None

    def _wait(self) -> None:
        poller = select.poll()
        for descriptor in self._brood.descriptors():
            poller.register(descriptor, select.POLLIN)
        for descriptor in self._brood.unsent():
            poller.register(descriptor, select.POLLOUT)
        link = self._link or (self._caller.link if self._caller else None)
        if link is not None:
            poller.register(link, select.POLLIN | (select.POLLOUT if link.has_unsent else 0))
        poller.poll(_GLANCE_S * 1000)

    # --- the conductor

    def _seek(self, now_s: float) -> None:
        if self._caller is not None:
            if self._caller.advance():
                self._join(self._caller.link, now_s)
            elif self._caller.link.broken or now_s - self._dialed_s > _ANSWER_S:
                self._caller.link.close()
                self._caller = None
                self._dials += 1
        elif now_s - self._dialed_s >= _DIAL_S:
            self._dialed_s = now_s
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads((Path(self._home.run) / ADDRESS_FILE).read_text())
                addresses = found.get("addresses") or [found["address"]]
                host, port = addresses[self._dials % len(addresses)]
                hello, secret = self._hello(), self._home.secret
                self._caller = Caller.dial((str(host), int(port)), secret, hello, _DIAL_S)
                self._dials += self._caller is None

    def _hello(self) -> dict[str, Any]:
        return {
            "node": self._home.node,
            "pid": os.getpid(),
            "machine": this_machine(),
            "instance": self._instance,
            "table": self._brood.table,
            "members": self._brood.census(),
            "launched": self._brood.launched,
            "ended": [asdict(end) for end in self._brood.ended],
        }

    def _join(self, link: Link, now_s: float) -> None:
        self._link, self._caller = link, None
        self._renewed_s = now_s
        for report in self._kept:
            link.send(report)

    def _report(self, event: str, **fields: Any) -> None:
        self._count += 1
        report = {"n": self._count, "event": event, **fields}
        self._kept.append(report)
        if self._link:
            self._link.send(report)

    def _beat(self, now_s: float) -> None:
        assert self._link is not None
        self._beat_s = now_s
        samples = [encode_sample(s) for s in self._brood.samples() if self._stopped_s is None]
        told = {"at": now_s, "epoch": self._brood.epoch, "samples": samples}
        self._link.send({"event": "beat", "n": self._count, **told})

    def _hear(self) -> None:
        link = self._link
        if link is None:
            return
        link.flush()
        for request in link.receive():
            self._obey(request)
        if link.broken:
            self._part()

    def _part(self) -> None:
        if self._link is not None:
            self._link.close()
            self._dials += 1  # it may be the path that is lost
        self._link, self._alone_s = None, time.monotonic()

    def _obey(self, request: dict[str, Any]) -> None:
        match request["op"]:
            case "ack":
                # Counted from when it was asked for: the conductor counts from later.
                self._renewed_s = max(self._renewed_s, request["at"])
                self._lease_s = request["lease_s"]
                while self._kept and self._kept[0]["n"] <= request["n"]:
                    self._kept.popleft()
                if self._stopped_s is not None:
                    self._stopped_s = None
                    self._brood.resume()
            case "launch":
                self._launch(request)
            case "order":
                self._brood.order(request["line"], request.get("members"))
            case "signal":
                number = signal.Signals[request["signal"]]
                self._brood.signal(number, request.get("members"))
            case "reach":
                self._reach(request)
            case "sever":
                self._severed = request["node"], time.monotonic() + request["seconds"]
                self._brood.order(request, None)
            case "quit":
                self._done = True

    def _launch(self, request: dict[str, Any]) -> None:
        try:
            self._brood.launch(
                request["entry"],
                request["world"],
                Path(request["log_dir"]),
                request["args"],
                [(member, rank) for member, rank in request["members"]],
                self._inherited(),
            )
        except Exception as error:
            traceback.print_exc()
            self._report("refused", error=f"{type(error).__name__}: {error}")

    def _inherited(self) -> list[int]:
        """Descriptors that no member may hold."""
        links = [self._link, self._caller.link if self._caller else None]
        return [self._lock, *(link.fileno() for link in links if link is not None)]

    # --- the members

    def _look(self, now_s: float) -> None:
        self._brood.look(now_s)
        steps = self._brood.progress()
        if steps != self._steps or self._brood.at_work():
            self._steps, self._progress_s = steps, now_s
        if self._stopped_s is None:
            if lapsed(now_s, self._renewed_s, self._progress_s, self._lease_s):
                self._stopped_s = now_s
                self._brood.signal(signal.SIGSTOP, None)
        elif now_s - self._stopped_s > _HELD_LEASES * self._lease_s:
            self._brood.signal(signal.SIGKILL, None)
        if self._link is not None:
            if now_s - self._renewed_s > self._lease_s / 3:  # cut without a word
                self._part()
        elif not self._brood.lives() and now_s - self._alone_s > _ORPHAN_S:
            self._done = True
