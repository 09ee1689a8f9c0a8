"""Scaling curves and the cliff in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_questions import question

from meshwright.catalog import cluster
from meshwright.plan.explain import TITLES
from meshwright.plan.plots import page
from meshwright.plan.scaling import scaling


def test_a_curve_starts_at_one_and_loses_speed_a_chip() -> None:
    asked = question("llama3-8b", "p5:64", global_batch=512)
    sizes = [cluster(f"p5:{chips}") for chips in (256, 64, 128, 128)]
    found = scaling(asked, sizes)
    assert [point.chips for point in found.points] == [64, 128, 256]
    efficiency = [point.efficiency or 0.0 for point in found.points]
    assert efficiency[0] == 1.0
    assert efficiency == sorted(efficiency, reverse=True)
    assert found.cliff is None and "no cliff" in found.reason


def test_too_small_a_batch_is_a_cliff_with_its_reason() -> None:
    asked = question("llama3-8b", "p5:64", global_batch=64, seq_len=2048)
    found = scaling(asked, [cluster(f"p5:{chips}") for chips in (8, 64, 512, 2048)])
    assert found.cliff in (512, 2048)
    assert "a chip keeps" in found.reason or "does not fill" in found.reason


def test_a_slow_network_is_a_cliff_at_the_second_node(tmp_path: Path) -> None:
    extra = tmp_path / "slow.toml"
    extra.write_text(
        '[sources.me]\ntitle = "ours"\ndate = "2026-11"\n'
        '[topologies.slow]\ntitle = "10 Gb/s"\nkind = "fat_tree"\n'
        'gb_s = { value = 0.15, source = "me" }\nlatency_us = { value = 30, source = "me" }\n'
        '[instances.slow]\ntitle = "slow"\nchip = "h100"\nchips_per_node = 8\n'
        'levels = ["nvlink4-8", "slow"]\n'
    )
    asked = question("llama3-8b", "slow:8", catalogue=extra, global_batch=64, framework="fsdp")
    found = scaling(asked, [cluster(f"slow:{chips}", extra) for chips in (8, 16)])
    assert found.cliff == 16
    assert any(title in found.reason for title in TITLES.values())


def test_where_nothing_fits_it_says_so() -> None:
    asked = question("llama3-405b", "p5:8")
    found = scaling(asked, [cluster("p5:8"), cluster("p5:16")])
    assert found.points[0].best is None and found.points[0].efficiency is None
    assert found.reason == "nothing fits on any of these"


@pytest.mark.parametrize("with_curve", [False, True])
def test_a_page_stands_alone(with_curve: bool) -> None:
    asked = question("llama3-8b", "p5:64", global_batch=512)
    curve = scaling(asked, [cluster("p5:64"), cluster("p5:128")])
    best = [point.best for point in curve.points if point.best]
    text = page("<8B> & more", best, curve if with_curve else None)
    assert "&lt;8B&gt; &amp; more" in text and "<8B>" not in text
    assert "http://www.w3.org/2000/svg" in text and "src=" not in text and "href=" not in text
    assert text.count("<svg") == 2 + with_curve
    assert best[0].name in text
