"""Nodes that are not on the machine of the conductor, as users name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import InputError
from meshwright.cli.elsewhere import here_again, lease_of, parse_here
from meshwright.conduct.hosts import this_machine
from meshwright.plan.job import Job, resolve_job


def job(**resilience: Any) -> Job:
    return resolve_job(
        {
            "job": {"steps": 1},
            "model": {"preset": "tiny"},
            "data": {"seq_len": 8, "global_batch": 8},
            "layout": {"dp_replicate": 4},
            "cluster": {"ref": "local:4", "nodes": 3},
            "resilience": {"redundancy": "auto", **resilience},
        }
    )


def test_which_nodes_are_here() -> None:
    assert parse_here(job(), None) is None
    assert parse_here(job(), "none") == frozenset()
    assert parse_here(job(), "0, 2") == frozenset({0, 2})


@pytest.mark.parametrize("text", ["3", "0,x", "", "-1", "0-2"])
def test_what_is_no_node(text: str) -> None:
    with pytest.raises(InputError, match=r"cluster.nodes = 3; name some of 0,1,2, or none"):
        parse_here(job(), text)


def test_a_run_that_survives_nothing_has_no_other_machines() -> None:
    with pytest.raises(InputError, match=r"set resilience.redundancy"):
        parse_here(job(redundancy="none"), "0")


def test_who_goes_on_has_the_same_nodes_and_none_on_another_machine(tmp_path: Path) -> None:
    assert here_again(tmp_path) is None
    for here, machine, found in (
        ([0, 1], this_machine(), frozenset({0, 1})),
        ([0, 1], "another", frozenset()),
        (None, "another", None),
    ):
        said = {"here": here, "machine": machine}
        (tmp_path / "conductor.json").write_text(json.dumps(said))
        assert here_again(tmp_path) == found


def test_a_node_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run that survives losses has begun here"):
        lease_of(tmp_path, 0)
