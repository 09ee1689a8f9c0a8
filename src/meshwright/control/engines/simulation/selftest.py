"""The self-test of simulated chips: what each of them reaches under full load, and what is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from meshwright.base.errors import RunError
from meshwright.control.engines.engine import ClusterOrder, DeployStep
from meshwright.control.engines.simulation.dice import Floats, uniform
from meshwright.control.engines.simulation.harm import Harm, Mask
from meshwright.control.engines.simulation.heat import SLOWEST
from meshwright.control.engines.simulation.machine import LIMIT_C, Machine
from meshwright.control.engines.simulation.sample import ECC_DEGRADED_PER_S

REACHED = 0.92  # of its peak by a good chip, and of the rates of its memory and links
ENOUGH = 0.93  # of the median, below which a chip has failed
_SPREAD = 8  # chips that are named


class SelfTest:
    """Of the chips `which` as they are now."""

    def __init__(self, machine: Machine, harm: Harm, which: slice) -> None:
        self._machine, self._harm, self._which = machine, harm, which
        self._clock = _full_load_clock(machine, harm)

    def present(self) -> None:
        """Raise RunError for chips that are not there."""
        per_node, harm = self._machine.per_node, self._harm
        hidden = np.flatnonzero(harm.hidden[self._which]) + (self._which.start or 0)
        if len(hidden):
            raise RunError(f"node {hidden[0] // per_node} cannot be reached; check its network")
        self._refuse(harm.down, "has no power")
        self._refuse(harm.gone, "does not answer")

    def compute(self) -> Mapping[str, float]:
        """bf16 TFLOP/s, and that its results are right."""
        peak = self._peak("bf16")
        self._refuse(self._harm.corrupt, "computes wrong numbers")
        return self._measured("compute_tflops", peak / 1e12 * self._machine.speed * self._clock)

    def memory(self) -> Mapping[str, float]:
        """TB/s, and that what was written is read."""
        self._refuse(self._harm.fatal, "has uncorrected memory errors")
        self._refuse(self._harm.ecc_per_s > ECC_DEGRADED_PER_S, "has too many memory errors")
        rate = self._machine.chip.memory_bandwidth_bytes_s / 1e12
        return self._measured("memory_tb_s", rate * (0.99 + 0.02 * uniform(self._machine.key, 6)))

    def bandwidth(self) -> Mapping[str, float]:
        """GB/s over the links of a chip within its domain, and out of it."""
        machine, harm = self._machine, self._harm
        self._refuse(harm.cut, "has links that are down")
        even = 0.99 + 0.02 * uniform(machine.key, 8)
        inner = self._measured("link_gb_s", machine.link_bytes_s / 1e9 * even * harm.link)
        return {**inner, "outer_gb_s": REACHED * machine.outer_bytes_s / 1e9}

    def fp8(self) -> Mapping[str, float]:
        """FP8 TFLOP/s, for chips that have it."""
        if "fp8" not in self._machine.chip.peak_flops:
            return {}
        peak = self._peak("fp8")
        return self._measured("fp8_tflops", peak / 1e12 * self._machine.speed * self._clock)

    def _peak(self, precision: str) -> float:
        peaks = self._machine.chip.peak_flops
        return peaks.get(precision) or max(peaks.values())

    def _measured(self, name: str, nominal: Floats) -> Mapping[str, float]:
        found = REACHED * nominal[self._which]
        limit = ENOUGH * REACHED * float(np.median(nominal / self._clock_share()))
        slow = np.zeros(self._machine.count, bool)
        slow[self._which] = found < limit
        self._refuse(slow, f"reaches less than {limit:.4g} {name}")
        return {f"{name}_min": float(found.min()), f"{name}_median": float(np.median(found))}

    def _clock_share(self) -> Floats:
        """What faults take: the median that chips are held to is that of sound ones."""
        return np.maximum(self._clock * self._harm.link, 1e-3)

    def _refuse(self, bad: Mask, words: str) -> None:
        found = np.flatnonzero(bad[self._which]) + (self._which.start or 0)
        if len(found):
            names = [f"node {c // self._machine.per_node} chip {c % self._machine.per_node}"
                     for c in found[:_SPREAD].tolist()]  # fmt: skip
            more = f" and {len(found) - _SPREAD} more" if len(found) > _SPREAD else ""
            each = "each " if len(found) > 1 else ""
            raise RunError(f"self-test: {', '.join(names)}{more} {each}{words}; replace the node")


def _full_load_clock(machine: Machine, harm: Harm) -> Floats:
    """The clock that heat and caps of power leave under full load."""
    ambient_c = machine.ambient_c + harm.heat_c
    most_w = np.minimum((LIMIT_C - ambient_c) / machine.rise_c_w, harm.power * machine.power_w)
    held = np.sqrt(np.maximum(most_w - machine.idle_w, 0.0) / machine.busy_w)
    return np.clip(np.minimum(harm.clock, held), SLOWEST, 1.0)


def deploy_steps(order: ClusterOrder, test: SelfTest, seed: int) -> Iterator[DeployStep]:
    """All that is done until a cluster is ready. Raises RunError if its chips do not pass."""
    spec, chips = order.spec, order.chips
    yield DeployStep(
        "initialise", f"{chips} chips answer on {-(-chips // order.chips_per_node)} nodes", 0.1
    )
    test.present()
    yield DeployStep("wire", f"{spec.network.topology} of {spec.instance}", 0.2)
    storage, sealed = spec.storage, "AES-256" if spec.encryption.enabled else "no encryption"
    words = f"{storage.nodes} storage nodes, {storage.capacity_tb:g} TB, {sealed}"
    yield DeployStep("mount", words, 0.3, {"storage_gb_s": storage.bandwidth_gb_s})
    yield from tested(test, 0.3, 0.85)
    yield drill(seed)
    yield DeployStep("ready", f"{spec.name} is ready", 1.0, {"chips": float(chips)})


def tested(test: SelfTest, begin: float, end: float) -> Iterator[DeployStep]:
    """The four measurements, as progress goes from `begin` to `end`."""
    parts = (
        ("compute", test.compute),
        ("memory", test.memory),
        ("bandwidth", test.bandwidth),
        ("fp8", test.fp8),
    )
    for number, (phase, measure) in enumerate(parts, 1):
        figures = measure()
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        along = begin + (end - begin) * number / len(parts)
        yield DeployStep(phase, told or "these chips have none", along, figures)


def drill(seed: int) -> DeployStep:
    """A rank is killed and taken over."""
    detected_s, more_s = (0.02 + 0.2 * float(uniform(seed, stream)[0]) for stream in (21, 22))
    figures = {"detected_s": detected_s, "takeover_s": detected_s + more_s, "lost_steps": 0.0}
    line = f"a rank was killed, detected after {detected_s:.3f} s, taken over after "
    return DeployStep("drill", f"{line}{detected_s + more_s:.3f} s", 0.95, figures)
