"""One simulated cluster as an engine knows it: its deeds, and its world at any moment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.control.engines.engine import ClusterOrder, RunOrder
from meshwright.control.engines.simulation.course import Course
from meshwright.control.engines.simulation.deeds import Deeds
from meshwright.control.engines.simulation.logbook import Logbook
from meshwright.control.engines.simulation.past import Past, past
from meshwright.control.engines.simulation.sample import Sampler
from meshwright.control.engines.simulation.world import Epoch, State, World


@dataclass(frozen=True)
class View:
    """A cluster at simulated second `at_s`."""

    epoch: Epoch
    at_s: float

    def chips(self) -> State:
        """Its chips."""
        return self.epoch.at(self.at_s)

    def course(self, run: RunOrder) -> Course | None:
        """An attempt, once it has begun."""
        key = (run.job_id, run.attempt)
        return next((one for one in self.epoch.state.courses if one.begun.key == key), None)

    def in_use(self) -> frozenset[int]:
        """Nodes that something runs on."""
        per_node = self.epoch.state.machine.per_node
        found: set[int] = set()
        for one in self.epoch.state.courses:
            if not one.over:
                found.update(np.unique(one.chips // per_node).tolist())
        return frozenset(found)


class Site:
    """Whoever calls its methods holds `lock`: they may come from several threads."""

    def __init__(self, order: ClusterOrder) -> None:
        self.lock = threading.Lock()
        self.deeds = Deeds.of(order.home)
        self.sampler = Sampler()
        self._order = order
        self._world = World(order)
        self._books: dict[Path, Logbook] = {}
        self._known: tuple[object, ...] = ()
        self._past = Past((), ())

    def same(self, order: ClusterOrder) -> bool:
        """Whether `order` is of the cluster that this one began as."""
        mine = self._order
        return (mine.home, mine.created_s, mine.chips, mine.chips_per_node, mine.spec) == (
            order.home,
            order.created_s,
            order.chips,
            order.chips_per_node,
            order.spec,
        )

    def wall(self, at_s: float) -> float:
        """The wall clock at a simulated second."""
        return self._order.created_s + at_s / self._order.spec.speed

    def at(self, order: ClusterOrder, now_s: float) -> View:
        """The cluster at wall clock `now_s`."""
        lines = self.deeds.read()
        known = (len(lines), tuple(order.faults), tuple(sorted(order.replaced_s.items())))
        if known != self._known:
            self._past, self._known = past(order, lines), known
        at_s = max(0.0, (now_s - order.created_s) * order.spec.speed)
        return View(self._world.epoch(order, self._past, at_s), at_s)

    def book(self, run_dir: Path) -> Logbook:
        """The files of a run."""
        return self._books.setdefault(run_dir, Logbook(run_dir))

    def begun(self, run: RunOrder) -> Mapping[str, Any] | None:
        """How an attempt was started, if it was."""
        return self._find("run", run)

    def stopped(self, run: RunOrder, hard: bool) -> bool:
        """Whether an attempt has been asked to end, in no softer way."""
        return any(
            deed["hard"] >= hard
            for deed in self.deeds.read()
            if deed["deed"] == "stop"
            and (deed["job"], deed["attempt"]) == (run.job_id, run.attempt)
        )

    def _find(self, kind: str, run: RunOrder) -> Mapping[str, Any] | None:
        key = (run.job_id, run.attempt)
        return next(
            (
                deed
                for deed in reversed(self.deeds.read())
                if deed["deed"] == kind and (deed["job"], deed["attempt"]) == key
            ),
            None,
        )
