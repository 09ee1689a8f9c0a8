"""Parts of the page that only some runs have, and that others must not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from watch_pages import page_of
from watch_runs import (
    EXPERTS,
    event,
    expert_load,
    experts_moved,
    metric,
    plan_of,
    profile,
    started,
    write_run,
)

from meshwright.base.events import Kind
from meshwright.plan.layout import Layout
from meshwright.watch.happenings import event_rows
from meshwright.watch.history import read_run

ONE = Layout()
EIGHT = Layout(dp_replicate=2, tp=2, pp=2)
FOLDED = Layout(dp_replicate=2, cp=2, tp=2, pp=2, ep=4, schedule="zbv", zero=1)
NEW_WORDS = ("experts", "router", "gradients:", "skipped", "active", "context", "· cp", "balance")


def folded_run(path: Path, layout: Layout = FOLDED) -> Path:
    """A run with experts that moved, compressed gradients, router losses and skipped steps."""
    traffic = {"grad_wire_bytes": 25e6, "grad_plain_bytes": 100e6}
    events = [
        started(0, layout),
        *(event(Kind.STEP_SKIPPED, n, rank=0, step=n, loss_scale=8192 / n) for n in (1, 2, 9)),
        *(profile(rank, 10, 10, **traffic) for rank in range(layout.world)),
        *(
            expert_load(step, step, layer, imbalance=1 + step / 20 + layer / 100)
            for step in (10, 20, 30)
            for layer in range(4)
        ),
        experts_moved(31, 25, 1, moved=4, before=1.8, after=1.2),
        experts_moved(31, 25, 2, moved=3, before=2.5, after=1.1),
    ]
    metrics = [metric(step, router_loss=0.02) for step in (3, 4, 5, 6, 7, 8, 10, 20, 30)]
    plan = plan_of(layout, active_params=400_000)
    return write_run(path, layout=layout, metrics=metrics, events=events, plan=plan, model=EXPERTS)


def test_experts_are_told_by_layer_and_step(tmp_path: Path) -> None:
    page = page_of(folded_run(tmp_path))
    told = page.texts["experts"]
    assert any(
        "At step 30 the fullest expert of a layer got 2.53 times its even share (layer 3, expert 5)"
        ", the fullest chip 1.20 times; 7 experts moved in 2 changes of a layer." in text
        for text in told
    )
    cells = told[told.index("Layer") :]
    assert cells[:8] == [
        "Layer",
        *(f"{kind}, step {step}" for kind in ("Experts", "Chips") for step in (10, 20, 30)),
        "Fullest expert",
    ]
    assert cells[8:16] == [*("0", "1.50", "2.00", "2.50"), *["1.20"] * 3, "5 (20 % of the load)"]
    assert "layer 2, step 20: experts 2.02, chips 1.20, fullest expert 5" in told


def test_experts_on_one_chip_have_no_load_of_chips(tmp_path: Path) -> None:
    told = page_of(folded_run(tmp_path, Layout(dp_replicate=2))).texts["experts"]
    assert "Experts of a layer: max / mean load" in told
    assert "Chips that share them: max / mean load" not in told
    assert [text for text in told if "step 30" in text and "Chips" in text] == []


def test_what_only_some_runs_have_is_told(tmp_path: Path) -> None:
    page = page_of(folded_run(tmp_path))
    assert any("overflowed: 3, first 1, last 9" in text for text in page.texts[""])
    assert any(text.startswith("400 k active a token; dp2xcp2") for text in page.texts[""])
    assert (
        "Gradients: 400 MB sent, 1.20 GB saved against fp32, over all ranks." in page.texts["split"]
    )
    assert "Router loss, added to the loss" in page.texts["speed"]
    facts = "schedule zbv, 2 stages a rank · stage balance 0.97 · ZeRO stage 1"
    assert any(text.startswith(facts) for text in page.texts["layout"])
    assert "dp 1 · cp 0 · tp 1" in page.texts["layout"]


def test_moves_and_skipped_steps_are_events_and_loads_are_not(tmp_path: Path) -> None:
    rows = event_rows(read_run(folded_run(tmp_path)).events)
    assert [(row.kind, row.step, row.detail) for row in rows[1:]] == [
        ("step skipped", "2", "gradients overflowed, next loss scale 4,096; 2 steps in a row"),
        ("step skipped", "9", "gradients overflowed, next loss scale 910.2"),
        (
            *("experts moved", "25"),
            "layers 1-2: 7 experts; load of the chips, max / mean: 2.50 before, 1.20 after",
        ),
    ]


def told(run: Path) -> str:
    """What the page says besides the job file, in small letters."""
    texts = page_of(run).texts
    return "\n".join(line for part in texts if part != "job" for line in texts[part]).lower()


def older_plan(layout: Layout) -> dict[str, Any]:
    """What the first version wrote."""
    plan = plan_of(layout)
    keys = ("dp_replicate", "dp_shard", "tp", "sp", "cp", "pp", "vpp", "ep", "etp", "zero")
    plan["layout"] = {key: plan["layout"][key] for key in keys}
    del plan["active_params"], plan["stage_balance"]
    for rank in plan["ranks"]:
        del rank["cp"]
    return plan


def test_a_run_of_the_first_version_still_has_its_page(tmp_path: Path) -> None:
    text = told(write_run(tmp_path, layout=EIGHT, plan=older_plan(EIGHT)))
    assert "dp 1 · tp 1" in text and "1.23 m" in text and "schedule 1f1b" in text
    assert [word for word in NEW_WORDS if word in text] == []
    text = told(folded_run(tmp_path / "newer"))
    assert [word for word in NEW_WORDS if word not in text] == []


def test_a_plain_run_of_this_version_tells_nothing_of_it(tmp_path: Path) -> None:
    metrics = [metric(step, router_loss=0.0) for step in (1, 2)]
    nothing = {"grad_wire_bytes": 0.0, "grad_plain_bytes": 0.0}
    events = [started(0, ONE), profile(0, 1, 2, **nothing)]
    text = told(write_run(tmp_path, layout=ONE, metrics=metrics, events=events))
    assert [word for word in (*NEW_WORDS, "schedule") if word in text] == []
