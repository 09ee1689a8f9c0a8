"""What the conductor of a run that survives does, once `takeover.decide` has said what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import RunError
from meshwright.base.events import Kind
from meshwright.conduct.actions import (
    Action,
    Kill,
    KillAll,
    Launch,
    Record,
    Revive,
    SendTable,
    StopMembers,
)
from meshwright.conduct.bench import Bench
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.ledger import Ledger
from meshwright.conduct.members import Dying, Ended, Event, State
from meshwright.conduct.muster import Muster
from meshwright.conduct.reach import Probe, network_places
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.shelf import Shelf
from meshwright.conduct.takeover import decide


@dataclass
class Acting:
    """A run, and all that acts on it."""

    fleet: Fleet
    rundir: RunDir
    muster: Muster
    entry: str
    args: Mapping[str, Any]
    ledger: Ledger
    bench: Bench
    shelf: Shelf
    stop_requests: Callable[[], int]
    state: State
    asked: int = 0
    saved_step: int | None = None
    longest_save_s: float = 0.0
    step_of_rank: dict[int, int] = field(default_factory=dict)
    log_start_bytes: dict[str, int] = field(default_factory=dict)
    table_line: dict[str, Any] | None = None
    to_revive: set[int] = field(default_factory=set)
    ends: list[Ended | Dying] = field(default_factory=list)
    instances: dict[int, str] = field(default_factory=dict)  # of the agents, by node

    def apply(self, *events: Event) -> None:
        """Take in what has happened, and do what follows."""
        self.state, actions = decide(self.state, events, time.monotonic())
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendTable():
                if action.through == "load":
                    self._take_layout()
                self.table_line = self._table_line(action)
                self.fleet.send_all({"op": "order", "line": self.table_line})
            case Kill(member):
                node = self.state.members[member].node if member in self.state.members else None
                request = {"op": "signal", "signal": "SIGKILL", "members": [member]}
                self.fleet.send_all(request) if node is None else self.fleet.send(node, request)
            case KillAll():
                self.fleet.send_all({"op": "signal", "signal": "SIGKILL"})
            case StopMembers(members):
                asked = {"members": list(members)}
                self.fleet.send_all({"op": "order", "line": {"op": "stop"}, **asked})
                self.fleet.send_all({"op": "signal", "signal": "SIGTERM", **asked})
            case Launch(node, member):
                self.launch(node, [member])
            case Revive(node):
                self.to_revive.add(node)
            case Probe(asked_s, nodes):
                self._probe(asked_s, nodes)
            case Record(kind, fields):
                self.ledger.record(kind, fields)

    def _probe(self, asked_s: float, nodes: Sequence[int]) -> None:
        """Have agents try to reach a member of each other node."""
        up = {m.node: network_places(m.addresses) for m in self.state.members.values() if m.up}
        for node in nodes:
            places = {str(n): of for n, of in up.items() if n in nodes and n != node}
            self.fleet.send(node, {"op": "reach", "at": asked_s, "places": places})

    def _table_line(self, action: SendTable) -> dict[str, Any]:
        replicas = action.dp_replicate
        return {
            "op": "table",
            "epoch": action.epoch,
            "members": {str(rank): member for rank, member in enumerate(action.members)},
            "addresses": {
                str(number): list(member.addresses)
                for number, member in self.state.members.items()
                if member.up
            },
            "homes": {str(m): self.state.members[m].node for m in action.members},
            "lost": list(action.lost),
            "shadows": {str(rank): member for rank, member in action.shadows.items()},
            "resize": None if replicas is None else {"layout": self.muster.layout(replicas)},
            "goal": self.state.goal,
            "through": self.shelf.save() if action.through == "save" else self.shelf.through,
        }

    def _take_layout(self) -> None:
        """All begin anew in the layout that was asked for, from what they have saved."""
        self.shelf.load()
        assert self.shelf.job is not None
        self.muster = self.ledger.muster = Muster(self.shelf.job)
        self.bench.take_layout(self.muster)

    def launch(self, node: int, members: list[int]) -> None:
        """Have an agent fork members."""
        if members:
            world = self.muster.world
            self.fleet.send(
                node,
                {
                    "op": "launch",
                    "entry": self.entry,
                    "world": world,
                    "log_dir": str(self.rundir.logs.resolve()),
                    "args": dict(self.args),
                    "members": [[m, m if m < world else -1] for m in members],
                },
            )

    def revive(self) -> None:
        """Start the agents that are to be started again, once that can be done."""
        if self.to_revive and self.fleet.wait_warm(0.0):
            nodes, self.to_revive = self.to_revive, set()
            for node in nodes:
                try:
                    self.fleet.spawn(node, self.state.limits.lease_agent_s)
                except RunError as error:  # the others can still go on
                    what = f"node {node} cannot be started again: {error}"
                    self.ledger.store({"kind": Kind.ALERT, "what": what, "node": node})
