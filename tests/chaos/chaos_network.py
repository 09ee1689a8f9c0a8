"""Two machines in small: network namespaces `a` and `b` with two cables between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
CABLES = (1, 2)
_PREFIX = "meshwright-"


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
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
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.spaces[machine]}") as space:  # noqa: PTH123 (a descriptor)
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return self.hosts(machine)

    def set_cable(self, cable: int, up: bool) -> None:
        """Plug a cable in or out."""
        _ip("-n", self.spaces[0], "link", "set", f"cable{cable}", "up" if up else "down")

    def free(self, cable: int) -> None:
        """Let all through again."""
        for space in self.spaces:
            command = ["tc", "-n", space, "qdisc", "del", "dev", f"cable{cable}", "root"]
            subprocess.run(command, check=False, capture_output=True, timeout=10)

    def slow_down(self, cable: int, mbit: float) -> None:
        """Let no more than so much through a cable, in either direction."""
        for space in self.spaces:
            words = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "4kb", "latency", "10s"]
            command = ["tc", "-n", space, "qdisc", "replace", "dev", f"cable{cable}", *words]
            subprocess.run(command, check=True, capture_output=True, timeout=10)


@contextmanager
def network() -> Iterator[Network]:
    """The two machines; nothing of them is left afterwards. Skips where they cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    _sweep()
    spaces = f"{_PREFIX}{os.getpid()}-a", f"{_PREFIX}{os.getpid()}-b"
    try:
        try:
            _lay(spaces)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield Network(spaces)
    finally:
        for space in spaces:  # the cables go with their ends
            _ip("netns", "del", space, check=False)


def _sweep() -> None:
    """Remove what a process that was killed has left."""
    for line in _ip("netns", "list", check=False).stdout.splitlines():
        space = line.split()[0]
        pid = space.removeprefix(_PREFIX).partition("-")[0]
        if space.startswith(_PREFIX) and not Path(f"/proc/{pid}").exists():
            _ip("netns", "del", space, check=False)


def _lay(spaces: tuple[str, str]) -> None:
    for space in spaces:
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
    for cable in CABLES:
        end = ("type", "veth", "peer", "name", f"cable{cable}", "netns", spaces[1])
        _ip("-n", spaces[0], "link", "add", f"cable{cable}", *end)
        for machine, space in enumerate(spaces):
            address = f"10.77.{cable}.{machine + 1}/24"
            _ip("-n", space, "address", "add", address, "dev", f"cable{cable}")
            _ip("-n", space, "link", "set", f"cable{cable}", "up")
