"""Reports of users of other systems, as tests: numbers of ../shared/cases/fault-tolerance.md.

Cases 3, 8, 12, 14, 21 and 22 are here. 1 and 15 are every run of `test_chaos_random.py`. Others, by
name or in words: 2, 9 and 11 in `test_chaos_members.py`; 4 and 5 in `test_chaos_ways.py`, and of 5
each process of the control plane in `test_chaos_conduct.py`; 6 in `test_conduct_quarantine.py`; 17
and 18 in `test_conduct_simulation.py`; 20 in `test_conduct_surviving.py` (the slow rank) and
`test_conduct_verdicts.py` (the stuck one).
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_orchestra import Orchestra, Said
from test_chaos_members import STEPS, Stage, _fault, stage, tokens  # noqa: F401 (fixtures)

from meshwright.base.events import Kind
from meshwright.checkpoint.packs import PackWriter
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.store import Store
from meshwright.plan.job import resolve_job
from meshwright.train import giving, loop, recovery
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.trainer import Trainer

ALL = os.environ.get("CHAOS") == "all"  # `make chaos`


def few(every: list[Any], count: int) -> list[Any]:
    """All of them in `make chaos`, else some."""
    return every if ALL else every[:: max(1, len(every) // count)]


def test_case_3_every_step_reads_its_batch_whoever_computes_it(
    stage: Any,  # noqa: F811
    own_number: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("twins")
    gradients = Trainer.gradients

    def noted(self: Trainer, batches: Any, stop: bool = False, step: int = 0, save: int = 0) -> Any:
        if self.mesh.layout.world == 1:  # a spare that gets warm
            return gradients(self, batches, stop, step, save)
        digest = hashlib.sha256(batches.numpy().tobytes()).hexdigest()
        with (tmp_path / f"{own_number()}").open("a") as file:
            file.write(f"{step} {self.mesh.dp_index} {digest}\n")
        return gradients(self, batches, stop, step, save)

    monkeypatch.setattr(Trainer, "gradients", noted)
    phases = ("data", "forward", "backward", "reduce", "vote")
    faults = [_fault(i, 3 + i, phase) for i, phase in enumerate(phases)]
    ended, _ = here.play(faults, spares=len(faults))
    assert ended == plain
    lines = {line for file in tmp_path.iterdir() for line in file.read_text().splitlines()}
    places = sorted(tuple(map(int, line.split()[:2])) for line in lines)
    assert places == [(step, part) for step in range(STEPS) for part in range(2)]  # each one way
    assert len({line.split()[2] for line in lines}) == len(lines)  # and no batch twice


SAVE_POINTS = [
    (where, when, victim)
    for where in (Store.write_part, PackWriter.add_last, Store.commit)
    for when in ("before", "after")
    for victim in ((0,) if where is Store.commit else (0, 1, 3, 6))
]


@pytest.mark.parametrize("point", few(SAVE_POINTS, 4), ids=lambda p: f"{p[0].__name__}-{p[1:]}")
def test_case_8_a_loss_at_any_point_of_a_save(
    stage: Any,  # noqa: F811
    point: tuple[Callable[..., Any], str, int],
    own_number: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("twins")
    real, when, victim = point

    def die() -> None:
        if own_number() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def mortal(*args: Any, **more: Any) -> Any:
        if when == "before":
            die()
        found = real(*args, **more)
        if when == "after":
            die()
        return found

    owner = PackWriter if real is PackWriter.add_last else Store
    monkeypatch.setattr(owner, real.__name__, mortal)
    ended, orchestra = here.play(spares=1)
    assert ended == plain  # its checkpoints are read, with their checksums
    assert len(orchestra.takeovers) == 1


def test_case_12_a_slow_transfer_costs_no_step(
    stage: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("fsdp")
    give = recovery.give_state

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        give(*args)

    monkeypatch.setattr(giving, "give_state", slowly)
    begun: list[int] = []

    def note(_: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.EXECUTING and said["epoch"] == 2:
            begun.append(said["step"])

    ended, _ = here.play([_fault(1, 5, "backward")], spares=1, on_said=note)
    assert ended == plain
    assert set(begun) == {4}  # all of them go on with the step in which it was lost


def test_case_14_healing_needs_no_checkpoints_and_one_rank_writes(
    stage: Any,  # noqa: F811
    own_number: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("twins")
    never = {**here.args["job"], "checkpoint": {**here.args["job"]["checkpoint"], "every": 1000}}
    without = replace(here, args={**here.args, "job": never})
    commit = Store.commit

    def noted(store: Store, attempt: Attempt, *args: Any, **more: Any) -> Any:
        done = commit(store, attempt, *args, **more)
        with (tmp_path / "writers").open("a") as file:
            file.write(f"{attempt.step} {own_number()}\n")
        return done

    monkeypatch.setattr(Store, "commit", noted)
    ended, _ = without.play([_fault(0, 5, "reduce"), _fault(3, 7, "vote")], spares=2)
    assert ended.losses == plain.losses
    assert list(ended.checkpoints) == [STEPS]
    assert (tmp_path / "writers").read_text() == f"{STEPS} 8\n"  # who took the first rank


@pytest.mark.parametrize("replicas", few(list(range(2, 10)), 2))
def test_case_21_no_sum_depends_on_who_holds_a_rank(
    stage: Any,  # noqa: F811
    replicas: int,
    tmp_path: Path,
) -> None:
    here, _ = stage("twins")
    tables = {
        **here.args["job"],
        "job": {**here.args["job"]["job"], "steps": replicas + 3, "eval_sequences": replicas},
        "data": {**here.args["job"]["data"], "global_batch": 2 * replicas},
        "layout": {"dp_replicate": replicas, "micro_batch": 2},
        "cluster": {"ref": f"local:{replicas}"},
    }
    job = resolve_job(tables).model_dump(mode="json")
    flat = Stage({**here.args, "job": job}, replicas, tmp_path)
    plain, _ = flat.play(spares=0)
    each = [_fault(rank, 2 + rank, "backward") for rank in range(replicas)]
    ended, orchestra = flat.play(each, spares=replicas)
    assert ended == plain
    assert len(orchestra.takeovers) == replicas


@pytest.mark.parametrize("nth", few(list(range(12)), 4))
def test_case_22_a_loss_between_any_two_messages_of_a_step(
    stage: Any,  # noqa: F811
    nth: int,
    own_number: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("twins")
    send, step = Fabric.send, loop.TrainLoop._step
    sent = {"step": 0, "count": 0}

    def stepping(self: loop.TrainLoop, number: int) -> Any:
        sent["step"] = number
        return step(self, number)

    def counted(self: Fabric, *args: Any) -> None:
        if own_number() == 2 and sent["step"] == 5:
            if sent["count"] == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            sent["count"] += 1
        send(self, *args)

    monkeypatch.setattr(loop.TrainLoop, "_step", stepping)
    monkeypatch.setattr(Fabric, "send", counted)
    ended, orchestra = here.play(spares=1)
    assert ended == plain
    assert [taken.lost for taken in orchestra.takeovers] == [[2]]
