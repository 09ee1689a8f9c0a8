"""The addresses by which other machines reach this one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from meshwright.base.errors import InputError

HOSTS_VARIABLE = "MESHWRIGHT_HOSTS"


def this_machine() -> str:
    """Tells machines, and containers on one, apart: process numbers mean something only within."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def own_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses of this machine, one for each network, in the order in which others try them:
    `MESHWRIGHT_HOSTS=10.0.0.1,10.1.0.1`. None without it: the run stays on this machine.

    They belong to the machine and not to the job, so each agent reads its own. Raises InputError
    for one that this machine does not have.
    """
    hosts = tuple(filter(None, environment.get(HOSTS_VARIABLE, "").replace(",", " ").split()))
    for host in hosts:
        try:
            socket.create_server((host, 0)).close()
        except OSError as error:
            raise InputError(
                f"{HOSTS_VARIABLE} names {host!r}, which is no address of this machine "
                f"({error.strerror}); name what `ip -brief address` shows, or unset it"
            ) from error
    return hosts
