"""Members that die at every moment of a step: the run ends with the bits of one without faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_orchestra import Orchestra, Said

from meshwright.base.events import Kind
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import commits
from meshwright.data.store import write_store
from meshwright.plan.job import resolve_job
from meshwright.train.worker import main

STEPS, SEQ_LEN, BATCH, VOCAB = 10, 32, 16, 64
DENSE = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 48,
    "vocab": VOCAB,
}
EXPERTS = {
    **DENSE,
    "first_dense_layers": 1,
    "n_experts": 8,
    "top_k": 2,
    "expert_ffn_hidden": 16,
    "aux_loss": 1e-2,
    "z_loss": 1e-3,
}
TWINS = {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 8}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "twins": (DENSE, TWINS),
    "fsdp": (DENSE, {"dp_shard": 2, "tp": 2, "pp": 2, "micro_batch": 8}),
    "zero1": (DENSE, {"dp_shard": 2, "zero": 1, "cp": 2, "micro_batch": 8}),
    "zero2": (DENSE, {"dp_shard": 4, "zero": 2, "micro_batch": 4}),
    "experts": (EXPERTS, {"dp_shard": 4, "ep": 4, "micro_batch": 4}),
    "pipelined experts": (EXPERTS, {"tp": 2, "pp": 2, "ep": 2, "micro_batch": 8}),
    "alone": (DENSE, {"micro_batch": 16}),
    "pair": (DENSE, {"dp_replicate": 2, "micro_batch": 8}),
    "machines": (DENSE, {"dp_replicate": 2, "micro_batch": 8}),
}

MORE: dict[str, dict[str, dict[str, Any]]] = {
    "machines": {
        "job": {"steps": 30, "eval_every": 20},
        "cluster": {"nodes": 2, "spares": 2},
        "resilience": {"longest_stall_s": 3.0},
    }
}

Fault = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """What a run left: a hash of each checkpoint, each step's loss, and the evaluations."""

    checkpoints: dict[int, str]
    losses: dict[int, float]
    evaluations: dict[int, float]


@dataclass(frozen=True)
class Stage:
    """Where runs of one layout take place."""

    args: dict[str, Any]
    world: int
    folder: Path

    def play(
        self,
        faults: Sequence[Fault] = (),
        spares: int = 2,
        on_said: Callable[[Orchestra, Said], object] | None = None,
        place: Callable[[int], tuple[str, ...]] = lambda _: (),
    ) -> tuple[Ended, Orchestra]:
        """A run with `faults`."""
        orchestra = self.begin(faults, spares, on_said, place)
        return _ended(orchestra.run(), orchestra.logs / "checkpoints"), orchestra

    def begin(
        self,
        faults: Sequence[Fault] = (),
        spares: int = 2,
        on_said: Callable[[Orchestra, Said], object] | None = None,
        place: Callable[[int], tuple[str, ...]] = lambda _: (),
    ) -> Orchestra:
        """One that has begun, and is still to be run."""
        root = self.folder / str(len(list(self.folder.iterdir())))
        root.mkdir()
        args = {**self.args, "checkpoints": str(root / "checkpoints"), "faults": list(faults)}
        orchestra = Orchestra(main, args, self.world, spares, root, place=place)
        if on_said is not None:
            orchestra.on_said = on_said
        return orchestra


def _ended(said: list[Said], root: Path) -> Ended:
    def values(kind: Kind) -> dict[int, float]:
        found: dict[int, float] = {}
        for one in said:
            if one["kind"] == kind:
                assert found.setdefault(one["step"], one["loss"]) == one["loss"]
        return found

    return Ended(hashes(root), values(Kind.METRICS), values(Kind.EVALUATED))


def hashes(root: Path) -> dict[int, str]:
    """One of all that is in each checkpoint, by its step."""
    found = {}
    for commit in commits(root):
        reader, total = Reader(commit.path), hashlib.sha256()
        for name in sorted(reader.names):
            total.update(name.encode() + reader.read(name).tobytes())
        found[commit.step] = total.hexdigest()
    return found


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a token store."""
    prefix = tmp_path_factory.mktemp("tokens") / "train"
    random = np.random.default_rng(7)
    with write_store(prefix, VOCAB, end_of_text=0) as writer:
        for _ in range(100):
            writer.add(np.cumsum(random.integers(1, 5, size=100)) % (VOCAB - 1) + 1)
            writer.end_document()
    return str(prefix)


@pytest.fixture(scope="module")
def stage(
    tokens: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Stage, Ended]]:
    """A layout's stage, and how its run without faults ends; made at its first use."""
    made: dict[str, tuple[Stage, Ended]] = {}

    def of(name: str) -> tuple[Stage, Ended]:
        if name not in made:
            model, layout = LAYOUTS[name]
            more = MORE.get(name, {key: {} for key in ("job", "cluster", "resilience")})
            job = resolve_job(
                {
                    "job": {"steps": STEPS, "eval_every": 4, "eval_sequences": 8, **more["job"]},
                    "model": model,
                    "data": {"seq_len": SEQ_LEN, "global_batch": BATCH},
                    "layout": layout,
                    "cluster": {"ref": f"local:{_world(layout)}", **more["cluster"]},
                    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
                    "checkpoint": {"every": 5, "keep": 9},
                    "resilience": {"redundancy": "auto", **more["resilience"]},
                }
            )
            args = {
                "job": job.model_dump(mode="json"),
                "train_prefix": tokens,
                "held_out_prefix": tokens,
                "resume_from": None,
                "baselines": {},
                "end_of_text": 0,
            }
            here = Stage(args, job.layout.world, tmp_path_factory.mktemp("runs"))
            made[name] = (here, here.play(spares=0)[0])
        return made[name]

    return of


def _world(layout: dict[str, Any]) -> int:
    sizes = [layout.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")]
    return int(np.prod(sizes))


def _fault(member: int, step: int, phase: str, **more: Any) -> Fault:
    return {"member": member, "step": step, "phase": phase, **more}


@pytest.mark.parametrize(
    "faults",
    [
        [
            _fault(3, 3, "data"),
            _fault(5, 4, "forward"),
            _fault(2, 6, "backward"),
            _fault(1, 7, "reduce"),
        ],
        [
            _fault(7, 3, "vote"),
            _fault(4, 4, "optimizer"),
            _fault(0, 6, "vote"),
            _fault(6, 7, "backward", kind="segfault"),
        ],
        [_fault(6, 5, "checkpoint"), _fault(2, 8, "evaluate"), _fault(0, 9, "optimizer")],
        [_fault(0, 5, "checkpoint"), _fault(1, 8, "evaluate")],
    ],
    ids=["computing", "deciding", "afterwards", "the first rank afterwards"],
)
def test_losses_at_any_moment_cost_no_step_and_no_bit(stage: Any, faults: list[Fault]) -> None:
    here, plain = stage("twins")
    ended, orchestra = here.play(faults, spares=len(faults))
    assert ended == plain
    lost = [[fault["member"]] for fault in faults]
    assert [taken.lost for taken in orchestra.takeovers] == lost


@pytest.mark.parametrize(
    "faults",
    [
        [_fault(1, 6, "forward"), _fault(4, 6, "backward")],
        [_fault(3, 6, "backward"), _fault(5, 6, "takeover")],
        [_fault(3, 6, "backward"), _fault(8, 0, "takeover")],
    ],
    ids=["two of one step", "another during the takeover", "the spare too"],
)
def test_several_losses(stage: Any, faults: list[Fault]) -> None:
    here, plain = stage("twins")
    assert here.play(faults)[0] == plain


@pytest.mark.parametrize("layout", ["fsdp", "zero1", "zero2", "experts", "pipelined experts"])
def test_what_nobody_else_holds_comes_from_the_keeper(stage: Any, layout: str) -> None:
    here, plain = stage(layout)
    faults = [
        _fault(here.world - 1, 3, "backward"),
        _fault(0, 5, "vote"),
        _fault(1, 7, "optimizer"),
        _fault(2, 8, "mirror"),
    ]
    assert here.play(faults, spares=4)[0] == plain


def test_two_who_kept_each_others_state_end_the_run_with_one_line(stage: Any) -> None:
    here, _ = stage("zero2")

    def kill_both(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.PROGRESS and said["step"] == 6 and orchestra.players[1].alive:
            orchestra.kill(1)
            orchestra.kill(3)

    with pytest.raises(AssertionError, match="rank 1 is lost, and with it everybody who kept"):
        here.play(on_said=kill_both)


def test_fewer_replicas_and_more_again(stage: Any) -> None:
    here, plain = stage("twins")

    def with_fewer(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.PROGRESS and said["step"] == 4 and orchestra.epoch == 1:
            orchestra.order({0: 0, 1: 1, 2: 6, 3: 7}, [])
        begun = said["kind"] == Kind.PROGRESS and said.get("epoch") == orchestra.epoch == 2
        if begun and said["step"] == 7:
            orchestra.order(dict(enumerate([0, 1, 2, 3, 6, 7, 4, 5])), [2, 3, 6, 7])

    ended, _ = here.play(spares=0, on_said=with_fewer)
    assert ended.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_fault_that_nobody_sees_is_found_by_comparing(stage: Any) -> None:
    here, _ = stage("twins")
    said: list[Said] = []
    harm = _fault(3, 6, "optimizer", kind="corrupt", element=5)
    here.play([harm], spares=0, on_said=lambda _, one: said.append(one))
    found = [one for one in said if one["kind"] == Kind.CORRUPT]
    assert [(one["rank"], one["step"], one["suspects"]) for one in found] == [(1, 10, [1, 3])]


def test_the_fabric_trains_as_one_process_does(stage: Any) -> None:
    alone, twins = (stage(name)[1] for name in ("alone", "twins"))
    assert twins.losses == pytest.approx(alone.losses, rel=1e-5)
    assert twins.evaluations == pytest.approx(alone.evaluations, rel=1e-5)


@pytest.mark.parametrize("members", [[0], [1, 3]], ids=["the first", "both who keep it"])
def test_what_is_lost_before_the_first_step_is_made_again(stage: Any, members: list[int]) -> None:
    here, plain = stage("zero2")
    faults = [_fault(member, 0, "takeover", times=1) for member in members]
    assert here.play(faults)[0] == plain
