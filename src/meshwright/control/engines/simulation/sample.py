"""The figures and the health of simulated chips at a moment, as an agent on each node would see."""

from __future__ import annotations

import numpy as np

from meshwright.control.engines.engine import ClusterOrder, NodeReport, Sample
from meshwright.control.engines.simulation.dice import Floats, Words, arrivals, leaves, mix, uniform
from meshwright.control.engines.simulation.harm import Harm, Mask
from meshwright.control.engines.simulation.machine import CLOCK_MHZ, LIMIT_C
from meshwright.control.engines.simulation.past import chips_of
from meshwright.control.engines.simulation.world import Epoch, State
from meshwright.control.figures import FIGURE_NAMES
from meshwright.control.words import Health, NodeStatus

PLACE = {name: number for number, name in enumerate(FIGURE_NAMES)}
ECC_DEGRADED_PER_S = 0.05
HOT_C = LIMIT_C - 2.0
_ECC, _LINK = 11, 12  # streams of chance


class Counter:
    """How many events there were of how many were to be expected, for all chips. It keeps what it
    found, as most counters stand still from one second to the next."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._of: Words | None = None
        self._keys = self._leaf = np.zeros(0, np.uint64)
        self._count: Floats = np.zeros(0)

    def read(self, key: Words, expected: Floats) -> Floats:
        """The counts. The same `key` object means the same chips."""
        if self._of is not key:
            self._of, self._keys = key, mix(key, self._stream)
            self._leaf = np.zeros(len(key), np.uint64)
            self._count = np.zeros(len(key))
        leaf = leaves(self._keys, expected)
        moved = np.flatnonzero(leaf != self._leaf)
        if len(moved):
            self._count = self._count.copy()
            self._count[moved] = arrivals(self._keys[moved], leaf[moved])
        self._leaf = leaf
        return self._count


class Sampler:
    """Takes samples of one cluster."""

    def __init__(self) -> None:
        self._ecc, self._link = Counter(_ECC), Counter(_LINK)

    def sample(self, epoch: Epoch, state: State) -> Sample:
        """The sixteen figures of all chips; NaN for chips that do not answer."""
        chips, harm, now = state.machine, epoch.harm, epoch.load
        tick = int(state.at_s)
        flutter = uniform(chips.key, tick) - 0.5  # of what is measured over a second
        found = np.empty((chips.count, len(PLACE)), np.float32)

        def put(name: str, values: Floats) -> None:
            found[:, PLACE[name]] = values

        put("utilization", np.clip(now.busy * (1.0 + 0.02 * flutter), 0.0, 1.0))
        put("tensor_active", np.clip(now.tensor * (1.0 + 0.04 * flutter), 0.0, 1.0))
        put("memory_used_bytes", now.held_bytes)
        put("memory_active", np.clip(now.memory * (1.0 - 0.04 * flutter), 0.0, 1.0))
        put("temperature_c", state.core_c)
        put("memory_temperature_c", state.memory_c)
        put("power_w", np.minimum(now.power_w * (1.0 + 0.01 * flutter), chips.power_w))
        put("clock_mhz", CLOCK_MHZ * now.clock)
        put("throttled", now.throttled.astype(np.float64))
        put("link_sent_bytes_s", now.sent_bytes_s * (1.0 + 0.05 * flutter))
        put("link_received_bytes_s", now.sent_bytes_s * (1.0 - 0.05 * flutter))
        put("link_errors", self._link.read(chips.key, state.link))
        put("ecc_corrected", self._ecc.read(chips.key, state.ecc))
        put("ecc_uncorrected", state.fatal)
        put("errors", np.floor(state.errors))
        put("steps", np.floor(state.steps + 1e-9))
        found[harm.gone | harm.down | harm.hidden] = np.nan
        return found


def reports(
    order: ClusterOrder, epoch: Epoch, state: State, in_use: frozenset[int]
) -> tuple[NodeReport, ...]:
    """What can be seen of each node; `in_use`: nodes that something runs on."""
    chips, harm = state.machine, epoch.harm
    failed = harm.dead
    worse = _degraded(harm, epoch, state)
    links = harm.cut | (harm.link < 1.0)
    odd = failed | worse | links | harm.hidden
    strange = set(np.unique(np.flatnonzero(odd) // chips.per_node).tolist())
    well = _Well(order)
    return tuple(
        _report(order, number, epoch, worse, in_use)
        if number in strange
        else well.report(number, number in in_use)
        for number in range(chips.nodes)
    )


class _Well:
    """Reports on nodes that nothing is wrong with; they share what is the same."""

    def __init__(self, order: ClusterOrder) -> None:
        self._order = order
        self._whole = (Health.HEALTHY,) * order.chips_per_node

    def report(self, number: int, used: bool) -> NodeReport:
        order, whole = self._order, self._whole
        count = chips_of(order, number)
        chips = whole if count == len(whole) else whole[:count]
        return NodeReport(
            number,
            _drained(order, number, used) or NodeStatus.RUNNING,
            Health.HEALTHY,
            chips,
            chips,
            address(number),
            f"sim-{order.spec.software}",
        )


def address(number: int) -> str:
    """Of a node, which nothing listens at."""
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def _drained(order: ClusterOrder, number: int, used: bool) -> NodeStatus | None:
    if number not in order.drained:
        return None
    return NodeStatus.DRAINING if used else NodeStatus.DRAINED


def _degraded(harm: Harm, epoch: Epoch, state: State) -> Mask:
    return (
        (harm.clock < 1.0)
        | (harm.power < 1.0)
        | (harm.ecc_per_s > ECC_DEGRADED_PER_S)
        | epoch.load.throttled
        | (state.core_c > HOT_C)
        | (harm.corrupt & (state.errors >= 1.0))
    )


def _report(
    order: ClusterOrder,
    number: int,
    epoch: Epoch,
    worse: Mask,
    in_use: frozenset[int],
) -> NodeReport:
    machine, harm = epoch.state.machine, epoch.harm
    here = machine.node(number)
    count = here.stop - here.start
    firmware = f"sim-{order.spec.software}"
    if harm.hidden[here].any():
        unknown = (Health.UNKNOWN,) * count
        why = "cannot be reached; what runs there may go on"
        return NodeReport(
            number, NodeStatus.UNKNOWN, Health.UNKNOWN, unknown, unknown, address(number), "", why
        )
    status = _drained(order, number, number in in_use) or NodeStatus.RUNNING
    if harm.down[here].any():
        status = NodeStatus.FAILED
    dead = harm.dead
    chips = tuple(
        Health.FAILED if dead[c] else Health.DEGRADED if worse[c] else Health.HEALTHY
        for c in range(here.start, here.stop)
    )
    links = tuple(
        Health.FAILED
        if dead[c] or harm.cut[c]
        else Health.DEGRADED
        if harm.link[c] < 1.0
        else Health.HEALTHY
        for c in range(here.start, here.stop)
    )
    if all(one is Health.FAILED for one in chips):
        health = Health.FAILED
    else:
        whole = all(one is Health.HEALTHY for one in (*chips, *links))
        health = Health.HEALTHY if whole else Health.DEGRADED
    words = "; ".join(_words(epoch, worse, c, c - here.start) for c in _told(chips, links, here))
    return NodeReport(number, status, health, chips, links, address(number), firmware, words)


def _told(chips: tuple[Health, ...], links: tuple[Health, ...], here: slice) -> list[int]:
    """The chips that something is said of: the first three."""
    odd = [n for n, both in enumerate(zip(chips, links, strict=True)) if set(both) != {_FINE}]
    return [here.start + n for n in odd[:3]]


_FINE = Health.HEALTHY


def _words(epoch: Epoch, worse: Mask, chip: int, place: int) -> str:
    harm = epoch.harm
    for there, words in (
        (harm.down[chip], "no power"),
        (harm.gone[chip], "fell off the bus"),
        (harm.fatal[chip], "uncorrected memory error"),
        (harm.cut[chip], "links are down"),
        (harm.link[chip] < 1.0, "links are slow"),
        (harm.corrupt[chip] and worse[chip], "failed executions"),
        (harm.power[chip] < 1.0, "its power is capped"),
        (harm.clock[chip] < 1.0, "its clock is low"),
        (harm.ecc_per_s[chip] > ECC_DEGRADED_PER_S, "many corrected memory errors"),
    ):
        if there:
            return f"chip {place}: {words}"
    return f"chip {place}: too hot"
