"""From a model folder into a trainer, and from its checkpoint out again: not a bit is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.checkpoint.opening import StoreAt, newest
from meshwright.checkpoint.reader import Reader
from meshwright.models.hf_folder import folder_spec
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout
from meshwright.ship.hf import export_hf, read_hf
from meshwright.ship.start import commit_read, start_commit
from meshwright.train.comm import Clock
from meshwright.train.mesh import build_mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.state import load_state, owned_state, save
from meshwright.train.trainer import Trainer

DEEPSEEK = {
    "family": "deepseek_v3",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "head_dim": 12,
    "vocab": 320,
    "max_seq_len": 64,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "n_experts": 4,
    "top_k": 2,
    "n_shared_experts": 1,
    "expert_ffn_hidden": 24,
    "first_dense_layers": 1,
    "gate": "sigmoid",
}
DATA = {"seq_len": 16, "global_batch": 2}
BIAS = "layers.1.mlp.router.bias"


@pytest.fixture
def folder(tokenizer_path: Path, tmp_path: Path) -> Path:
    """A mixture of experts with random weights and routing biases."""
    job = resolve_job({"job": {"steps": 1}, "model": DEEPSEEK, "data": DATA})
    torch.manual_seed(0)
    weights = {n: torch.randn(p.shape).numpy() for n, p in Decoder(job.model).named_parameters()}
    read = {**weights, BIAS: torch.randn(4).numpy()}.__getitem__
    return export_hf(job.model, read, tokenizer_path, 0, tmp_path / "theirs")


def a_job(folder: Path) -> Job:
    model = {"hf": str(folder), "bias_update_rate": 0.001, "aux_loss": 0.01}
    return resolve_job({"job": {"steps": 2}, "model": model, "data": DATA})


def first_commit(folder: Path, root: Path) -> Reader:
    at = StoreAt(str(root))
    return at.open(create=True).reader(start_commit(folder, at))


def a_trainer(job: Job) -> Trainer:
    return Trainer(job, build_mesh(Layout(), 0, Clock()), torch.device("cpu"))


def test_the_first_commit_holds_the_folders_numbers_and_no_moments(
    folder: Path, tmp_path: Path
) -> None:
    reader = first_commit(folder, tmp_path)
    spec, theirs = read_hf(folder)
    ours = commit_read(reader)
    names = [*dict(Decoder(spec).named_parameters()), BIAS]
    assert all(np.array_equal(ours(name), theirs(name)) for name in names)
    assert (reader.step, reader.meta["weights_only"]) == (0, True)
    assert len(reader.names) == len(names)


def test_a_trainer_starts_from_it_as_new(folder: Path, tmp_path: Path) -> None:
    trainer = a_trainer(a_job(folder))
    assert load_state(trainer, first_commit(folder, tmp_path)) == 0
    _, theirs = read_hf(folder)
    router = trainer.routing.layers[1].router
    assert np.array_equal(router.bias.numpy(), theirs(BIAS))
    assert trainer.routing.needs_seed
    assert not any(moment.any() for pair in trainer.optimizer.moments for moment in pair)
    trainer.update(0, trainer.gradients(torch.randint(320, (1, 2, 17)), step=0))
    moved = (router.bias.numpy() - theirs(BIAS)).round(6)
    assert set(np.abs(moved)) <= {np.float32(0.0), np.float32(0.001)}
    assert moved.any()


def test_what_a_trainer_saved_goes_back_into_a_folder(
    folder: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    trainer = a_trainer(a_job(folder))
    load_state(trainer, first_commit(folder, tmp_path))
    save(StoreAt(str(tmp_path)), 1, trainer.mesh, owned_state(trainer), {})
    spec = trainer.job.model
    back = export_hf(spec, commit_read(newest(tmp_path)), tokenizer_path, 0, tmp_path / "ours")
    assert folder_spec(back) == folder_spec(folder)
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes() == (back / path.name).read_bytes()
