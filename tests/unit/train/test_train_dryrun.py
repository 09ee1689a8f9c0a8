"""The dry run: the real trainer on fake tensors."""

from __future__ import annotations

import json
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from meshwright.base.errors import ConfigError
from meshwright.cli.dryrun import dryrun
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.own import own_step
from meshwright.plan.rescale import rescaled
from meshwright.train import dryrun as dry
from meshwright.train.dryrun import DryRun, dry_run
from meshwright.train.dryrun_axes import Ledger, recording_mesh
from meshwright.train.dryrun_chip import even
from meshwright.train.dryrun_recorder import Recorder
from meshwright.train.parallel.weights import FullWeights
from meshwright.train.trainer import Trainer

SMALL: dict[str, Any] = {
    "family": "llama",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 128,
    "vocab": 256,
}
ROUTED: dict[str, Any] = {"family": "mixtral", "n_experts": 8, "top_k": 2, "expert_ffn_hidden": 64}


def job(layout: dict[str, Any], batch: int = 4, seq: int = 64, **model: Any) -> Job:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    ranks = prod(layout.get(axis, 1) for axis in axes)
    return resolve_job(
        {
            "job": {"steps": 10},
            "model": model if "preset" in model else {**SMALL, **model},
            "data": {"seq_len": seq, "global_batch": batch},
            "layout": layout,
            "cluster": {"ref": f"local:{ranks}"},
        }
    )


def test_a_step_on_real_tensors_is_measured_alike() -> None:
    """The same recorder on the same trainer, with numbers in the tensors."""
    here = job({}, batch=2, layers=2)
    recorder, ledger = Recorder(), Ledger()
    mesh = recording_mesh(here.layout, 0, ledger)
    with recorder, recorder.resizing():
        trainer = Trainer(here, mesh, torch.device("cpu"))
        trainer.initialise()
        dry._observe(trainer, recorder)
        batches = dry._batches(here)
        recorder.keep("other")
        recorder.restart_peak()
        trainer.update(0, trainer.gradients(batches))
    faked = dry_run(here, kernels="cpu")
    assert recorder.flops == {p: n for p, n in faked.flops.items() if n}
    assert sum(recorder.parts().values()) == pytest.approx(faked.peak_bytes, rel=0.01)


def test_flops_are_those_of_the_model() -> None:
    here = job({}, batch=3)
    measured = dry_run(here).flops
    tokens = here.data.global_batch * here.data.seq_len
    assert measured["recompute"] == 0
    assert measured["backward"] == 2 * measured["forward"]
    assert sum(measured.values()) == tokens * here.model.flops_per_token(here.data.seq_len)


def _of(found: DryRun, axis: str, kind: str) -> tuple[int, int]:
    one = [t for t in found.traffic if (t.axis, t.kind) == (axis, kind)]
    return (one[0].count, one[0].payload_bytes) if one else (0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 4},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "zbv"},
        {"pp": 2, "schedule": "dualpipev"},
    ],
    ids=lambda layout: layout.get("schedule", "1f1b"),
)
def test_what_stages_send_their_neighbours_receive(layout: dict[str, Any]) -> None:
    found = [dry_run(job(layout), rank) for rank in range(layout["pp"])]
    for axis in ("down", "up"):
        sent = [_of(one, axis, "send") for one in found]
        received = [_of(one, axis, "receive") for one in found]
        assert sum(n for n, _ in sent) == sum(n for n, _ in received) > 0
        assert sum(n for _, n in sent) == sum(n for _, n in received)


def test_a_ring_reduces_in_twice_what_it_gathers() -> None:
    found = dry_run(job({"dp_replicate": 4}))
    (one,) = (t for t in found.traffic if t.axis == "replicas")
    assert (one.kind, one.ranks) == ("all_reduce", 4)
    assert one.payload_bytes == 4 * job({}).model.params
    assert one.wire_bytes == one.payload_bytes * 2 * 3 / 4


def test_stages_of_zero_hold_less_and_less() -> None:
    bf16 = {"precision": "bf16", "dp_shard": 4}
    found = {zero: dry_run(job({**bf16, "zero": zero}, 12)).parts_bytes for zero in (1, 2, 3)}
    whole = dry_run(job({"precision": "bf16", "dp_replicate": 4}, 12)).parts_bytes
    assert found[1]["moments"] * 4 == whole["moments"]
    assert found[2]["gradients"] < found[1]["gradients"]
    assert found[3]["weights"] < found[2]["weights"] == whole["weights"]


def test_recomputing_trades_bytes_for_flops() -> None:
    kept, again = dry_run(job({})), dry_run(job({"recompute": "full"}))
    assert again.flops["recompute"] > 0
    assert again.parts_bytes["activations"] < kept.parts_bytes["activations"] / 2
    assert again.flops["forward"] == kept.flops["forward"]


@pytest.mark.parametrize("what", ["optimizer", "activations", "both"])
def test_what_is_offloaded_lies_on_the_host(what: str) -> None:
    here = {"precision": "bf16", "micro_batch": 4}
    kept, away = dry_run(job(here)), dry_run(job({**here, "offload": what}))
    params = job({}).model.params
    assert away.peak_bytes < kept.peak_bytes
    if what != "activations":
        assert away.parts_bytes["masters"] == away.parts_bytes["moments"] == 0
        assert away.host_bytes >= 12 * params
    if what != "optimizer":
        assert away.parts_bytes["activations"] < kept.parts_bytes["activations"]
    assert kept.host_bytes == 0


def test_experts_get_equal_shares() -> None:
    assert even(10, 4) == [3, 3, 2, 2]
    shared = dry_run(job({"dp_replicate": 4, "ep": 4}, **ROUTED))
    alone = dry_run(job({"dp_replicate": 4}, **ROUTED))
    assert shared.flops == alone.flops
    row_bytes = 4 * 64 * 2 * SMALL["hidden"]  # of a micro-batch's choices
    counts_bytes = 8 * 8
    _, payload = _of(shared, "ep", "all_to_all")
    assert payload == SMALL["layers"] * (4 * row_bytes + counts_bytes)


def test_a_forgotten_gather_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    here = job({"dp_shard": 2, "precision": "bf16"})
    right = dry_run(here)
    assert {t.kind: t.count for t in right.traffic} == {
        t.kind: t.count for t in own_step(here).traffic
    }
    monkeypatch.setattr(FullWeights, "start_gather", lambda self: self._resize(self.buffer.numel()))
    assert _of(dry_run(here), "shards", "all_gather") < _of(right, "shards", "all_gather")


def test_documents_dropout_fp8_and_compression_run() -> None:
    layout = {"dp_replicate": 2, "tp": 2, "precision": "fp8", "grad_compression": "int8"}
    here = job(layout, dropout=0.1)
    packed = here.model_copy(update={"data": here.data.model_copy(update={"packing": "documents"})})
    found = dry_run(packed)
    assert _of(found, "replicas", "all_to_all")[0] > 0


@pytest.mark.parametrize(
    ("how", "rank", "batch", "seq"),
    [
        (
            {
                "preset": "llama3-405b",
                "dp_shard": 4,
                "zero": 1,
                "tp": 8,
                "pp": 16,
                "recompute": "selective",
            },
            0,
            32,
            8192,
        ),
        (
            {
                "preset": "deepseek-v3",
                "dp_shard": 8,
                "zero": 1,
                "pp": 16,
                "ep": 8,
                "recompute": "full",
            },
            1000,
            64,
            4096,
        ),
    ],
    ids=["llama3-405b", "deepseek-v3"],
)
def test_a_rank_of_4096_takes_seconds(how: dict[str, Any], rank: int, batch: int, seq: int) -> None:
    layout = {k: v for k, v in how.items() if k != "preset"}
    small = job({**layout, "precision": "bf16"}, batch=batch, seq=seq, preset=how["preset"])
    whole = rescaled(small, 4096)
    start = time.process_time()
    found = dry_run(whole, rank)
    assert time.process_time() - start < 30
    predicted = own_step(whole, rank)
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)
    assert predicted.flops == found.flops
    assert found.world == 4096


def test_the_world_is_reached_by_replicas_or_shards() -> None:
    assert rescaled(job({"dp_replicate": 2, "dp_shard": 2}), 16).layout.dp_replicate == 8
    grown = rescaled(job({"dp_shard": 2, "tp": 2}), 32)
    assert (grown.layout.dp_shard, grown.data.global_batch) == (16, 32)
    shrunk = rescaled(job({"dp_replicate": 1, "dp_shard": 4}), 2)
    assert (shrunk.layout.dp_shard, shrunk.data.global_batch) == (2, 2)


def test_a_world_out_of_reach_names_both_axes() -> None:
    with pytest.raises(
        ConfigError, match=r"dp_replicate = 2 nor layout.dp_shard = 1.*multiple of 3"
    ):
        rescaled(job({"dp_replicate": 2, "cp": 3}, seq=96), 4)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        dry_run(job({"tp": 2}), 2)


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(dryrun)
    path = tmp_path / "job.toml"
    keys = "\n".join(f"{k} = {json.dumps(v)}" for k, v in SMALL.items())
    path.write_text(f"[job]\nsteps = 1\n[model]\n{keys}\n[data]\nseq_len = 64\nglobal_batch = 2\n")
    done = CliRunner().invoke(app, [str(path), "--world", "2", "--rank", "1", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["world"], found["rank"]) == (2, 1)
    assert sum(found["parts_bytes"].values()) == found["peak_bytes"]
    assert CliRunner().invoke(app, [str(path)]).exit_code == 0
