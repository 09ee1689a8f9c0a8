"""Lines off a pipe, however they arrive, and what counts as a message."""

from __future__ import annotations

import os
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.events import EventWriter, Kind
from meshwright.conduct.protocol import Exit, LineBuffer, encode, parse_message, signal_name

_OTHER_TEXT = st.text().filter(lambda text: text not in set(Kind))
_LINES = st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line))


@settings(deadline=None)
@given(_LINES, st.lists(st.integers(0, 200)), st.binary().filter(lambda tail: b"\n" not in tail))
def test_lines_do_not_depend_on_how_bytes_are_split(
    lines: list[bytes], cuts: list[int], tail: bytes
) -> None:
    data = b"".join(line + b"\n" for line in lines) + tail
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    buffer = LineBuffer()
    got = [line for a, b in pairwise(edges) for line in buffer.feed(data[a:b])]
    assert got == lines
    assert buffer.feed(b"\n") == ([tail] if tail else [])


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_message_or_none(line: bytes) -> None:
    message = parse_message(line)
    assert message is None or message["kind"] in Kind


@settings(deadline=None)
@given(st.none() | st.booleans() | st.integers() | _OTHER_TEXT | st.lists(st.text()))
def test_a_kind_or_rank_of_the_wrong_type_is_no_message(value: object) -> None:
    assert parse_message(encode({"kind": value, "rank": 0})) is None
    if type(value) is not int:
        assert parse_message(encode({"kind": "progress", "rank": value})) is None


def test_what_a_worker_writes_is_read_back() -> None:
    reader, writer = os.pipe()
    try:
        EventWriter(writer, 3).emit(Kind.PROGRESS, step=41)
        (line,) = LineBuffer().feed(os.read(reader, 4096))
    finally:
        os.close(reader)
        os.close(writer)
    message = parse_message(line)
    assert message is not None
    assert (message["kind"], message["rank"], message["step"]) == (Kind.PROGRESS, 3, 41)


def test_an_exit_has_failed_unless_the_entry_returned() -> None:
    assert not Exit(0, 1, code=0, signal=None, returned=True, ts=0.0).failed
    assert Exit(0, 1, code=0, signal=None, returned=False, ts=0.0).failed
    assert Exit(0, 1, code=1, signal=None, returned=False, ts=0.0).failed
    assert Exit(0, 1, code=None, signal=9, returned=False, ts=0.0).failed
    assert Exit(0, 1, code=None, signal=11, returned=True, ts=0.0).failed


def test_signals_without_a_name_are_numbers() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"
