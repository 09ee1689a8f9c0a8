"""All engines by name."""

from __future__ import annotations

from meshwright.control.engines.engine import Engine
from meshwright.control.engines.kubernetes import KubernetesEngine
from meshwright.control.engines.local import LocalProcesses
from meshwright.control.engines.simulated import SimulatedEngine
from meshwright.control.engines.slurm import SlurmEngine


def all_engines(kube_api: str | None = None) -> dict[str, Engine]:
    """Those that a service has; `kubernetes` only where its API server is named."""
    engines: list[Engine] = [LocalProcesses(), SimulatedEngine(), SlurmEngine()]
    if kube_api:
        engines.append(KubernetesEngine(kube_api))
    return {engine.name: engine for engine in engines}
