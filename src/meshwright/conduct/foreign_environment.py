"""The variables by which a script learns its rank: those of torchrun, of JAX, and a few of ours.

Sources: torch 2.13 `torch/distributed/elastic/agent/server/local_elastic_agent.py`; jax 0.10
`jax/_src/distributed.py` and `jax/_src/clusters/ompi_cluster.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_HOST = "127.0.0.1"
# What jax.distributed.initialize() without arguments takes for a start by Open MPI.
_OPEN_MPI_SIGN = "OMPI_MCA_orte_hnp_uri"


class Ports:
    """Two free TCP ports, kept for one incarnation: bound, not listening, and not given to anyone
    who asks for any free port; a rank that binds with SO_REUSEADDR, as torch and gRPC do, may."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self._sockets = [stack.enter_context(_reserve()) for _ in range(2)]
            self._stack = stack.pop_all()
        self.master, self.coordinator = (held.getsockname()[1] for held in self._sockets)

    def close(self) -> None:
        """Let go of them."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((_HOST, 0))
    return held


@dataclass(frozen=True)
class Shared:
    """What all ranks of one incarnation have in common."""

    world: int
    master_port: int
    coordinator_port: int
    restarts: int
    max_restarts: int
    run_id: str
    run_dir: Path
    jax: bool


def defaults(given: Mapping[str, str], world: int) -> dict[str, str]:
    """What is set for every process, spares too, unless the user has set it."""
    chosen = {
        "PYTHONUNBUFFERED": "1",  # a killed rank leaves what it printed
        "PYTHONFAULTHANDLER": "1",  # and a hung one its stack, on SIGABRT
        "GLOO_SOCKET_IFNAME": "lo",  # ranks of one machine, whatever its name resolves to
    }
    if world > 1:
        chosen["OMP_NUM_THREADS"] = "1"
    return {key: value for key, value in chosen.items() if key not in given}


def of_rank(shared: Shared, rank: int, progress: Path) -> dict[str, str]:
    """What rank `rank` is told."""
    world, coordinator = str(shared.world), f"{_HOST}:{shared.coordinator_port}"
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(shared.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(shared.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(shared.max_restarts),
        "TORCHELASTIC_RUN_ID": shared.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": world,
        "JAX_PROCESS_COUNT": world,
        "JAX_PROCESS_ID": str(rank),
        "JAX_PROCESS_INDEX": str(rank),
        "MESHWRIGHT_PROGRESS": str(progress),
        "MESHWRIGHT_RUN": str(shared.run_dir),
        "MESHWRIGHT_RESTARTS": str(shared.restarts),
    }
    if shared.jax:
        told |= {
            _OPEN_MPI_SIGN: f"0.0;tcp://{_HOST}:{shared.coordinator_port}",
            "OMPI_COMM_WORLD_SIZE": world,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        }
    return told
