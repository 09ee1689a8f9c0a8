"""Users' bug reports as tests, with their values: trainer cases 1, 6, 7, 8, 10, 14, 19."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_jobs import LAYOUTS, layout

from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import latest
from meshwright.plan.layout import Layout

OnRanks = Callable[..., list[Any]]


def _tensors(root: Path) -> dict[str, bytes]:
    commit = latest(root)
    assert commit is not None
    reader = Reader(commit.path)
    return {name: reader.read(name).tobytes() for name in reader.names}


# Case 1: one global norm over all pipeline stages.


def test_stage_norms_3_and_4_clip_by_5(on_ranks: OnRanks) -> None:
    results = on_ranks("global_norm", Layout(pp=2), norms=[3.0, 4.0])
    assert [norm for norm, _ in results] == [5.0, 5.0]
    assert [value for _, value in results] == pytest.approx([3 / 5, 4 / 5])


# Case 6: a tied table over data-parallel replicas and pipeline ends.


def test_tied_gradients_add_up_over_replicas_and_ends(on_ranks: OnRanks) -> None:
    results = on_ranks(
        "tied_gradient", Layout(dp_replicate=2, pp=2), "tied", gradients=[1.0, 2.0, 4.0, 8.0]
    )
    # Two replicas stand for two tokens: (1 + 2 + 4 + 8) / 2 at both ends.
    assert results == [[2, [7.5]]] * 4


# Case 7: a token weighs the same wherever it is.


@pytest.mark.parametrize(
    ("counts", "losses", "expected"), [([10, 30], [2.0, 4.0], 3.5), ([1, 9], [2.0, 10.0], 9.2)]
)
def test_loss_is_per_token_over_all_ranks(
    on_ranks: OnRanks, counts: list[int], losses: list[float], expected: float
) -> None:
    results = on_ranks("weighted_loss", Layout(dp_replicate=2), counts=counts, losses=losses)
    assert results == pytest.approx([expected] * 2, rel=1e-7)


# Case 8 and 19: going on from a checkpoint, under the same layout and under another.


def test_resumed_run_has_the_same_bits(on_ranks: OnRanks, tokens: Path, tmp_path: Path) -> None:
    how = layout(LAYOUTS["fsdp2xtp2+sp"], 2)
    shared = {"tokens": str(tokens)}
    whole = on_ranks("train_and_save", how, **shared, until=4, save=str(tmp_path / "whole"))
    first = on_ranks("train_and_save", how, **shared, until=2, save=str(tmp_path / "half"))
    half = latest(tmp_path / "half")
    assert half is not None
    again = {"load": str(half.path), "until": 4}
    for twice in (False, True):
        save = tmp_path / f"resumed-{twice}"
        rest = on_ranks("train_and_save", how, **shared, **again, twice=twice, save=str(save))
        assert first[0] + rest[0] == whole[0]
        assert _tensors(save) == _tensors(tmp_path / "whole")


def test_state_keeps_its_bits_from_2_2_1_to_1_1_4(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    shared = {"tokens": str(tokens)}
    source, target = Layout(dp_shard=2, tp=2, micro_batch=4), Layout(pp=4, micro_batch=4)
    on_ranks("train_and_save", source, "tied", **shared, until=2, save=str(tmp_path / "a"))
    saved = latest(tmp_path / "a")
    assert saved is not None
    on_ranks(
        "train_and_save", target, "tied", **shared, load=str(saved.path), until=2,
        save=str(tmp_path / "b"),
    )  # fmt: skip
    before, after = _tensors(tmp_path / "a"), _tensors(tmp_path / "b")
    assert {name.partition("/")[0] for name in before} == {"param", "adamw.m", "adamw.v"}
    assert before == after


def test_training_goes_on_under_another_layout(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    shared = {"tokens": str(tokens)}
    source, target = layout(LAYOUTS["hsdp2x2"], 2), layout(LAYOUTS["tp2+spxpp2"], 4)
    whole = on_ranks("train_and_save", source, **shared, until=4, save=str(tmp_path / "w"))
    on_ranks("train_and_save", source, **shared, until=2, save=str(tmp_path / "a"))
    saved = latest(tmp_path / "a")
    assert saved is not None
    rest = on_ranks(
        "train_and_save", target, **shared, load=str(saved.path), until=4, save=str(tmp_path / "b")
    )
    assert np.asarray(rest[0]) == pytest.approx(np.asarray(whole[0][2:]), rel=1e-4)


# Case 10: initial weights do not depend on the layout, and no two slices are alike.


def test_initial_weights_are_the_same_for_every_layout(on_ranks: OnRanks, tmp_path: Path) -> None:
    seen = []
    for name in ("fsdp4", "fsdp2xtp2+sp", "tp2+spxpp2", "fsdp2xtp2xpp2"):
        on_ranks("initial_weights", layout(LAYOUTS[name], 1), out_name=name)
        folders = [folder for folder in tmp_path.iterdir() if (folder / "weights").is_dir()]
        newest = max(folders, key=lambda folder: folder.stat().st_mtime_ns)
        seen.append(_tensors(newest / "weights"))
    assert all(weights == seen[0] for weights in seen)


def test_no_two_shards_start_equal(on_ranks: OnRanks) -> None:
    results = on_ranks("initial_weights", layout(LAYOUTS["fsdp2xtp2xpp2"], 1))
    digests = [digest for shard in results for digest in shard]
    assert len(set(digests)) == len(digests)


# Case 14: what every tp rank holds whole has equal gradients and stays equal.


@pytest.mark.parametrize("model", ["untied", "gpt2-tied"])
@pytest.mark.parametrize("sp", [True, False])
def test_whole_parameters_stay_equal_over_tp(
    on_ranks: OnRanks, tokens: Path, model: str, sp: bool
) -> None:
    how = Layout(tp=2, sp=sp, micro_batch=8)
    one, two = on_ranks("whole_parameters", how, model, tokens=str(tokens), steps=2)
    assert one
    assert json.dumps(one) == json.dumps(two)
