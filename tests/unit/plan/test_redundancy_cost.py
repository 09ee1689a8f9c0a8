"""What each kind of redundancy takes, and which one "auto" takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.catalog import cluster
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.redundancy_cost import Price, cheapest, prices, state_of

MODEL = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48}


def _job(world: int = 4, **layout: Any) -> Job:
    return resolve_job(
        {
            "job": {"steps": 10},
            "model": {**MODEL, "vocab": 64},
            "data": {"seq_len": 32, "global_batch": 16},
            "layout": {"micro_batch": 4, **layout},
            "cluster": {"ref": f"local:{world}", "spares": 4},
            "resilience": {"redundancy": "auto"},
        }
    )


def _prices(job: Job, nodes: list[int], spares: list[int]) -> dict[str, Price]:
    found = prices(job, cluster(job.cluster.ref), nodes, spares)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    return {one.kind: one for one in found}


def test_bytes_follow_from_what_a_rank_holds() -> None:
    job = _job(dp_shard=4)
    found, [held, *_] = _prices(job, [0] * 4, [0] * 4), state_of(job).masters
    assert "twin" not in found
    assert found["mirror"].host_bytes == 16 * held and found["mirror"].wire_bytes == 4 * held
    assert found["shadow"].host_bytes == 16 * held
    assert found["parity"].wire_bytes == 16 * held
    assert found["parity"].host_total_bytes == found["mirror"].host_total_bytes / 2
    assert {one.survives for one in found.values()} == {"a rank"}


def test_few_spares_shadow_many() -> None:
    job = _job(dp_shard=4)
    one, four = (_prices(job, [0] * 4, [0] * n)["shadow"] for n in (1, 4))
    assert one.host_bytes == 4 * four.host_bytes and one.seconds > four.seconds


def test_whoever_is_on_another_node_survives_with_it() -> None:
    found = _prices(_job(dp_shard=4), [0, 0, 1, 1], [1])
    assert found["mirror"].survives == "a node"
    assert found["shadow"].survives == "a rank"  # that of node 1 would go with its shadow
    assert "parity" not in found  # of two nodes one has a rank of every pair
    assert _prices(_job(dp_shard=4), [0, 1, 2, 0], [0])["parity"].survives == "a node"


def test_auto_takes_the_cheapest_that_survives_a_node() -> None:
    def made(kind: str, seconds: float, survives: Any, host: float = 1.0) -> Price:
        return Price(kind, survives, host, host, 0.0, seconds)

    found = [made("shadow", 1.0, "a rank"), made("mirror", 2.0, "a node")]
    assert cheapest(found, nodes=1, room_bytes=10.0) == found[0]
    assert cheapest(found, nodes=2, room_bytes=10.0) == found[1]
    large = replace(found[0], host_bytes=11.0)
    assert cheapest([large, found[1]], nodes=1, room_bytes=10.0) == found[1]
    assert cheapest([large], nodes=1, room_bytes=10.0) == large
    assert cheapest([], nodes=1, room_bytes=10.0) is None


@pytest.mark.parametrize("layout", [{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}])
def test_twins_cost_nothing(layout: dict[str, int]) -> None:
    found = _prices(_job(**layout), [0] * 4, [0])
    assert found["twin"].seconds == found["twin"].host_bytes == 0
