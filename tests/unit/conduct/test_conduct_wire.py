"""Lines between conductor and agents: whole, late, and from nobody but those who know the secret;
and what heartbeats say."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

import pytest

from meshwright.base.pulse import Phase, Pulse
from meshwright.conduct.beats import at_work, decode_sample, encode_sample, progress_key
from meshwright.conduct.verdicts import Sample
from meshwright.conduct.wire import Caller, Door, Link, proof


def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


def meet(door: Door, caller: Caller) -> tuple[dict[str, object] | None, bool]:
    """Both sides, until neither has anything to say."""
    hello, trusted = None, False
    for _ in range(4):
        hello = hello or door.answer()
        trusted = trusted or caller.advance()
    return hello, trusted


def test_both_prove_that_they_know_the_secret() -> None:
    ours, theirs = pair()
    assert meet(Door(ours, "s"), Caller(theirs, "s", {"node": 3})) == ({"node": 3}, True)
    ours.send({"after": 1})  # what follows the proof at once is not lost
    assert theirs.receive() == [{"after": 1}]
    ours.close()
    theirs.close()


def test_an_agent_with_another_secret_is_refused() -> None:
    ours, theirs = pair()
    assert meet(Door(ours, "s"), Caller(theirs, "t", {"node": 3})) == (None, False)
    assert ours.broken
    ours.close()
    theirs.close()


def test_a_conductor_with_another_secret_is_refused() -> None:
    ours, theirs = pair()
    caller = Caller(theirs, "s", {"node": 3})
    ours.send({"nonce": "x"})
    assert not caller.advance()
    [said] = ours.receive()
    ours.send({"proof": proof("t", "conductor", "x", str(said["nonce"]))})
    assert not caller.advance()
    assert theirs.broken
    ours.close()
    theirs.close()


def test_a_proof_cannot_be_turned_round() -> None:
    assert proof("s", "agent", "a", "b") != proof("s", "conductor", "a", "b")
    assert proof("s", "agent", "a", "b") != proof("s", "agent", "b", "a")


@pytest.mark.parametrize("said", [b"nonsense\n", b"[1]\n", b'"x"\n', b"x" * (5 << 20)])
def test_what_is_no_object_breaks_the_link(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.setblocking(False)
    for _ in range(2000):
        with contextlib.suppress(BlockingIOError):
            said = said[theirs.send(said) :] if said else b""
        link.receive()
        if link.broken:
            break
    assert link.broken
    theirs.close()
    link.close()


def test_what_cannot_be_sent_at_once_is_sent_later() -> None:
    ours, theirs = pair()
    for index in range(2000):
        ours.send({"index": index, "filler": "x" * 200})
    assert ours.has_unsent
    found: list[int] = []
    while len(found) < 2000:
        found += [int(said["index"]) for said in theirs.receive()]
        ours.flush()
    assert found == list(range(2000))
    theirs.close()
    assert ours.receive() == [] and ours.broken
    ours.close()


PULSE = Pulse(5, 2, 7, Phase.VOTE, 9, 8, 3, 10, 11, 12, 13)


def test_a_sample_survives_the_wire() -> None:
    sample = Sample(1, 4, "stage 0", PULSE, 0.5, "S", 0.25)
    assert decode_sample(encode_sample(sample), "stage 0") == sample


def test_waiting_is_neither_work_nor_progress() -> None:
    waits = Sample(1, 4, "", PULSE, 0.0)
    assert not at_work(waits)
    assert at_work(replace(waits, pulse=PULSE._replace(waits_for=None)))
    assert not at_work(replace(waits, pulse=PULSE._replace(waits_for=None), state="T"))
    assert not at_work(replace(waits, pulse=PULSE._replace(waits_for=None, phase=Phase.IDLE)))
    assert progress_key(PULSE._replace(writes=6, stamp_ns=11, waits_for=2)) == progress_key(PULSE)
    assert progress_key(PULSE._replace(done=9)) != progress_key(PULSE)
