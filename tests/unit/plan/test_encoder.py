"""Encoders beside a language model, frozen parts, and what reading samples takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_questions import question

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster, cluster
from meshwright.plan.encoder import ONCE, Split, encoder_question, fill_s, sizes, splits
from meshwright.plan.encoder_placed import place
from meshwright.plan.encoders import Beside, Wanted, beside, encoder, names
from meshwright.plan.explain import TITLES, bound
from meshwright.plan.goodput import checkpoint_s
from meshwright.plan.prediction import layout_of, predict
from meshwright.plan.search import search
from meshwright.plan.search_notation import parse_layout
from meshwright.plan.search_question import Question

LLAMA = question("llama3-8b", "p5:64", seq_len=8192, global_batch=512)
SMALL = question("llama3-8b", "p5:16", seq_len=8192, global_batch=64)


def _p5(chips: int) -> Cluster | None:
    try:
        return cluster(f"p5:{chips}")
    except ConfigError:
        return None


def _changed(asked: Question, **changes: Any) -> tuple[Question, Callable[[int], Cluster | None]]:
    """The question on a changed cluster, and every size of that."""

    def resized(chips: int) -> Cluster | None:
        there = _p5(chips)
        return there and replace(there, **changes)

    return asked.on(replace(asked.cluster, **changes)), resized


def _about(name: str = "vit-bigg-14", images: int = 1, **more: Any) -> Beside:
    return beside(Wanted(name, images, **more), 8192)


def _best(about: Beside, asked: Question = LLAMA) -> Split:
    return splits(asked, about, _p5)[0]


def test_vit_l_has_its_published_flops_and_weights() -> None:
    """ViT-L/14 at 224 pixels: a forward of 257 tokens is 81 GMACs (CLIP's image tower, 304 M
    weights): a layer 12 hidden^2 products and 2 tokens x hidden of scores, and the patches."""
    found, tokens, hidden = encoder("vit-l-14"), 257, 1024
    layer = 12 * hidden**2 + 2 * tokens * hidden
    forward = 2 * tokens * (24 * layer + 588 * hidden)
    assert found.spec.params == pytest.approx(304e6, rel=0.005)
    assert forward == pytest.approx(2 * 81e9, rel=0.01)
    asked = encoder_question(LLAMA, _about("vit-l-14"), 8, _p5)
    assert asked is not None
    assert asked.flops_per_chip == pytest.approx(3 * forward * 512 / 8)
    frozen = encoder_question(LLAMA, _about("vit-l-14", frozen=True), 8, _p5)
    assert frozen is not None and frozen.flops_per_chip == pytest.approx(forward * 512 / 8)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("vit-h-14", 632e6),  # image towers of CLIP, OpenCLIP and SigLIP as published
        ("vit-bigg-14", 1845e6),
        ("siglip-so400m-14", 413e6),
        ("whisper-large", 637e6),
        ("internvit-6b", 5540e6),
    ],
)
def test_encoders_weigh_what_is_published(name: str, params: float) -> None:
    assert encoder(name).spec.params == pytest.approx(params, rel=0.02)
    assert encoder(name).source


def test_without_a_mask_attention_takes_twice_as_long() -> None:
    """The cost model knows the mask too: what an encoder's layer takes more is its scores."""
    asked = replace(LLAMA, cluster=cluster("p5:8"), seq_len=32768, global_batch=8)
    layout = parse_layout("tp8,zero1,mbs1", 8, "bf16")
    masked, free = predict(asked, layout), predict(replace(asked, causal=False), layout)
    spec = asked.spec
    scores = 3.0 * 32768 * (spec.query_dim + spec.value_dim) * spec.layers * asked.tokens
    more = replace(asked, causal=False).flops_per_chip - asked.flops_per_chip
    assert more == pytest.approx(scores / 8)
    assert free.step_time_s > masked.step_time_s + more / asked.peak_flops
    assert free.mfu < 1


@pytest.mark.parametrize("name", ["vit-bigg-14", "internvit-6b"])
def test_a_frozen_part_only_goes_forward(name: str) -> None:
    for layout in ("tp1,pp1,dp8,zero1,mbs1", "tp1,pp4,dp2,zero1,mbs1", "fsdp8,mbs1"):
        trained, frozen = (
            predict(asked, parse_layout(layout, 8, "bf16"))
            for asked in (
                encoder_question(LLAMA, _about(name, frozen=frozen), 8, _p5)
                for frozen in (False, True)
            )
            if asked is not None
        )
        assert frozen.step_time_s < 0.45 * trained.step_time_s
        assert frozen.time_parts["dp"] == frozen.time_parts["optimizer"] == 0
        assert min(frozen.time_parts.values()) >= 0
        for part in ("gradients", "master", "optimizer", "activations"):
            assert frozen.memory_parts[part] == 0 < trained.memory_parts[part]
        assert frozen.memory_parts["weights"] == trained.memory_parts["weights"] > 0


def test_a_frozen_part_makes_nothing_again() -> None:
    asked = encoder_question(LLAMA, _about(frozen=True), 8, _p5)
    assert asked is not None
    plain, full = (
        predict(asked, parse_layout(f"dp8,mbs1{again}", 8, "bf16")) for again in ("", ",full")
    )
    assert plain.step_time_s == full.step_time_s


def test_sizes_are_whole_nodes_up_to_half() -> None:
    assert sizes(cluster("p5:64")) == [32, 16, 8]
    assert sizes(cluster("p5:24")) == [8]
    assert sizes(cluster("p5:8")) == sizes(cluster("p5:4")) == []


def test_more_images_want_more_chips() -> None:
    few, many = _best(_about("internvit-6b", 1)), _best(_about("internvit-6b", 16))
    assert few.encoder.chips == 8 and many.encoder.chips == 32
    assert many.tokens_per_s < few.tokens_per_s
    assert few.bound.startswith("the language model")
    assert many.bound.startswith("the encoder")


@pytest.mark.parametrize("images", [1, 4, 16])
@pytest.mark.parametrize("name", ["vit-l-14", "internvit-6b"])
def test_frozen_is_never_slower(name: str, images: int) -> None:
    trained = _best(_about(name, images))
    frozen = _best(_about(name, images, frozen=True))
    assert frozen.step_s < trained.step_s
    assert frozen.terms["transfer"] < 2 * trained.terms["transfer"] * 1025 * 3200 / (256 * 4096)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(names()),
    images=st.integers(1, 5),
    frozen=st.booleans(),
    chips=st.sampled_from([16, 32, 64]),
)
@example(name="internvit-6b", images=16, frozen=False, chips=16)  # the encoder decides
def test_a_step_beats_no_roofline(name: str, images: int, frozen: bool, chips: int) -> None:
    asked = question("llama3-8b", f"p5:{chips}", seq_len=8192, global_batch=128)
    for split in splits(asked, _about(name, images, frozen=frozen), _p5):
        for side in (split.language, split.encoder):
            least = side.question.flops_per_chip / side.question.peak_flops
            assert split.step_s >= side.busy_s >= least > 0
        assert split.language.chips + split.encoder.chips == chips
        low, high = split.interval_s
        assert low < split.step_s < high
        assert split.step_s == pytest.approx(max(split.terms.values()) + split.fill_s)
        assert split.fill_s > 0
        shares = [side.document(split.step_s) for side in (split.language, split.encoder)]
        assert all(0 < one["mfu"] < one["busy"] <= 1 for one in shares)


def test_splits_come_fastest_first_and_none_is_missed() -> None:
    about = _about("internvit-6b", 4)
    found = splits(LLAMA, about, _p5)
    assert [s.step_s for s in found] == sorted(s.step_s for s in found)
    for chips in {32, 16, 8} - {one.encoder.chips for one in found}:
        asked = encoder_question(LLAMA, about, chips, _p5)
        assert asked is not None
        assert search(asked, slack=1.0).best.step_s[0] >= found[0].step_s


def test_a_slow_network_between_both_decides() -> None:
    """Each side has one node, so that only embeddings and gradients cross the network: 64 x 32
    images of 256 tokens x 4096 channels x 2 bytes, both ways, over the links of 8 chips."""
    inner, outer = SMALL.cluster.levels
    slow = replace(outer, bandwidth_bytes_s=outer.bandwidth_bytes_s / 2000)
    asked, _ = _changed(SMALL, levels=(inner, slow))
    about = _about("vit-l-14", 32)
    fast, found = splits(SMALL, about, _p5)[0], splits(asked, about, _p5)[0]
    assert fast.bound.startswith("the language model")
    assert found.bound.startswith("traffic between both")
    size = 64 * 32 * 256 * 4096 * 2
    lanes = min(found.language.lanes, found.encoder.lanes)
    assert found.terms["transfer"] > 2 * size / lanes / slow.bandwidth_bytes_s
    assert found.step_s > found.terms["transfer"] > fast.terms["transfer"]


def test_filling_takes_one_pass_through_the_stages() -> None:
    counts = np.array([8.0])
    parts = {"compute": np.array([6.0]), "tp": np.array([2.0]), **dict.fromkeys(ONCE, counts)}
    assert fill_s(parts, counts, 1, 8) == 1.0  # one of 8 micro-batches
    assert fill_s(parts, counts, 1, 4) == 2.0  # two of them feed one of the language model
    assert fill_s(parts, counts, 4, 64) == 4.0  # four stages, one after the other


def test_colocation_is_a_sum_and_needs_room() -> None:
    found = place(LLAMA, _about(), _p5)
    alone = search(LLAMA).best.step_s[0]
    assert found.colocated is not None
    assert found.colocated.step_time_s > alone
    assert found.colocated.chips <= 64
    full, resized = _changed(LLAMA, chip=replace(LLAMA.cluster.chip, memory_bytes=20e9))
    tight = place(full, _about("vit-l-14", frozen=True), resized).colocated
    assert tight is None or tight.step_time_s > found.colocated.step_time_s


def test_items_are_read_by_the_encoders_nodes() -> None:
    slow, resized = _changed(LLAMA, storage_bytes_s_per_node=1e6)
    found = splits(slow, _about(image_bytes=5e6), resized)[0]
    assert found.bound.startswith("reading samples")
    nodes = found.encoder.chips / 8
    assert found.terms["data"] == pytest.approx(512 * 5e6 / (nodes * 1e6))


@pytest.mark.parametrize(("model", "size"), [("llama3-8b", 4), ("llama2-70b", 2)])
def test_a_step_takes_the_longer_of_arithmetic_and_reading(model: str, size: int) -> None:
    asked = question(model, "p5:64", seq_len=4096, global_batch=512)
    best = layout_of(asked, search(asked).best.candidates, 0)
    plain = predict(asked, best)
    assert plain.time_parts["data"] == 0
    slow, _ = _changed(asked, storage_bytes_s_per_node=1e4)
    there = predict(slow, best)
    assert there.step_time_s == pytest.approx(4096 * 512 * size / (8 * 1e4))
    assert there.time_parts["data"] == pytest.approx(there.step_time_s - plain.step_time_s)
    assert bound(there).startswith(TITLES["data"])
    assert search(slow).best.step_s[0] == pytest.approx(there.step_time_s)


def test_checkpoints_hold_what_is_trained() -> None:
    alone = checkpoint_s(LLAMA.spec, 8, 2e9)
    both = checkpoint_s(LLAMA.spec, 8, 2e9, _about().trained_params)
    assert both / alone == pytest.approx(1 + encoder("vit-bigg-14").spec.params / LLAMA.spec.params)
    assert _about(frozen=True).trained_params == 0


def test_an_encoder_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("layers = 2\nhidden = 64\nheads = 4\nffn_hidden = 256\ntokens = 17\n")
    assert beside(Wanted(str(file), 3), 8192).image_tokens == 17
    assert beside(Wanted(str(file), 3, 5), 15).image_tokens == 5
    for bad in ("layers = 2\n", file.read_text() + "wings = 2\n", "layers =", "layers = 2.5"):
        file.write_text(bad)
        with pytest.raises(Exception, match=r"^[^\n]*$") as raised:
            encoder(str(file))
        assert getattr(raised.value, "exit_code", 1) == 2
    with pytest.raises(ConfigError, match="did you mean"):
        encoder("vit-l14")


def test_what_does_not_fit_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not fit into a sequence of 8192; at most 32"):
        _about(images=33)
    one_node = question("llama3-8b", "p5:8", global_batch=64)
    with pytest.raises(ConfigError, match="one node"):
        splits(one_node, _about(), _p5)
    huge = tmp_path / "huge.toml"
    huge.write_text("layers=80\nhidden=16384\nheads=128\nffn_hidden=65536\ntokens=256\n")
    with pytest.raises(ConfigError, match="does not fit on 8 chips of its own: memory") as raised:
        splits(SMALL, _about(str(huge)), _p5)
    assert "\n" not in str(raised.value)
    large = question("llama3-405b", "p5:64", global_batch=64)
    with pytest.raises(ConfigError, match="leaves too few chips beside an encoder"):
        splits(large, _about("vit-l-14"), _p5)
    odd = question("llama3-8b", "p5:16", global_batch=63)
    huge.write_text("layers=1\nhidden=448\nheads=7\nffn_hidden=1792\ntokens=17\n")
    with pytest.raises(ConfigError, match="no legal layout: dp does not divide"):
        splits(odd, _about(str(huge)), _p5)


def test_dense_models_may_split_tensors_where_a_sequence_does_not_divide() -> None:
    odd = question("llama3-8b", "p5:16", seq_len=1001, global_batch=64)
    assert {1, 2, 4} == set(search(odd).best.candidates.tp.tolist())
