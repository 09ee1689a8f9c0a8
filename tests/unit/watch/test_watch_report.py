"""The page: well-formed, self-contained, complete and safe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watch_pages import Page, page_of, text_of
from watch_runs import (
    evaluated,
    event,
    finished_events,
    job_text,
    metric,
    plan_of,
    started,
    write_run,
)

from meshwright.base.errors import InputError
from meshwright.base.events import Kind
from meshwright.plan.layout import Layout
from meshwright.watch.happenings import event_rows
from meshwright.watch.report import write_report

ONE = Layout()
EIGHT = Layout(dp_replicate=2, tp=2, pp=2)


def test_a_whole_run_makes_a_well_formed_page_with_every_section(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    assert set(page.texts) == {"", "loss", "speed", "split", "layout", "events", "job"}
    words = "\n".join(page.texts[""])
    assert "lower than the bigram model's 3.600 and lower than the unigram model's 5.100" in words
    assert "of a peak of 45.0 GFLOP/s a chip (measured fp32 matmul on this machine)" in words
    assert "2 min 22 s" in words and "finished" in words
    assert {"bigram 3.600", "unigram 5.100"} <= set(page.texts["loss"])
    assert any('name = "synthetic"' in text for text in page.texts["job"])


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path)).read_text()
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name[:2] == "on"]


@pytest.mark.parametrize("layout", [ONE, EIGHT, Layout(dp_replicate=4, dp_shard=4, tp=4, pp=4)])
def test_every_rank_stands_in_the_split_and_in_the_layout(tmp_path: Path, layout: Layout) -> None:
    page = page_of(write_run(tmp_path, layout=layout, steps=2))
    ranks = set(range(layout.world))
    split = [re.match(r"rank (\d+): compute", text) for text in page.texts["split"]]
    chips = [re.match(r"rank (\d+) on cpu:", text) for text in page.texts["layout"]]
    assert {int(found[1]) for found in split if found} == ranks
    assert {int(found[1]) for found in chips if found} == ranks


EVIL = "<script>alert(1)</script>\"'&"


def evil_run(path: Path) -> Path:
    plan = plan_of(ONE, assumptions=[EVIL], peak_source=EVIL, label=EVIL)
    plan["ranks"][0] |= {"chip": EVIL, "node": EVIL, "holds": [EVIL]}
    events = [
        event(Kind.RUN_STARTED, 0, world=1, layout=EVIL),
        event(Kind.RANK_LOST, 1, rank=0, step=1, signal=EVIL, log=EVIL),
        {**event(Kind.RUN_STARTED, 2), "kind": EVIL, EVIL: EVIL},
        event(Kind.RUN_FAILED, 3, error=EVIL),
    ]
    write_run(path, layout=ONE, steps=2, plan=plan, events=events)
    job = (path / "job.toml").read_text()
    (path / "job.toml").write_text(f"# {EVIL}\n{job}")
    return path


def test_nothing_that_a_run_says_becomes_markup(tmp_path: Path) -> None:
    html = write_report(evil_run(tmp_path)).read_text()
    assert "<script" not in html
    page = Page(html)
    assert "script" not in page.tags
    shown = [text for lines in page.texts.values() for text in lines if "alert(1)" in text]
    assert len(shown) >= 6, "escaped, not dropped"


def test_a_run_that_failed_before_its_first_step_still_has_a_page(tmp_path: Path) -> None:
    events = [started(0, ONE), event(Kind.RUN_FAILED, 1, error="rank 0 died before step 1")]
    text = text_of(write_run(tmp_path, layout=ONE, metrics=[], events=events))
    assert "rank 0 died before step 1" in text
    assert "No step was completed" in text
    assert "No rank has reported" in text


def test_a_job_alone_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(job_text(ONE, 10))
    text = text_of(tmp_path)
    assert "not started" in text
    assert "No plan was written." in text


def test_a_loss_that_diverged_is_told_and_breaks_no_chart(tmp_path: Path) -> None:
    metrics: list[dict[str, Any]] = [metric(step) for step in range(1, 21)]
    for line in metrics[9:]:
        line |= {"loss": math.nan, "grad_norm": math.inf}
    events = [started(0, ONE), evaluated(1, 20, math.nan)]
    html = write_report(write_run(tmp_path, layout=ONE, metrics=metrics, events=events)).read_text()
    Page(html)
    assert "not finite: 11, first 10" in html
    assert not re.search(r'(d|x\d?|y\d?|cx|cy|width)="[^"]*(nan|inf)', html)


def test_lost_ranks_and_resumes_are_told(tmp_path: Path) -> None:
    events = [
        started(0, ONE),
        event(Kind.RANK_LOST, 5, rank=0, step=21, signal="SIGKILL", log="logs/rank-0.log"),
        event(Kind.RUN_FAILED, 6, error="rank 0 died"),
        started(9, ONE, resumed_from=20),
        event(Kind.RUN_FINISHED, 20, step=40, wall_s=11.0),
    ]
    page = page_of(write_run(tmp_path, layout=ONE, steps=40, events=events))
    assert "resumed from step 20" in page.texts[""]
    assert "resumed" in page.texts["loss"]
    assert "signal SIGKILL, log logs/rank-0.log" in page.texts["events"]


def test_many_ranks_getting_ready_share_a_row_and_profiles_have_none() -> None:
    rows = event_rows(finished_events(EIGHT, 40))
    ready = [row for row in rows if row.kind == "rank ready"]
    assert [(row.rank, row.detail) for row in ready] == [("", "ranks 8")]
    assert not [row for row in rows if row.kind == "rank profile"]
    assert rows[-1].since_start == "7.0 s"


def test_a_long_run_shows_its_newest_events_and_says_so(tmp_path: Path) -> None:
    commits = [event(Kind.CHECKPOINT_COMMITTED, n, step=n, path=f"c/{n}") for n in range(1, 1000)]
    html = write_report(
        write_run(tmp_path, layout=ONE, events=[started(0, ONE), *commits])
    ).read_text()
    assert "The newest 400; 600 older ones are in events.jsonl." in html
    assert "path c/999" in html and "path c/599<" not in html


@pytest.fixture
def failing_render(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def half_written(self: Path, data: str, encoding: str) -> int:
        self.write_bytes(data.encode(encoding)[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half_written)
    yield


def test_a_page_is_written_whole_or_not_at_all(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    old = write_report(write_run(tmp_path)).read_text()
    request.getfixturevalue("failing_render")
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == old
    assert not list(tmp_path.glob(".report*"))


def test_what_is_no_run_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
