"""Machines in small with a cable between any two: network namespaces, each with one address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

from chaos_network import enter_space, free_end, ip, slow_end, spaces_of


@dataclass(frozen=True)
class Mesh:
    """`spaces` are the names of the namespaces; machine i has the address `10.78.0.i+1`."""

    spaces: tuple[str, ...]

    @staticmethod
    def host(machine: int) -> str:
        """The address of a machine."""
        return f"10.78.0.{machine + 1}"

    def enter(self, machine: int) -> tuple[str, ...]:
        """Move this process to a machine; its addresses."""
        enter_space(self.spaces[machine])
        return (self.host(machine),)

    def cut(self, a: int, b: int) -> None:
        """Cut the cable of two machines, in both directions."""
        ip("-n", self.spaces[a], "link", "set", f"to{b}", "down")

    def cut_off(self, machine: int, *others: int) -> None:
        """Cut the cables of a machine to each of `others`."""
        for other in others:
            self.cut(machine, other)

    def slow_down(self, a: int, b: int, mbit: float) -> None:
        """Let no more than so much through the cable of two machines, in either direction."""
        slow_end(self.spaces[a], f"to{b}", mbit)
        slow_end(self.spaces[b], f"to{a}", mbit)

    def heal(self) -> None:
        """All cables are whole again, and as fast as they can be."""
        for a, b in combinations(range(len(self.spaces)), 2):
            for here, there in ((a, b), (b, a)):
                free_end(self.spaces[here], f"to{there}")
                ip("-n", self.spaces[here], "link", "set", f"to{there}", "up")
                # A route goes with its cable, so it is laid anew.
                to = ("dev", f"to{there}", "scope", "link", "src", self.host(here))
                ip("-n", self.spaces[here], "route", "replace", f"{self.host(there)}/32", *to)


@contextmanager
def mesh(machines: int) -> Iterator[Mesh]:
    """So many machines; nothing of them is left afterwards. Skips where they cannot be made."""
    with spaces_of(machines, _lay) as spaces:
        yield Mesh(spaces)


def _lay(spaces: Sequence[str]) -> None:
    made = Mesh(tuple(spaces))
    for machine, space in enumerate(spaces):
        ip("-n", space, "address", "add", f"{made.host(machine)}/32", "dev", "lo")
    for a, b in combinations(range(len(spaces)), 2):
        end = ("type", "veth", "peer", "name", f"to{a}", "netns", spaces[b])
        ip("-n", spaces[a], "link", "add", f"to{b}", *end)
    made.heal()
