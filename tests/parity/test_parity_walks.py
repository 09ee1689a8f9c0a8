"""Random walks: save, kill, change the layout, load, train. State bit-equal, losses as if nothing
had been. CHAOS=all (`make chaos`) takes 50 of them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_jobs import job, on_layout

from meshwright.checkpoint.opening import StoreAt, newest
from meshwright.checkpoint.reader import Reader
from meshwright.conduct import conductor
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir, read_lines
from meshwright.data.store import write_store
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout

WALKS = 50 if os.environ.get("CHAOS") == "all" else 2
STEPS, BATCH, VOCAB = 10, 6, 65
MOST_LEGS = 4
# Sizes that 2 and 3 do not divide: 65 tokens, 3 layers; tensors are cut in 5.
MODEL = {
    "family": "llama",
    "layers": 3,
    "hidden": 20,
    "heads": 5,
    "kv_heads": 5,
    "ffn_hidden": 35,
    "vocab": VOCAB,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "fsdp2": {"dp_shard": 2},
    "fsdp3": {"dp_shard": 3},
    "tp5": {"tp": 5},
    "pp2": {"pp": 2},
    "fsdp2xpp2": {"dp_shard": 2, "pp": 2},
}


@dataclass(frozen=True)
class Leg:
    """A part of a walk: its layout and how the run saves; after how many steps which rank is killed
    (0: none is), and whether not before something has been committed."""

    layout: str
    saving: Mapping[str, Any]
    steps: int = 0
    victim: int = 0
    saved: bool = True


def draw_walk(seed: int) -> list[Leg]:
    """Two to `MOST_LEGS` legs, of which the last goes to the end. One walk in four keeps its
    layout."""
    draw = random.Random(seed)
    stays, first = draw.random() < 0.25, draw.choice([*LAYOUTS])
    legs = []
    for number in range(draw.randint(2, MOST_LEGS)):
        saving: dict[str, Any] = {
            "every": draw.randint(1, 2),
            "deltas": draw.random() < 0.5,
            "compress": draw.random() < 0.7,
        }
        if not saving["deltas"] and draw.random() < 0.5:
            saving["copy_bytes"] = draw.choice([512, 9000])
        steps, victim = saving["every"] + draw.randint(0, 1), draw.randint(0, 4)
        name = first if stays else draw.choice([*LAYOUTS])
        legs.append(Leg(name, saving, steps, victim, number == 0 or draw.random() < 0.7))
    return [*legs[:-1], replace(legs[-1], steps=0)]


@dataclass
class Run:
    """A run that goes through legs, and the loss of each step as it was last taken."""

    engine: LocalEngine
    tokens: Path
    home: Path
    losses: dict[int, float] = field(default_factory=dict)
    legs: int = 0
    loads: int = 0

    @property
    def at(self) -> StoreAt:
        return StoreAt(str(self.home / "store"))

    def go(self, leg: Leg) -> Outcome:
        """Train from the head until the rank is killed, or to the end. What is loaded must be what
        the head holds, to the bit."""
        self.legs += 1
        head, witness = self.at.head(), StoreAt(str(self.home / f"witness-{self.legs}"))
        wanted = held(self.at.open().reader(head)) if head else None
        self.at.begin()
        args = {
            "job": walk_job(leg).model_dump(mode="json"),
            "train_prefix": str(self.tokens),
            "held_out_prefix": str(self.tokens),
            "checkpoints": asdict(self.at),
            "attempt": f"leg{self.legs}",
            "begun": self.at.open().last(),
            "resume_from": self.at.where(head) if head else None,
            "baselines": {},
            "end_of_text": 0,
            "witness": witness.address,
            "steps": leg.steps,
            "victim": leg.victim,
            "saved": leg.saved,
        }
        with RunDir.create_at(self.home / f"leg-{self.legs}") as rundir:
            world = Layout(**LAYOUTS[leg.layout], micro_batch=1).world
            entry = "parity_walk_workers:walk"
            outcome = conductor.run(
                self.engine, rundir, entry, world, args, lambda _: None, lambda: 0
            )
            self.loads += wanted is not None
            if wanted is not None:
                assert held(newest(witness.address)) == wanted
            for line in read_lines(rundir.metrics):
                self.losses[line["step"]] = line["loss"]
        return outcome


def walk_job(leg: Leg) -> Job:
    data = {"seq_len": 20, "global_batch": BATCH}
    base = job(
        MODEL,
        job={"steps": STEPS, "eval_every": 100, "eval_sequences": 2},
        data=data,
        layout={"micro_batch": 1},
        checkpoint=dict(leg.saving),
    )
    axes = LAYOUTS[leg.layout]
    return on_layout(base, Layout(**axes, micro_batch=1))


def held(reader: Reader) -> dict[str, Any]:
    """All that a commit holds, to the bit, but for who wrote it."""
    words = {word: reader.meta[word] for word in ("updates", "bad_samples", "loss_scale")}
    tensors = {name: reader.read(name).tobytes() for name in reader.names}
    return {"step": reader.step, **words, **tensors}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 65 tokens."""
    draw, prefix = np.random.default_rng(3), tmp_path_factory.mktemp("tokens") / "train"
    with write_store(prefix, VOCAB, end_of_text=0) as writer:
        for _ in range(60):
            writer.add(np.cumsum(draw.integers(1, 5, size=50)) % (VOCAB - 1) + 1)
            writer.end_document()
    return prefix


@pytest.fixture(scope="module")
def undisturbed(
    engine: LocalEngine, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Runs of a layout that nothing disturbed, made at their first use."""

    class Made(dict[str, Run]):
        def __missing__(self, name: str) -> Run:
            run = Run(engine, tokens, tmp_path_factory.mktemp(name))
            outcome = run.go(Leg(name, {"every": 100}))
            assert outcome.status is Status.FINISHED, outcome.error
            self[name] = run
            return run

    return Made()


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_walk_ends_where_an_undisturbed_run_does(
    engine: LocalEngine, tokens: Path, undisturbed: dict[str, Run], tmp_path: Path, seed: int
) -> None:
    legs, run = draw_walk(seed), Run(engine, tokens, tmp_path)
    for leg in legs:
        outcome = run.go(leg)
        assert (outcome.status is Status.FINISHED) == (not leg.steps), outcome.error
    assert run.loads == len(legs) - 1
    wanted = undisturbed[legs[0].layout]
    reader, reference = newest(run.at.address), newest(wanted.at.address)
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    if {leg.layout for leg in legs} == {legs[0].layout}:
        assert run.losses == wanted.losses
        assert held(reader) == held(reference)
        return
    assert run.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert reader.names == reference.names
    for name in reader.names:
        x, y = reader.read(name), reference.read(name)
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y), name
