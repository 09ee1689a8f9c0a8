"""Charts as PNG: the same bars as on the page, and one line where matplotlib is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_questions import question

from meshwright.base.errors import ConfigError
from meshwright.catalog import cluster
from meshwright.plan import plots_png
from meshwright.plan.plots_data import NEGLIGIBLE, dots, memory_bars, time_bars
from meshwright.plan.prediction import GIB, predict
from meshwright.plan.scaling import scaling
from meshwright.plan.search_notation import parse_layout

ASKED = question("llama3-8b", "p5:64", global_batch=512)
BEST = [predict(ASKED, parse_layout(text, 64)) for text in ("tp2,mbs1", "tp8,pp2,mbs1")]


def _height(path: Path) -> int:
    """Of an image: bytes 20 to 24 of a PNG (ISO/IEC 15948, 11.2.1)."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[20:24], "big")


def test_a_curve_makes_the_image_longer(tmp_path: Path) -> None:
    curve = scaling(ASKED, [cluster("p5:64"), cluster("p5:128")])
    plots_png.save(tmp_path / "plain.png", "8B", BEST)
    plots_png.save(tmp_path / "curve.png", "8B", BEST, curve)
    longer = _height(tmp_path / "curve.png") - _height(tmp_path / "plain.png")
    assert longer == pytest.approx(plots_png.CURVE_IN * plots_png.DPI, abs=2)
    assert [dot.chips for dot in dots(curve)] == [64, 128]


def test_bars_add_up_to_what_was_predicted() -> None:
    time, memory = time_bars(BEST), memory_bars(BEST)
    for one, seconds, bytes_ in zip(BEST, time.rows, memory.rows, strict=True):
        assert sum(part.value for part in seconds.parts) == pytest.approx(one.step_time_s)
        assert sum(part.value for part in bytes_.parts) == pytest.approx(one.memory_bytes / GIB)
        assert bytes_.low < one.memory_bytes / GIB < bytes_.high
    assert memory.limit == ASKED.cluster.chip.memory_bytes / GIB
    assert time.most >= max(one.step_time_high_s for one in BEST)


def test_parts_of_memory_have_colours_of_their_own_and_small_ones_no_name() -> None:
    memory = memory_bars(BEST)
    colours = [part.colour for part in memory.legend]
    assert len(set(colours)) == len(colours) > 5
    shown = {part.name for part in memory.legend}
    for bar in memory.rows:
        whole = sum(part.value for part in bar.parts)
        assert all(part.name in shown or part.value <= NEGLIGIBLE * whole for part in bar.parts)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots_png, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        plots_png.save(tmp_path / "a.png", "8B", BEST)
    assert "meshwright[plots]" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "a.png").exists()
