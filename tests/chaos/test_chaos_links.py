"""Networks that are lost or slow under a run: two machines in small, with two cables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chaos_network import Network, network
from chaos_orchestra import Orchestra, Said
from test_chaos_members import Ended, Stage, stage, tokens  # noqa: F401 (fixtures)

from meshwright.base.events import Kind


@pytest.fixture(scope="module")
def cables() -> Iterator[Network]:
    with network() as made:
        yield made


def test_a_lost_path_costs_no_step_and_no_bit(
    stage: Callable[[str], tuple[Stage, Ended]],
    cables: Network,  # noqa: F811
) -> None:
    """The first cable is lost at step 3, and comes back when the second is lost at step 6."""
    here, plain = stage("pair")
    lost: list[int] = []

    def cut(_: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.METRICS and said["step"] in (3, 6) and said["step"] not in lost:
            lost.append(said["step"])
            cables.set_cable(1, up=said["step"] == 6)
            cables.set_cable(2, up=said["step"] == 3)

    ended, orchestra = here.play(spares=0, on_said=cut, place=cables.enter)
    assert lost == [3, 6]
    assert ended == plain
    assert not orchestra.takeovers
    told = _links(orchestra)
    assert {host for one in told for host in one["lost"]} == {*cables.hosts(0), *cables.hosts(1)}
    assert not any(one["cut"] for one in told)


def _links(orchestra: Orchestra) -> list[dict[str, Any]]:
    return [peer for said in orchestra.said if said["kind"] == Kind.LINK for peer in said["peers"]]
