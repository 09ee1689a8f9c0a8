"""Shadows and parities: ranks, spares and keepers die at every moment, and no bit changes.

CHAOS=all tries every layout with every kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import test_chaos_members as scene
from chaos_orchestra import Orchestra, Said
from test_chaos_members import stage, tokens  # noqa: F401 (fixtures)

from meshwright.base.events import Kind
from meshwright.train import rebuild, shadow

scene.LAYOUTS.update(
    {
        "zero3": (scene.DENSE, {"dp_shard": 4, "zero": 3, "micro_batch": 4}),
        "fp16": (scene.DENSE, {"dp_shard": 4, "zero": 3, "precision": "fp16", "micro_batch": 4}),
        "tensor": (scene.DENSE, {"tp": 2, "pp": 2, "micro_batch": 8}),
    }
)
DEEP = os.environ.get("CHAOS") == "all"
deep = pytest.mark.skipif(not DEEP, reason="make chaos")
ALL = ["zero1", "zero2", "zero3", "fp16", "tensor", "experts", "pipelined experts", "fsdp"]
BY_DEFAULT = ["shadow fp16", "parity zero3"]
EVERY = [f"{kind} {layout}" for kind in ("shadow", "parity") for layout in ALL]


def _fault(member: int, step: int, phase: str, times: int = 1) -> dict[str, Any]:
    return {"member": member, "step": step, "phase": phase, "times": times}


@pytest.mark.parametrize("name", EVERY if DEEP else BY_DEFAULT)
def test_a_loss_at_every_moment_of_a_step(stage: Any, name: str) -> None:  # noqa: F811
    here, plain = stage(name)
    last = here.world - 1
    faults = [
        _fault(0, 3, "forward"),
        _fault(last, 4, "backward"),
        _fault(1, 5, "reduce"),
        _fault(2, 6, "mirror"),
        _fault(here.world, 7, "vote"),  # who took rank 0
        _fault(here.world + 1, 8, "optimizer"),
        _fault(here.world + 2, 9, "optimizer", times=2),  # in its middle, with parity
    ]
    ended, orchestra = here.play(faults, spares=8)
    assert ended == plain
    assert len(orchestra.takeovers) >= 6  # not all get as far as their second flat group
    if name.startswith("shadow"):
        assert all(taken.by_shadow == taken.lost for taken in orchestra.takeovers)


@deep
def test_every_kind_trains_the_same(stage: Any) -> None:  # noqa: F811
    assert stage("shadow fp16")[1] == stage("fp16")[1]
    assert stage("parity zero3")[1] == stage("zero3")[1]


@deep
def test_one_spare_shadows_all_and_then_the_ranks_keep_each_others_state(stage: Any) -> None:  # noqa: F811
    here, plain = stage("shadow fp16")
    faults = [_fault(1, 4, "vote"), _fault(2, 7, "optimizer")]

    def another(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.PROGRESS and said["step"] == 6 and len(orchestra.players) == 5:
            assert not orchestra.shadows
            orchestra.launch(5)

    ended, orchestra = here.play(faults, spares=1, on_said=another)
    assert ended == plain
    assert orchestra.takeovers[0].by_shadow == [1]


def _kill_at(step: int, members: list[int]) -> Callable[[Orchestra, Said], None]:
    left = list(members)

    def kill(orchestra: Orchestra, said: Said) -> None:
        while left and said["kind"] == Kind.PROGRESS and said["step"] == step:
            orchestra.kill(left.pop())

    return kill


@deep
def test_two_ranks_of_one_shadow_at_once(stage: Any) -> None:  # noqa: F811
    """It takes one, and gives the other's state to the next spare."""
    here, plain = stage("shadow fp16")
    assert here.play(spares=2, on_said=_kill_at(6, [0, 2]))[0] == plain


@pytest.mark.parametrize("phase", ["mirror", pytest.param("optimizer", marks=deep)])
def test_a_shadow_that_dies_is_replaced(stage: Any, phase: str) -> None:  # noqa: F811
    here, plain = stage("shadow fp16")
    faults = [_fault(4, 4, phase), _fault(0, 7, "vote")]
    ended, orchestra = here.play(faults, spares=3)
    assert ended == plain
    assert [taken.by_shadow for taken in orchestra.takeovers] == [[0]]


@deep
def test_one_process_and_its_shadow(stage: Any) -> None:  # noqa: F811
    here, plain = stage("shadow alone")
    ended, _ = here.play([_fault(0, 4, "vote"), _fault(1, 7, "optimizer")], spares=2)
    assert ended == plain


@pytest.mark.parametrize(
    ("name", "members"),
    [("shadow fp16", [1, 5]), ("parity zero3", [0, 1]), ("parity zero3", [0, 3])],
    ids=["a rank and its shadow", "two of a parity", "one and the keeper"],
)
def test_what_nobody_has_any_more_ends_the_run_with_one_line(
    stage: Any,  # noqa: F811
    name: str,
    members: list[int],
) -> None:
    here, _ = stage(name)
    with pytest.raises(AssertionError, match=r"rank \d is lost, and with it everybody who kept"):
        here.play(spares=4, on_said=_kill_at(6, members))


def test_a_keeper_of_a_parity_dies(stage: Any) -> None:  # noqa: F811
    here, plain = stage("parity zero3")
    faults = [_fault(3, 4, "optimizer"), _fault(0, 6, "backward"), _fault(4, 6, "takeover", 2)]
    assert here.play(faults, spares=4)[0] == plain


@deep
def test_a_shadow_that_differs_is_found_and_gets_the_state_anew(stage: Any) -> None:  # noqa: F811
    here, plain = stage("shadow fp16")
    harm = {**_fault(4, 6, "mirror"), "kind": "corrupt", "element": 5}
    said: list[Said] = []
    ended, _ = here.play([harm], spares=1, on_said=lambda _, one: said.append(one))
    assert ended == plain
    found = [(one["rank"], one["step"]) for one in said if one["kind"] == Kind.CORRUPT]
    assert found == [(0, 9)]


@deep
@pytest.mark.parametrize("kind", ["shadow", "parity"])
def test_fewer_replicas_and_a_loss_of_one_of_them(stage: Any, kind: str) -> None:  # noqa: F811
    here, plain = stage(f"{kind} twins")

    def with_fewer(orchestra: Orchestra, said: Said) -> None:
        begun = said["kind"] == Kind.PROGRESS and said["step"] == 4
        if begun and len(orchestra.members) == 8:
            orchestra.order({0: 0, 1: 1, 2: 6, 3: 7}, [])

    ended, _ = here.play([_fault(6, 7, "optimizer")], spares=2, on_said=with_fewer)
    assert ended.losses == pytest.approx(plain.losses, rel=1e-5)


OTHER = "the state that it took over is not that of the rank that was lost"


def _accusations(said: list[Said]) -> list[tuple[list[int], str]]:
    return [(one["members"], one["what"]) for one in said if one["kind"] == Kind.CORRUPT]


def test_a_shadow_that_errs_is_found_out_before_the_first_vote_after_it_takes_over(
    stage: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, _ = stage("shadow fp16")
    fill = shadow.Held.fill

    def badly(self: shadow.Held, trainer: Any) -> None:
        fill(self, trainer)
        trainer.data.groups[0].master[3] += 1e-3

    monkeypatch.setattr(shadow.Held, "fill", badly)
    said: list[Said] = []
    with pytest.raises(AssertionError, match="rank 0 is lost, and with it everybody who kept"):
        here.play([_fault(0, 6, "backward")], on_said=lambda _, one: said.append(one))
    assert [what for members, what in _accusations(said) if members] == [OTHER]
    assert max(one["step"] for one in said if one["kind"] == Kind.METRICS) == 5


@pytest.mark.parametrize("phase", ["forward", "vote"])
def test_a_state_that_is_rebuilt_otherwise_is_not_gone_on_with(
    stage: Any,  # noqa: F811
    phase: str,
    own_number: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("parity zero3")
    finish = rebuild._finish

    def badly(trainer: Any, *args: Any) -> None:
        if own_number() == here.world:
            trainer.data.groups[0].master[3] += 1e-3
        finish(trainer, *args)

    monkeypatch.setattr(rebuild, "_finish", badly)
    said: list[Said] = []
    ended, _ = here.play([_fault(1, 6, phase)], on_said=lambda _, one: said.append(one))
    assert ended == plain
    assert _accusations(said) == [([here.world], OTHER)]


def test_a_shadow_that_always_differs_is_given_up(
    stage: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("shadow fp16")
    monkeypatch.setattr(shadow.Held, "checksum", property(lambda _: 0))
    said: list[Said] = []
    ended, _ = here.play(spares=1, on_said=lambda _, one: said.append(one))
    assert ended == plain
    given_up = [members for members, _ in _accusations(said) if members]
    assert given_up and given_up[0] == [4]
    assert len(_accusations(said)) <= 3 * here.world
