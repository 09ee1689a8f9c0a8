"""Measured beside predicted."""

from __future__ import annotations

from typing import Any

from meshwright.watch.redundancy import redundancy, redundancy_words

PREDICTED = {
    "kind": "mirror",
    "survives": "a rank",
    "host_bytes": 2e6,
    "wire_bytes": 1e6,
    "seconds": 2e-3,
}
STARTED: dict[str, Any] = {"kind": "run_started", "redundancy": PREDICTED}


def _report(rank: int, held: int, seconds: float) -> dict[str, Any]:
    fields = {"kind_of": "mirror", "bytes": held, "seconds": seconds, "wire_bytes": held // 2}
    return {"kind": "redundancy", "rank": rank, **fields}


def test_the_heaviest_and_the_slowest_count_and_only_of_this_incarnation() -> None:
    old = [STARTED, _report(0, 99, 9.0)]
    new = [STARTED, _report(0, 4, 1e-3), _report(0, 4, 3e-3), _report(1, 8, 1e-3)]
    found = redundancy([*old, *new, _report(-1, 16, 5.0)])
    assert found is not None
    measured = found["measured"]
    assert (measured["host_bytes"], measured["wire_bytes"]) == (16, 4)
    assert measured["seconds"] == 2e-3


def test_a_run_that_nobody_keeps_has_none_and_one_that_has_not_reported_says_so() -> None:
    assert redundancy([{"kind": "run_started"}]) is None
    found = redundancy([STARTED])
    assert found is not None and found["measured"] is None
    assert "MB held: -, predicted 2" in redundancy_words(found)
