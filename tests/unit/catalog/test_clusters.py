"""References to clusters, and catalogues of the user's own."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError, InputError
from meshwright.catalog import cluster, names

OWN = """
[sources.bench]
title = "our own nccl-tests"
date = "2026-10"
kind = "measured"

[topologies.slow]
title = "100 Gbps a node"
kind = "fat_tree"
gb_s = { value = 1.5, source = "bench" }
latency_us = { value = 30, source = "bench", kind = "assumed" }

[instances.mine]
title = "our H100 nodes"
aliases = ["ours"]
chip = "h100"
chips_per_node = 8
levels = ["nvlink4-8", "slow"]
usd_per_node_hour = { value = 16, source = "bench" }
"""


def own(folder: Path, text: str) -> Path:
    path = folder / "catalog.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_p5_is_nvswitch_of_8_and_efa_of_50_gb_s() -> None:
    found = cluster("p5:1024")
    assert (found.chips, found.nodes, found.domain) == (1024, 128, 8)
    assert [(level.size, level.bandwidth_bytes_s) for level in found.levels] == [
        (8, 450e9),
        (1024, 50e9),
    ]


def test_a_rack_of_gb200_is_a_domain_of_72() -> None:
    assert [level.size for level in cluster("gb200-nvl72:576").levels] == [72, 576]
    assert cluster("gb200-nvl72:64").levels[0].size == 64


def test_an_ultraserver_joins_four_tori_in_a_third_dimension() -> None:
    torus, ring, efa = cluster("trn2u:128").levels
    assert (torus.kind, torus.shape, ring.kind, ring.shape) == ("torus2d", (4, 4), "ring", (4,))
    assert (torus.size, ring.size, efa.size) == (16, 64, 128)
    assert cluster("trn2:64").levels[1].kind == "fat_tree"


@pytest.mark.parametrize(
    "ref, shape, wraps",
    [
        ("tpu-v5e:256", (16, 16), True),
        ("v5e:64", (8, 8), False),
        ("tpu-v5p:512", (8, 8, 8), True),
        ("v4:64", (4, 4, 4), True),
        ("v6e:32", (4, 8), False),
    ],
)
def test_slices_of_tpus_are_round_and_close_where_the_pod_does(
    ref: str, shape: tuple[int, ...], wraps: bool
) -> None:
    level = cluster(ref).levels[0]
    assert level.shape == shape
    assert level.wraps == (wraps,) * len(shape)


def test_a_mesh_of_fewer_chips_has_fewer_links() -> None:
    whole, part = cluster("mi300x:8").levels[0], cluster("mi300x:4").levels[0]
    assert whole.link_bytes_s == pytest.approx(64e9)
    assert part.link_bytes_s == pytest.approx(64e9)
    assert part.bandwidth_bytes_s == pytest.approx(3 * 64e9)


def test_aliases_and_capitals_mean_the_same() -> None:
    assert cluster("P5.48xlarge:16") == cluster("p5:16")
    assert cluster("trillium:8").chip.name == "tpu-v6e"


def test_this_machine_has_as_many_chips_as_asked_for_and_says_it_guesses() -> None:
    found = cluster("local:6")
    assert (found.chips, found.chips_per_node, len(found.levels)) == (6, 6, 1)
    assert any(line.startswith("chip.peak_flops.fp32") for line in found.assumptions)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(names()), st.integers(1, 4096))
def test_any_number_of_chips_is_had_or_refused_in_one_line(name: str, count: int) -> None:
    try:
        found = cluster(f"{name}:{count}")
    except ConfigError as error:
        assert "\n" not in str(error) and error.value == f"{name}:{count}"
        assert "ask for" in error.fix
    else:
        assert found.chips == found.levels[-1].size == count
        for level in found.levels:
            if level.kind in ("torus2d", "torus3d"):
                assert prod(level.shape) == level.size


@pytest.mark.parametrize(
    "ref, says",
    [
        ("p5", "write NAME:CHIPS"),
        ("p5:0", "write NAME:CHIPS"),
        ("p5:-8", "write NAME:CHIPS"),
        ("p5:1k", "write NAME:CHIPS"),
        (":8", "write NAME:CHIPS"),
        ("p5:12", "ask for 8 or 16"),
        ("p5.48xlage:8", 'did you mean "p5.48xlarge"?'),
        ("h10:8", 'did you mean "h100"?'),
        ("zebra:8", "known: p4d"),
        ("v5p:8964", "a pod has 8960 chips"),
        ("v5p:4100", "no box of a 28 x 20 x 16 torus holds 4100"),
    ],
)
def test_bad_references_are_refused_in_one_line(ref: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(ref)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.key == "cluster"


def test_the_users_own_entries_stand_beside_the_shipped_ones(tmp_path: Path) -> None:
    path = own(tmp_path, OWN)
    found = cluster("ours:64", path)
    assert found.name == "mine:64"
    assert found.price_per_chip_hour == 2.0
    assert found.levels[1].bandwidth_bytes_s == 1.5e9
    assert found.levels[1].figures["bandwidth_bytes_s"].source == "our own nccl-tests"
    assert found.levels[1].figures["bandwidth_bytes_s"].kind == "measured"
    assert found.levels[1].figures["latency_s"].kind == "assumed"
    assert cluster("p5:64", path) == cluster("p5:64")
    with pytest.raises(ConfigError):
        cluster("ours:64")


def test_the_users_own_entry_replaces_a_shipped_one(tmp_path: Path) -> None:
    path = own(tmp_path, OWN.replace("instances.mine", "instances.p5"))
    assert cluster("p5:64", path).levels[1].name == "slow"
    assert cluster("p5:64").levels[1].name == "efa-400g"


@pytest.mark.parametrize(
    "old, new, key, says",
    [
        ('chip = "h100"', 'chip = "h1000"', "instances.mine.chip", 'did you mean "h100"?'),
        ('"slow"]', '"slo"]', "instances.mine.levels", 'did you mean "slow"?'),
        ('["nvlink4-8", "slow"]', '["slow", "nvlink4-8"]', "levels", "innermost first"),
        ("value = 1.5", "value = 900", "instances.mine.levels", "faster than the level inside"),
        ("value = 1.5", "value = 0", "topologies.slow.gb_s.value", "greater than 0"),
        ("value = 1.5", 'value = "1.5"', "topologies.slow.gb_s.value", "valid number"),
        ("{ value = 1.5,", "{ val = 1.5,", "topologies.slow.gb_s.val", 'did you mean "value"?'),
        ("chips_per_node", "chips_per_nod", "instances.mine.chips_per_nod", "did you mean"),
        ('title = "our H100 nodes"\n', "", "instances.mine.title", "required; add it to"),
        ("[sources.bench]", "[source.bench]", "source", 'did you mean "sources"?'),
        ('source = "bench", kind', 'source = "bnch", kind', "latency_us.source", '"bench"?'),
        ("gb_s = {", "gb_s = 3\nx = {", "topologies.slow", "unknown key"),
        ('kind = "fat_tree"', 'kind = "torus2d"', "topologies.slow", "needs 2 extents"),
        ('"fat_tree"', '"fattree"', "topologies.slow.kind", "fat_tree"),
    ],
)
def test_mistakes_in_the_users_file_name_the_key_and_the_fix(
    tmp_path: Path, old: str, new: str, key: str, says: str
) -> None:
    assert old in OWN
    with pytest.raises(ConfigError) as caught:
        cluster("mine:64", own(tmp_path, OWN.replace(old, new, 1)))
    assert "\n" not in str(caught.value)
    assert key in caught.value.key and says in str(caught.value)


def test_sparse_peaks_in_one_precision_only_are_refused(tmp_path: Path) -> None:
    text = (
        OWN
        + """
[chips.new]
title = "new"
vendor = "us"
memory_gib = { value = 80, source = "bench" }
memory_tb_s = { value = 3, source = "bench" }
tflops.bf16 = { value = 1979, source = "bench" }
tflops.fp8 = { value = 1500, source = "bench" }
"""
    )
    with pytest.raises(ConfigError, match="give dense peaks everywhere"):
        cluster("mine:64", own(tmp_path, text))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such catalogue file"):
        cluster("p5:8", tmp_path / "none.toml")
    with pytest.raises(InputError, match="not valid TOML"):
        cluster("p5:8", own(tmp_path, "[chips"))
