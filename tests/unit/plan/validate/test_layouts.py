"""How published rows say that weights are sharded."""

from __future__ import annotations

import pytest

from meshwright.plan.validate.layouts import _data_axes


@pytest.mark.parametrize(
    "sharding, replicas, shards",
    [
        ("fsdp2", 1, 32),  # the second FSDP of PyTorch, over all ranks
        ("fsdp2 degree 4", 8, 4),
        ("fsdp 2", 16, 2),
        ("fsdp group 2", 16, 2),
        ("fsdp16 x ep16 per pod", 2, 16),
        ("fsdp256", 1, 32),
        ("hsdp", 4, 8),
        ("zero-1 shard group 8", 4, 8),
    ],
)
def test_a_size_is_a_size_and_a_name_is_a_name(sharding: str, replicas: int, shards: int) -> None:
    assert _data_axes({}, 32, sharding)[:2] == (replicas, shards)
