"""Users' bug reports as tests, with their values: trainer cases 1, 6, 7, 8, 10, 14, 18, 19.

Cases 2 to 5 and 16 to 24 stand beside this file; 9 and 12 are pure and stand in
`tests/unit/train`; 25, the matrix, is `test_parity_layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_jobs import BATCH, LAYOUTS, layout, model_job
from rank_results import saved_tensors

from meshwright.base.errors import ConfigError
from meshwright.plan.job import check_resume
from meshwright.plan.layout import Layout

OnRanks = Callable[..., list[Any]]


def dense(name: str, accumulation: int, **more: Any) -> Layout:
    """The layout `name` for a model without experts."""
    return layout({**LAYOUTS[name], **more}, accumulation, experts=False)


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


MASKED: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2, "pp": 2},
    {"dp_shard": 2, "tp": 2},
    {"cp": 2},
    {"pp": 2, "schedule": "zbv", "loss_chunk": 24},
)


@pytest.mark.parametrize("axes", MASKED)
def test_uneven_valid_tokens_weigh_the_same(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path, axes: dict[str, Any]
) -> None:
    """Sequences with 0, 7, 14 and 21 targets, spread over ranks and micro-batches."""

    def step(how: Layout, name: str, **more: Any) -> tuple[list[float], dict[str, bytes]]:
        save = tmp_path / name
        results = on_ranks("masked_step", how, tokens=str(tokens), save=str(save), **more)
        return results[0], saved_tensors(save)

    (loss, count, norm), gradients = step(layout({}, 1), "one")
    found, split = step(layout(axes, 4), "split")
    assert found == pytest.approx([loss, count, norm], rel=1e-5)
    for name, expected in gradients.items():
        a, b = (np.frombuffer(raw, np.float32) for raw in (expected, split[name]))
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a), name
    if axes is MASKED[0]:
        wrong, _ = step(layout(axes, 4), "wrong", mean_of_means=True)
        assert abs(wrong[0] - loss) > 1e-3


def test_evaluation_counts_each_window_once(on_ranks: OnRanks, tokens: Path) -> None:
    """Five windows on one process, and on ranks that five do not fill."""
    shared: dict[str, Any] = {"tokens": str(tokens), "eval_sequences": 5}
    expected = on_ranks("evaluation", Layout(micro_batch=8), **shared)[0]
    assert expected[2:] == [5 * 32] * 2
    for how in (
        Layout(dp_replicate=2, cp=2, micro_batch=2),
        Layout(dp_shard=2, tp=2, micro_batch=2),
    ):
        for found in on_ranks("evaluation", how, **shared):
            assert found == pytest.approx(expected, rel=1e-6)


# Case 8 and 19: going on from a checkpoint, under the same layout and under another.


@pytest.mark.parametrize(
    ("model", "name", "precision"),
    [
        ("untied", "fsdp2xtp2+sp", "fp32"),
        ("untied", "fsdp2", "bf16"),
        ("untied", "zero1", "fp32"),
        ("moe-aux", "ep2", "fp32"),  # loads of the first step come from its own tokens, once
    ],
)
def test_10_steps_and_5_plus_5_have_the_same_bits(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path, model: str, name: str, precision: str
) -> None:
    how = dense(name, 1, precision=precision)
    shared = {"model": model, "tokens": str(tokens)}
    whole = on_ranks("train_and_save", how, **shared, until=10, save=str(tmp_path / "whole"))
    first = on_ranks("train_and_save", how, **shared, until=5, save=str(tmp_path / "half"))
    half = tmp_path / "half"
    again = {"load": str(half), "until": 10}
    for twice in (False, True):
        save = tmp_path / f"resumed-{twice}"
        rest = on_ranks("train_and_save", how, **shared, **again, twice=twice, save=str(save))
        assert first[0] + rest[0] == whole[0]
        assert saved_tensors(save) == saved_tensors(tmp_path / "whole")


def test_state_keeps_its_bits_from_2_2_1_to_1_1_4(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    shared = {"tokens": str(tokens)}
    source, target = Layout(dp_shard=2, tp=2, micro_batch=4), Layout(pp=4, micro_batch=4)
    on_ranks("train_and_save", source, "tied", **shared, until=2, save=str(tmp_path / "a"))
    saved = tmp_path / "a"
    on_ranks(
        "train_and_save", target, "tied", **shared, load=str(saved), until=2,
        save=str(tmp_path / "b"),
    )  # fmt: skip
    before, after = saved_tensors(tmp_path / "a"), saved_tensors(tmp_path / "b")
    assert {name.partition("/")[0] for name in before} == {"param", "adamw.m", "adamw.v"}
    assert before == after


def test_training_goes_on_under_another_layout(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path
) -> None:
    shared = {"tokens": str(tokens)}
    source, target = dense("hsdp2x2", 2), dense("tp2+spxpp2", 4)
    whole = on_ranks("train_and_save", source, **shared, until=4, save=str(tmp_path / "w"))
    on_ranks("train_and_save", source, **shared, until=2, save=str(tmp_path / "a"))
    saved = tmp_path / "a"
    rest = on_ranks(
        "train_and_save", target, **shared, load=str(saved), until=4, save=str(tmp_path / "b")
    )
    assert np.asarray(rest[0]) == pytest.approx(np.asarray(whole[0][2:]), rel=1e-4)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp_shard": 2, "pp": 3}])
def test_tied_copies_stay_equal_and_tied_after_a_resume(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path, axes: dict[str, Any]
) -> None:
    how = layout(axes, 2)
    results = on_ranks("tied_copies", how, "tied", tokens=str(tokens), save=str(tmp_path / "saved"))
    per_stage = how.world // how.pp
    first, last = results[:per_stage], results[-per_stage:]
    assert first == last
    assert all(trained == loaded and trained for trained, loaded in first)


@pytest.mark.parametrize("name", ["fsdp2", "tp2xpp2"])
def test_bf16_follows_fp32(on_ranks: OnRanks, tokens: Path, tmp_path: Path, name: str) -> None:
    shared = {"tokens": str(tokens), "until": 3}
    losses = []
    for precision in ("fp32", "bf16"):
        how = dense(name, 2, precision=precision)
        save = str(tmp_path / precision)
        losses.append(on_ranks("train_and_save", how, "tied", **shared, save=save)[0])
    full, half = np.asarray(losses[0]), np.asarray(losses[1])
    assert half[:, 0] == pytest.approx(full[:, 0], rel=5e-3)
    assert half[:, 1] == pytest.approx(full[:, 1], rel=5e-2)
    assert (half[:, :2] != full[:, :2]).any()


# Case 18: which samples are seen is a function of the step.


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"tp": 2}])
def test_5_plus_5_steps_see_the_samples_of_10(
    on_ranks: OnRanks, tokens: Path, tmp_path: Path, axes: dict[str, Any]
) -> None:
    """The second five under the same layout, and under another."""
    shared, how = {"tokens": str(tokens)}, layout({"dp_shard": 2}, 2)
    on_ranks("train_and_save", how, **shared, until=5, save=str(tmp_path / "half"))
    half = tmp_path / "half"
    whole, first = (
        on_ranks("parity_case_workers:sample_ids", how, **shared, until=n) for n in (10, 5)
    )
    again = {"load": str(half), "until": 10}
    rest = on_ranks("parity_case_workers:sample_ids", how, **shared, **again)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    other = on_ranks("parity_case_workers:sample_ids", layout(axes, 2), **shared, **again)
    distinct = other[: axes.get("dp_replicate", 1)]
    for step, seen in enumerate(zip(*distinct, strict=True), 5):
        ids = sorted(i for rank in seen for i in rank)
        assert ids == list(range(step * BATCH, (step + 1) * BATCH))


def test_another_seed_or_batch_does_not_go_on() -> None:
    begun = model_job("untied")
    for section, key in (("job", "seed"), ("data", "global_batch"), ("data", "seq_len")):
        part = getattr(begun, section)
        now = part.model_copy(update={key: getattr(part, key) + 1})
        with pytest.raises(ConfigError, match=f"{section}.{key}.*start a new run"):
            check_resume(begun, begun.model_copy(update={section: now}))


# Case 10: initial weights do not depend on the layout, and no two slices are alike.


def test_initial_weights_are_the_same_for_every_layout(on_ranks: OnRanks, tmp_path: Path) -> None:
    for model, names in (
        ("untied", ("fsdp4", "fsdp2xtp2+sp", "tp2+spxpp2", "zbv2", "zero1xcp2")),
        ("moe-aux", ("ep2", "ep2+etp2", "ep2+etp1", "pp2xep2")),
    ):
        seen = []
        for name in ("one process", *names):
            how = layout(LAYOUTS.get(name, {}), 1, experts=model != "untied")
            folder = tmp_path / f"{model} {name}"
            on_ranks("initial_weights", how, model, save=str(folder))
            seen.append(saved_tensors(folder))
        assert all(weights == seen[0] for weights in seen)


def test_no_two_shards_start_equal(on_ranks: OnRanks, tmp_path: Path) -> None:
    how = layout(LAYOUTS["fsdp2xtp2xpp2"], 1)
    results = on_ranks("initial_weights", how, "moe-aux", save=str(tmp_path / "weights"))
    digests = [digest for shard in results for digest in shard]
    assert len(set(digests)) == len(digests)


# Case 14: what every tp rank holds whole has equal gradients and stays equal.


@pytest.mark.parametrize(
    ("model", "etp", "sp"),
    [
        ("untied", 1, True),
        ("gpt2-tied", 1, True),
        ("gpt2-tied", 1, False),
        ("qwen3", 1, False),
        ("moe-aux", 2, True),
        ("moe-aux", 2, False),
    ],
)
def test_whole_parameters_stay_equal_over_tp(
    on_ranks: OnRanks, tokens: Path, model: str, etp: int, sp: bool
) -> None:
    how = Layout(tp=2, sp=sp, etp=etp, micro_batch=8)
    one, two = on_ranks("whole_parameters", how, model, tokens=str(tokens), steps=2)
    assert one
    assert json.dumps(one) == json.dumps(two)
