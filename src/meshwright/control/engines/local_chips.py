"""Which process is which chip of a local cluster, and what the kernel says of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshwright.conduct.processes import read_process
from meshwright.control.engines.engine import ClusterOrder, RunOrder, Sample
from meshwright.control.engines.processes import Hands, ProcessId, hands, lives, memory_bytes
from meshwright.control.engines.runs import last_step
from meshwright.control.figures import FIGURE_NAMES

Place = tuple[int, int]  # node, chip

_LOOK_AGAIN_S = 2.0  # for processes of a run; a look takes as long as this machine has processes
_THERMAL = Path("/sys/class/thermal")
_AT = {name: place for place, name in enumerate(FIGURE_NAMES)}


@dataclass
class _Seen:
    hands: Hands
    at_s: float


@dataclass
class Chips:
    """Remembers processes, and how much they had worked when it last looked."""

    _seen: dict[Path, _Seen] = field(default_factory=dict)
    _worked: dict[ProcessId, tuple[float, float]] = field(default_factory=dict)  # at, CPU seconds

    def sample(self, cluster: ClusterOrder, now_s: float) -> Sample:
        """The figures of all chips: of the processes that are one, and of this machine."""
        sample = np.full((cluster.chips, len(FIGURE_NAMES)), np.nan, dtype=np.float32)
        sample[:, _AT["temperature_c"]] = _temperature_c()
        worked: dict[ProcessId, tuple[float, float]] = {}
        for run in cluster.runs:
            steps = last_step(run.run_dir)
            for (node, chip), process in self._processes(run).items():
                row = sample[node * cluster.chips_per_node + chip]
                row[_AT["utilization"]] = self._busy(process, now_s, worked)
                row[_AT["memory_used_bytes"]] = memory_bytes(process.pid)
                row[_AT["steps"]] = steps
        self._worked = {
            **{one: at for one, at in self._worked.items() if now_s - at[0] < _LOOK_AGAIN_S * 5},
            **worked,
        }
        return sample

    def _busy(
        self, process: ProcessId, now_s: float, worked: dict[ProcessId, tuple[float, float]]
    ) -> float:
        """Share of one core since the last sample; NaN for the first."""
        found = read_process(process.pid)
        if found is None:
            return math.nan
        worked[process] = now_s, found.cpu_s
        before = self._worked.get(process)
        if before is None or now_s <= before[0]:
            return math.nan
        return min(1.0, max(0.0, (found.cpu_s - before[1]) / (now_s - before[0])))

    def _processes(self, run: RunOrder) -> dict[Place, ProcessId]:
        seen, now_s = self._seen.get(run.run_dir), time.monotonic()
        if (
            seen is None
            or now_s - seen.at_s > _LOOK_AGAIN_S
            or not all(lives(process) for process in seen.hands.ranks.values())
        ):
            seen = self._seen[run.run_dir] = _Seen(hands(run.run_dir), now_s)
        return places(run.chips, seen.hands.ranks)

    def victims(self, run: RunOrder, node: int, chip: int | None) -> list[ProcessId]:
        """What has to end for a chip (None: the node) to be dead: its process, and where nothing
        else is theirs, agents."""
        found = hands(run.run_dir)
        at = places(run.chips, found.ranks)
        ranks = [p for place, p in at.items() if place[0] == node and chip in (None, place[1])]
        if chip is not None:
            return ranks
        return [*_agents_of(ranks, list(at.values()), found), *ranks]


def places(chips: tuple[Place, ...], ranks: dict[int, ProcessId]) -> dict[Place, ProcessId]:
    """Where each process is. The first ones have the chips in the order of the run; a member that
    was started later has one that was left."""
    found = {chips[number]: process for number, process in ranks.items() if number < len(chips)}
    free = [place for place in chips if place not in found]
    later = sorted(number for number in ranks if number >= len(chips))
    return found | {place: ranks[number] for place, number in zip(free, later, strict=False)}


def _agents_of(ranks: list[ProcessId], all_ranks: list[ProcessId], found: Hands) -> list[ProcessId]:
    parents = {rank: read_process(rank.pid) for rank in all_ranks}
    of_others = {
        process.parent for rank, process in parents.items() if process and rank not in ranks
    }
    ours = {process.parent for rank, process in parents.items() if process and rank in ranks}
    return [agent for agent in found.agents.values() if agent.pid in ours - of_others]


def _temperature_c() -> float:
    """Of the hottest sensor of this machine; NaN if it has none."""
    found = []
    for sensor in _THERMAL.glob("thermal_zone*/temp"):
        try:
            found.append(int(sensor.read_text()) / 1000)
        except (OSError, ValueError):
            continue
    return max(found, default=math.nan)
