"""Members that die at every moment of a step: the run ends with the bits of one without faults."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_orchestra import Orchestra, Said

from meshwright.base.events import Kind
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.store import Store
from meshwright.data.store import write_store
from meshwright.plan.job import resolve_job
from meshwright.plan.layout import Layout
from meshwright.plan.resilience import blocks
from meshwright.train import loop
from meshwright.train.batches import step_batches
from meshwright.train.parallel.pipeline import Pipeline
from meshwright.train.trainer import Trainer
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
    "hsdp": (DENSE, {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 4}),
    "zero2": (DENSE, {"dp_shard": 4, "zero": 2, "micro_batch": 4}),
    "experts": (EXPERTS, {"dp_shard": 4, "ep": 4, "micro_batch": 4}),
    "pipelined experts": (EXPERTS, {"tp": 2, "pp": 2, "ep": 2, "micro_batch": 8}),
    "four": (DENSE, {"dp_replicate": 4, "micro_batch": 4}),
    "two": (DENSE, {"dp_replicate": 2, "micro_batch": 8}),
    "alone": (DENSE, {"micro_batch": 16}),
    "pair": (DENSE, {"dp_replicate": 2, "micro_batch": 8}),
    "machines": (DENSE, {"dp_replicate": 2, "micro_batch": 8}),
    "three machines": (DENSE, {"dp_replicate": 3, "micro_batch": 4}),
}

MORE: dict[str, dict[str, dict[str, Any]]] = {
    "machines": {
        "job": {"steps": 30, "eval_every": 20},
        "cluster": {"nodes": 2, "spares": 2},
        "resilience": {"longest_stall_s": 3.0},
    },
    "three machines": {
        "job": {"steps": 40, "eval_every": 30},
        "data": {"global_batch": 12},
        "cluster": {"nodes": 3, "spares": 1},
        "resilience": {"longest_stall_s": 3.0},
    },
}
KINDS = {"shadow", "parity"}  # "KIND LAYOUT" is that layout with another kind than "auto"

Fault = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Ended:
    """What a run left: a hash of each checkpoint, each step's loss, and the evaluations.

    Equal runs have equal ones of the last step. One before it may lack in either, if who wrote a
    part of it was lost meanwhile.
    """

    checkpoints: dict[int, str]
    losses: dict[int, float]
    evaluations: dict[int, float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ended):
            return NotImplemented
        learnt = (self.losses, self.evaluations) == (other.losses, other.evaluations)
        return learnt and agree(self.checkpoints, other.checkpoints)


def agree(ours: Mapping[int, str], theirs: Mapping[int, str]) -> bool:
    """Whether checkpoints of the last step are there and equal, and so are all that both have."""
    both = ours.keys() & theirs.keys()
    return max(ours) == max(theirs) and all(ours[step] == theirs[step] for step in both)


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
        args = {**self.args, **kept_at(root / "checkpoints"), "faults": list(faults)}
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


def kept_at(root: Path) -> dict[str, Any]:
    """Of the arguments of a worker those that say where its checkpoints go; the store is made."""
    at = StoreAt(str(root))
    at.open(create=True)
    return {"checkpoints": asdict(at), "attempt": "chaos"}


def hashes(root: Path) -> dict[int, str]:
    """One of all that is in each checkpoint, by its step."""
    found = {}
    store = Store.open(root)
    for commit in store.commits():
        reader, total = store.reader(commit), hashlib.sha256()
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
            first, _, rest = name.partition(" ")
            kind, key = (first, rest) if first in KINDS else ("auto", name)
            model, layout = LAYOUTS[key]
            more = MORE.get(name, {key: {} for key in ("job", "cluster", "resilience")})
            job = resolve_job(
                {
                    "job": {"steps": STEPS, "eval_every": 4, "eval_sequences": 8, **more["job"]},
                    "model": model,
                    "data": {"seq_len": SEQ_LEN, "global_batch": BATCH, **more.get("data", {})},
                    "layout": layout,
                    "cluster": {
                        "ref": f"local:{_world(layout)}",
                        "spares": 1,
                        **more["cluster"],
                    },
                    "optimizer": more.get("optimizer", {"lr": 1e-2, "warmup_steps": 2}),
                    "checkpoint": {"every": 5, "keep": 9},
                    "resilience": {"redundancy": kind, **more["resilience"]},
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


@pytest.mark.parametrize(
    "layout", ["fsdp", "zero1", "zero2", "hsdp", "experts", "pipelined experts"]
)
def test_what_nobody_else_holds_comes_from_the_keeper(stage: Any, layout: str) -> None:
    here, plain = stage(layout)
    faults = [
        _fault(here.world - 1, 3, "backward"),
        _fault(0, 5, "vote"),
        _fault(1, 7, "optimizer"),
        _fault(2, 8, "mirror"),
    ]
    assert here.play(faults, spares=4)[0] == plain


def test_batches_read_ahead_are_neither_lost_nor_taken_twice(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, plain = stage("zero2")
    right = step_batches

    def slowly(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            (tmp_path / "ahead").touch()
        time.sleep(0.02)
        return right(*args)

    monkeypatch.setattr(loop, "step_batches", slowly)
    faults = [_fault(3, 7, "backward"), _fault(1, 8, "data"), _fault(0, 9, "vote")]
    assert here.play(faults, spares=3)[0] == plain
    assert (tmp_path / "ahead").exists()


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


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ({"dp_shard": 2, "zero": 3, "tp": 2, "cp": 2, "micro_batch": 8}, []),
        ({"pp": 2, "micro_batch": 8}, []),
        ({"dp_replicate": 2, "dp_shard": 2, "pp": 2, "micro_batch": 4}, [(5, 7, "forward")]),
    ],
    ids=["all of them", "fewer", "and a loss afterwards"],
)
def test_another_layout_in_the_midst_of_a_run(
    stage: Any, layout: dict[str, Any], faults: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    here, plain = stage("twins")
    wanted = Layout.model_validate(layout)
    saving = {"folder": str(tmp_path), "saving": True}
    held: list[int] = []

    def change(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.PROGRESS and said["step"] == 4 and orchestra.epoch == 1:
            orchestra.order(orchestra.members, [], through=saving)
        if said["kind"] == Kind.HELD:
            held.append(said["step"])
        if len(held) == here.world and orchestra.epoch == 2:
            step, through = held[0], wanted.model_dump(mode="json")
            orchestra.through = {**saving, "saving": False, "step": step, "layout": through}
            orchestra.order({rank: 7 - rank for rank in range(wanted.world)}, [])

    ended, orchestra = here.play([_fault(*f) for f in faults], len(faults), on_said=change)
    assert orchestra.epoch == 3 + len(faults) and len(set(held)) == 1
    assert ended.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ended.evaluations == pytest.approx(plain.evaluations, rel=1e-5)


@pytest.mark.parametrize("at", [5, STEPS])
def test_what_is_due_is_done_before_the_layout_changes(stage: Any, tmp_path: Path, at: int) -> None:
    here, plain = stage("twins")
    saving = {"folder": str(tmp_path), "saving": True}
    held: list[int] = []

    def change(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.METRICS and said["step"] == at and orchestra.epoch == 1:
            orchestra.order(orchestra.members, [], through=saving)
        if said["kind"] == Kind.HELD:
            held.append(said["step"])
        if len(held) == here.world and orchestra.epoch == 2:
            layout = {"layout": Layout(pp=2, micro_batch=8).model_dump(mode="json")}
            orchestra.through = {**saving, "saving": False, "step": held[0], **layout}
            orchestra.order({0: 0, 1: 1}, [])

    ended, _ = here.play(spares=0, on_said=change)
    assert ended.evaluations.keys() == plain.evaluations.keys()
    assert max(ended.checkpoints) == max(plain.checkpoints)


@pytest.mark.parametrize("phase", ["vote", "optimizer"])
def test_a_loss_while_weights_follow(
    stage: Any, phase: str, own_number: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the other replica is late with its refresh, and goes on in place."""
    here, plain = stage("hsdp")
    have_late(0, own_number, monkeypatch)
    assert here.play([_fault(3, 6, phase)], spares=1)[0] == plain


def test_a_loss_of_who_speaks_while_weights_follow(
    stage: Any, own_number: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank dies before it has said how a step went, and its state, with all that was
    said, comes from one that goes on in place and has not noted that step either."""
    here, plain = stage("hsdp")
    have_late(2, own_number, monkeypatch)
    assert here.play([_fault(0, 6, "optimizer")], spares=1)[0] == plain


def have_late(member: int, own_number: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the weights of `member` follow step 6 late."""
    refresh = Trainer.refresh

    def late(self: Trainer) -> None:
        if self.applied == 6 and self.mesh.layout.world > 1 and own_number() == member:
            time.sleep(0.6)
        refresh(self)

    monkeypatch.setattr(Trainer, "refresh", late)


def test_a_loss_while_all_save_for_another_layout(stage: Any, tmp_path: Path) -> None:
    here, plain = stage("twins")
    saving = {"folder": str(tmp_path), "saving": True}
    wanted = Layout.model_validate({"dp_shard": 8, "micro_batch": 2})
    held: set[int] = set()

    def change(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.PROGRESS and said["step"] == 4 and orchestra.epoch == 1:
            orchestra.through = saving
            orchestra.order(orchestra.members, [])
        if said["kind"] == Kind.HELD and orchestra.through == saving:
            held.add(said["member"])
            if len(held) == 3 and orchestra.epoch == 2:
                orchestra.kill(said["member"])
            if held >= set(orchestra.members.values()) and orchestra.epoch == 3:
                through = {"step": said["step"], "layout": wanted.model_dump(mode="json")}
                orchestra.through = {**saving, **through, "saving": False}
                orchestra.order(orchestra.members, [])

    ended, _ = here.play(spares=1, on_said=change)
    assert ended.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize("phase", ["forward", "reduce", "vote", "optimizer", "checkpoint"])
def test_a_weight_that_changes_by_itself_is_in_nobodys_step(stage: Any, phase: str) -> None:
    """Caught by the rank's own sums, where a twin would not know which of the two errs."""
    here, plain = stage("twins")
    harm = _fault(3, 5, phase, kind="corrupt", element=5)
    ended, orchestra = here.play([harm], spares=1)
    assert ended == plain
    assert [taken.lost for taken in orchestra.takeovers] == [[3]]
    assert [(one["suspects"], one["certain"]) for one in _corrupt(orchestra)] == [([3], True)]


def test_without_twins_a_weight_that_changes_is_found_too(stage: Any) -> None:
    here, plain = stage("zero2")
    ended, orchestra = here.play([_fault(1, 6, "backward", kind="corrupt")], spares=1)
    assert ended == plain
    assert [one["suspects"] for one in _corrupt(orchestra)] == [[1]]


def test_of_two_gradients_the_right_one_is_found_by_computing_again(stage: Any) -> None:
    here, plain = stage("twins")
    harm = _fault(3, 6, "vote", kind="corrupt", what="gradient", element=5)
    ended, orchestra = here.play([harm], spares=1)
    assert ended == plain
    told = [(one["suspects"], one["certain"], one["redo"]) for one in _corrupt(orchestra)]
    assert set(map(str, told[:-1])) == {"([1, 3], False, True)"}
    assert told[-1] == ([3], True, False)
    assert [taken.lost for taken in orchestra.takeovers] == [[3]]


@pytest.mark.parametrize("what", ["update", "rate"])
def test_of_two_that_update_differently_none_is_believed(stage: Any, what: str) -> None:
    """Case 2: no step is taken with other settings, nor after another update."""
    here, _ = stage("twins")
    harm = _fault(3, 6, "backward", kind="corrupt", what=what)
    said: list[Said] = []
    name = {"update": "states", "rate": "settings"}[what]
    with pytest.raises(AssertionError, match=f"the {name} of ranks .1, 3., which hold the same"):
        here.play([harm], spares=1, on_said=lambda _, one: said.append(one))
    done = [one["step"] for one in said if one["kind"] == Kind.METRICS]
    assert max(done) == {"update": 6, "rate": 5}[what]


@pytest.mark.parametrize("what", ["update", "rate"])
def test_of_four_the_odd_one_is_outvoted(stage: Any, what: str) -> None:
    here, plain = stage("four")
    harm = _fault(2, 6, "backward", kind="corrupt", what=what)
    ended, orchestra = here.play([harm], spares=1)
    assert ended == plain
    assert [(one["suspects"], one["certain"]) for one in _corrupt(orchestra)] == [([2], True)]


def test_memory_is_the_same_after_fifty_recoveries(stage: Any) -> None:
    """Case 9: two members take turns at rank 1, and each begins with nothing."""
    here, _ = stage("two")
    job = {**here.args["job"], "job": {**here.args["job"]["job"], "steps": 10**6}}
    # Hundreds of saves in seconds are all young, and listed by each garbage collection.
    job["checkpoint"] = {**job["checkpoint"], "every": 10**6}
    root = here.folder / "turns"
    root.mkdir()
    args = {**here.args, "job": job, **kept_at(root / "checkpoints")}
    sizes: list[int] = []
    ready: set[int] = set()

    def take_turns(orchestra: Orchestra, said: Said) -> None:
        if said["kind"] == Kind.SPARE_READY:
            ready.add(said["member"])
        runs = said["kind"] == Kind.EXECUTING and said["epoch"] == orchestra.epoch
        if runs and said["member"] == 0:
            statm = Path(f"/proc/{orchestra.players[0].pid}/statm").read_text()
            sizes.append(int(statm.split()[1]))
        if 0 < len(sizes) == orchestra.epoch and (free := 3 - orchestra.members[1]) in ready:
            ready.discard(free)
            orchestra.order({0: 0, 1: free}, [1])

    orchestra = Orchestra(main, args, here.world, 1, root)
    orchestra.on_said = take_turns
    try:
        while len(sizes) <= 50:
            orchestra.turn()
    finally:
        orchestra.close()
    assert sizes[50] <= 1.01 * sizes[5]


def _corrupt(orchestra: Orchestra) -> list[Said]:
    return [one for one in orchestra.said if one["kind"] == Kind.CORRUPT]


def test_the_fabric_trains_as_one_process_does(stage: Any) -> None:
    alone, twins = (stage(name)[1] for name in ("alone", "twins"))
    assert twins.losses == pytest.approx(alone.losses, rel=1e-5)
    assert twins.evaluations == pytest.approx(alone.evaluations, rel=1e-5)


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote"])
def test_survivors_keep_what_their_replica_has_worked_out(
    stage: Any,
    phase: str,
    own_number: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 11: no survivor of another replica computes anything twice."""
    here, plain = stage("twins")
    count_forwards(tmp_path, own_number, monkeypatch)
    victim, layout = 3, Layout.model_validate(here.args["job"]["layout"])
    ended, _ = here.play([_fault(victim, 4, phase)], spares=1)
    assert ended == plain
    replica = blocks(layout, experts=False)[victim]
    evaluations, sequences = 3, BATCH // layout.micro_batch // layout.dp_replicate
    once = STEPS * sequences + evaluations * (8 // layout.micro_batch // layout.dp_replicate or 1)
    passes = {int(f.name): f.stat().st_size for f in tmp_path.iterdir()}
    survivors = set(range(here.world)) - {victim}
    assert {passes[member] for member in survivors - replica} == {once}
    assert {passes[member] > once for member in survivors & replica} == {True}


def count_forwards(
    folder: Path, own_number: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have each member write a byte into a file of its number at each forward pass."""
    forward = Pipeline._forward

    def counted(self: Pipeline, *args: Any) -> None:
        with (folder / str(own_number())).open("ab") as file:
            file.write(b".")
        forward(self, *args)

    monkeypatch.setattr(Pipeline, "_forward", counted)


@pytest.mark.parametrize("members", [[0], [1, 3]], ids=["the first", "both who keep it"])
def test_what_is_lost_before_the_first_step_is_made_again(stage: Any, members: list[int]) -> None:
    here, plain = stage("zero2")
    faults = [_fault(member, 0, "takeover", times=1) for member in members]
    assert here.play(faults)[0] == plain
