"""Messages of a run: whole lines of JSON, also when several workers share a pipe."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from meshwright.base.events import MAX_LINE_BYTES, EventWriter, Kind


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def _nothing_in(reading: int) -> bool:
    return not select.select([reading], [], [], 0)[0]


def test_a_message_is_one_line_of_json_with_time_kind_and_rank(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    before = time.time()
    EventWriter(writing, rank=3).emit(Kind.PROGRESS, step=7, note="zwei\nZeilen")
    line = os.read(reading, MAX_LINE_BYTES)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    message = json.loads(line)
    assert before <= message.pop("ts") <= time.time()
    assert message == {"kind": "progress", "rank": 3, "step": 7, "note": "zwei\nZeilen"}


def test_the_longest_message_passes_and_one_byte_more_writes_nothing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    monkeypatch.setattr(time, "time", lambda: 1.5)
    writer = EventWriter(writing, rank=0)
    writer.emit(Kind.RUN_FAILED, error="")
    room = MAX_LINE_BYTES - len(os.read(reading, MAX_LINE_BYTES))
    writer.emit(Kind.RUN_FAILED, error="x" * room)
    assert len(os.read(reading, 2 * MAX_LINE_BYTES)) == MAX_LINE_BYTES
    with pytest.raises(ValueError, match=f"has {MAX_LINE_BYTES + 1} bytes, limit {MAX_LINE_BYTES}"):
        writer.emit(Kind.RUN_FAILED, error="x" * (room + 1))
    assert _nothing_in(reading)


def test_a_line_fits_what_the_kernel_writes_in_one_piece() -> None:
    assert select.PIPE_BUF >= MAX_LINE_BYTES


def test_lines_of_several_writers_never_mix(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    messages = 50
    writers = [
        threading.Thread(target=_emit_many, args=(EventWriter(writing, rank), messages))
        for rank in range(4)
    ]
    for writer in writers:
        writer.start()
    received = b""
    while received.count(b"\n") < messages * len(writers):
        received += os.read(reading, 1 << 16)
    for writer in writers:
        writer.join()
    parsed = [json.loads(line) for line in received.splitlines()]
    assert Counter(message["rank"] for message in parsed) == dict.fromkeys(range(4), messages)
    assert all(set(message["text"]) == {str(message["rank"])} for message in parsed)


def _emit_many(writer: EventWriter, messages: int) -> None:
    for step in range(messages):
        writer.emit(Kind.PROGRESS, step=step, text=str(writer.rank) * 3900)
