"""Two machines in small: network namespaces `a` and `b` with two cables between them."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
CABLES = (1, 2)
_PREFIX = "meshwright-"


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `ip`, for ten seconds at most."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=10)


@dataclass(frozen=True)
class Network:
    """`spaces` are the names of the namespaces; machine i has address `10.77.CABLE.i+1`."""

    spaces: tuple[str, str]

    def hosts(self, machine: int) -> tuple[str, ...]:
        """The addresses of a machine."""
        return tuple(f"10.77.{cable}.{machine + 1}" for cable in CABLES)

    def enter(self, machine: int) -> tuple[str, ...]:
        """Move this process to a machine; its addresses."""
        enter_space(self.spaces[machine])
        return self.hosts(machine)

    def set_cable(self, cable: int, up: bool) -> None:
        """Plug a cable in or out."""
        ip("-n", self.spaces[0], "link", "set", f"cable{cable}", "up" if up else "down")

    def free(self, cable: int) -> None:
        """Let all through again."""
        for space in self.spaces:
            free_end(space, f"cable{cable}")

    def slow_down(self, cable: int, mbit: float) -> None:
        """Let no more than so much through a cable, in either direction."""
        for space in self.spaces:
            slow_end(space, f"cable{cable}", mbit)


def enter_space(name: str) -> None:
    """Move this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as space:  # noqa: PTH123 (a descriptor)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def slow_end(space: str, device: str, mbit: float) -> None:
    """Let no more than so much out of one end of a cable."""
    words = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "4kb", "latency", "10s"]
    command = ["tc", "-n", space, "qdisc", "replace", "dev", device, *words]
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def free_end(space: str, device: str) -> None:
    """Let all out again."""
    command = ["tc", "-n", space, "qdisc", "del", "dev", device, "root"]
    subprocess.run(command, check=False, capture_output=True, timeout=10)


@contextmanager
def spaces_of(machines: int, lay: Callable[[Sequence[str]], None]) -> Iterator[tuple[str, ...]]:
    """As many namespaces, and the cables that `lay` makes; all are gone afterwards.

    Skips where they cannot be made.
    """
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    _sweep()
    spaces = tuple(f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}" for _ in range(machines))
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            lay(spaces)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield spaces
    finally:
        for space in spaces:
            ip("netns", "del", space, check=False)


@contextmanager
def network() -> Iterator[Network]:
    """The two machines. Skips where they cannot be made."""
    with spaces_of(2, _lay) as (first, second):
        yield Network((first, second))


def _sweep() -> None:
    """Remove what a process that was killed has left."""
    for line in ip("netns", "list", check=False).stdout.splitlines():
        space = line.split()[0]
        pid = space.removeprefix(_PREFIX).partition("-")[0]
        if space.startswith(_PREFIX) and not Path(f"/proc/{pid}").exists():
            ip("netns", "del", space, check=False)


def _lay(spaces: Sequence[str]) -> None:
    for cable in CABLES:
        end = ("type", "veth", "peer", "name", f"cable{cable}", "netns", spaces[1])
        ip("-n", spaces[0], "link", "add", f"cable{cable}", *end)
        for machine, space in enumerate(spaces):
            address = f"10.77.{cable}.{machine + 1}/24"
            ip("-n", space, "address", "add", address, "dev", f"cable{cable}")
            ip("-n", space, "link", "set", f"cable{cable}", "up")
