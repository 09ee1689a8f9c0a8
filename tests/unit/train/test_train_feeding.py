"""Batches come by the number of their step: read here or ahead, cut short or asked for again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from meshwright.data.feed import Feed, FeedReport
from meshwright.train.feeding import ReadingTimes, StepFeed

SLOW_S = 0.004


class CalledAwayError(Exception):
    """As `Interrupted` of a new table."""


class Source:
    """Batches that hold their step; a read takes `read_s`."""

    def __init__(self, read_s: float = SLOW_S) -> None:
        self.read_s = read_s
        self.reads: list[tuple[int, int]] = []

    def read(self, step: int) -> Tensor:
        time.sleep(self.read_s)
        self.reads.append((step, threading.get_ident()))
        return torch.tensor([step])


@contextmanager
def fed(source: Source, replay: int | None = None) -> Iterator[StepFeed]:
    feed = StepFeed(source.read, replay)
    yield feed
    feed.close()


def take(feed: StepFeed, steps: range, step_s: float = 0.0) -> list[int]:
    found = []
    for step in steps:
        found.append(int(feed.take(step)))
        time.sleep(step_s)
    return found


def elsewhere(source: Source) -> int:
    """Reads that another thread did."""
    return sum(thread != threading.get_ident() for _, thread in source.reads)


@pytest.mark.parametrize(
    "read_s, step_s, wanted",
    [(1e-4, 2e-4, False), (1e-3, 2e-1, False), (1e-3, 5e-2, True), (0.1, 0.5, True)],
    ids=["it is soon done", "steps are long", "it takes a fiftieth", "it takes long"],
)
def test_a_thread_reads_where_that_pays(read_s: float, step_s: float, wanted: bool) -> None:
    times = ReadingTimes()
    times.add(0.0, 9.0)  # cold
    for step in range(1, 5):
        assert not times.want_a_thread
        times.add(9.0 + step * step_s - read_s, 9.0 + step * step_s)
    assert times.want_a_thread == wanted


def test_slow_reads_are_done_ahead_and_in_order() -> None:
    source = Source()
    with fed(source) as feed:
        assert take(feed, range(40), step_s=0.01) == list(range(40))
    assert [step for step, thread in source.reads if thread == threading.get_ident()] == [*range(5)]
    assert elsewhere(source) >= 35


def test_what_is_far_away_is_read_ahead_from_the_first_step_on() -> None:
    source = Source(read_s=0.0)
    feed = StepFeed(source.read, ahead=True)
    try:
        assert take(feed, range(5)) == list(range(5))
        assert take(feed, range(9, 12)) == [9, 10, 11]
    finally:
        feed.close()
    assert elsewhere(source) == len(source.reads)


@pytest.mark.parametrize("read_s", [0.0, SLOW_S])
def test_a_step_that_is_repeated_gets_its_batch_again(read_s: float) -> None:
    with fed(Source(read_s)) as feed:
        take(feed, range(10))
        assert take(feed, range(9, 20)) == list(range(9, 20))


@pytest.mark.parametrize("read_s", [0.0, SLOW_S])
def test_another_step_than_the_next_begins_anew_there(read_s: float) -> None:
    with fed(Source(read_s)) as feed:
        take(feed, range(10))
        assert take(feed, range(7, 12)) == list(range(7, 12))
        assert take(feed, range(30, 34)) == list(range(30, 34))


def test_after_it_was_closed_it_goes_on() -> None:
    before = threading.active_count()
    source = Source()
    with fed(source) as feed:
        take(feed, range(10))
        feed.close()
        assert take(feed, range(10, 20)) == list(range(10, 20))
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_what_it_has_found_out_it_knows_after_it_was_closed() -> None:
    with fed(Source(0.03)) as feed:
        take(feed, range(40), step_s=0.01)
        readers = feed.readers
        assert readers >= 3
        feed.close()
        assert feed.readers == 0
        take(feed, range(40, 42))
        assert feed.readers == readers


def test_who_waits_can_be_called_away_and_loses_nothing() -> None:
    source = Source()
    called = []

    def idle() -> None:
        called.append(True)
        if len(called) == 1:
            raise CalledAwayError

    with fed(source) as feed:
        take(feed, range(10))
        feed.idle, source.read_s = idle, 0.2
        time.sleep(0.05)  # what had been read ahead is there
        got = []
        with pytest.raises(CalledAwayError):
            for step in range(10, 30):
                got.append(int(feed.take(step)))
        goes_on = len(got) + 10
        source.read_s = SLOW_S
        got += take(feed, range(goes_on, 30))
    assert got == list(range(10, 30))


def test_what_is_cut_short_after_a_batch_was_taken_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Feed.__next__

    def cut_short(self: Feed[tuple[int, Tensor]]) -> tuple[int, Tensor]:
        right(self)
        monkeypatch.setattr(Feed, "__next__", right)
        raise CalledAwayError

    with fed(Source()) as feed:
        take(feed, range(10))
        monkeypatch.setattr(Feed, "__next__", cut_short)
        with pytest.raises(CalledAwayError):
            feed.take(10)
        assert take(feed, range(10, 20)) == list(range(10, 20))


def test_what_a_read_raises_is_raised_at_its_step() -> None:
    source = Source()

    def read(step: int) -> Tensor:
        if step == 12:
            raise ValueError("step 12")
        return source.read(step)

    feed = StepFeed(read)
    assert take(feed, range(12)) == list(range(12))
    with pytest.raises(ValueError, match="step 12"):
        feed.take(12)
    feed.close()


def test_one_batch_is_replayed_and_none_left_out() -> None:
    source = Source()
    with fed(source, replay=6) as feed:
        shown = [*range(6), *[5] * 6, *range(6, 12), *[11] * 6, *range(12, 18)]
        assert take(feed, range(30)) == shown


def test_storage_that_gives_no_more_is_told_once() -> None:
    pipe = threading.Lock()

    def read(step: int) -> Tensor:
        with pipe:
            time.sleep(0.01)
        return torch.tensor([step])

    feed, told = StepFeed(read), []
    until = time.monotonic() + 30
    for step in range(10_000):
        feed.take(step)
        if step % 20 == 0 and (said := feed.advice()):
            told.append(said)
            break
        assert time.monotonic() < until
    take(feed, range(step + 1, step + 30))
    assert feed.advice() is None
    feed.close()
    assert told[0].startswith("data: ")
    assert "of a step is waiting for data" in told[0]


def test_storage_that_keeps_pace_is_not_spoken_of() -> None:
    with fed(Source(0.03)) as feed:  # three readers hide it
        take(feed, range(60), step_s=0.02)
        assert feed.advice() is None


def test_nothing_is_said_while_the_feed_can_do_more_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fed(Source()) as feed:
        take(feed, range(10))
        for at_limit, said in ((False, None), (True, "data: slow")):
            report = FeedReport(9, 1.0, 0.5, 0.0, 2, 3, "data: slow", at_limit)
            monkeypatch.setattr(Feed, "report", lambda _self, report=report: report)
            assert feed.advice() == said
