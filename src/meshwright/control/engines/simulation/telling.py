"""What a simulated run has to tell by a moment: its events, and metrics of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import ceil, inf
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.control.engines.simulation.course import Course, Phase, Piece
from meshwright.control.engines.simulation.dice import mix, uniform
from meshwright.control.engines.simulation.logbook import MARK, Logbook
from meshwright.control.engines.simulation.work import Work, loss, metrics
from meshwright.control.engines.simulation.world import step_at

ENDS = (Kind.RUN_FINISHED, Kind.RUN_INTERRUPTED, Kind.RUN_FAILED)
MOST_LINES = 256  # of metrics that are written at once: of more steps, an even choice
_MOST_EVENTS = 32  # checkpoints or evaluations, likewise
_STATE_BYTES = 14.0  # of a parameter in a checkpoint: bf16 weights, fp32 masters, two moments
_WIDTH_BYTES_S = 2e9  # at which a node saves
_HELD_OUT = 64 * 1024  # tokens

Events = list[dict[str, Any]]
Clock = Callable[[float], float]  # of a simulated second


def tell(
    course: Course, book: Logbook, begin_bytes: int, at_s: float, wall: Clock
) -> tuple[Events, list[dict[str, Any]]]:
    """Events and metrics that `book` lacks, by simulated second `at_s`."""
    step = int(step_at(course, min(at_s, course.ended_s)) + 1e-9)
    attempt = course.begun.attempt
    told = [
        (one.at_s, one.key, {"kind": one.kind, **one.fields})
        for one in course.told
        if one.at_s <= at_s and f"{attempt}/{one.key}" not in book.told
    ]
    told += [(then_s, key, said) for then_s, key, said in _saves(course, book, step)]
    told.sort(key=lambda one: (one[0], one[2]["kind"] in ENDS))
    events: Events = [
        {"ts": wall(then_s), **said, MARK: f"{attempt}/{key}"} for then_s, key, said in told
    ]
    last = max(book.last_since(begin_bytes), course.begun.resumed)
    pieces = _Pieces(course)
    lines = []
    for one in chosen(last, step, 1, MOST_LINES):
        piece = pieces.of(one)
        lines.append(
            asdict(metrics(course.begun.work, one, piece.step_s, piece.chips, course.spoiled))
        )
    return events, lines


def chosen(after: int, upto: int, every: int, most: int) -> list[int]:
    """Multiples of `every` in (after, upto], at most about `most`: fewer by powers of two where
    there are more, and always the last one."""
    first, last = after // every + 1, upto // every
    if last < first:
        return []
    stride = 1
    while (last - first + 1) // stride > most:
        stride *= 2
    found = list(range(ceil(first / stride) * stride, last + 1, stride))
    if not found or found[-1] != last:
        found.append(last)
    return [number * every for number in found]


class _Pieces:
    """By step: the piece of the course that it was done in, and when it was done."""

    def __init__(self, course: Course) -> None:
        self._pieces, self._ended_s = course.pieces, course.ended_s
        ends = [piece.step for piece in course.pieces[1:]]
        self._ends = [*ends, inf]
        self._at = 0

    def of(self, step: int) -> Piece:
        """Steps are asked for in ascending order."""
        while self._ends[self._at] < step - 1e-6 or self._pieces[self._at].step_s == inf:
            if self._at + 1 == len(self._pieces):
                break
            self._at += 1
        return self._pieces[self._at]

    def done_s(self, step: int) -> float:
        piece = self.of(step)
        if piece.step_s == inf:
            return piece.since_s
        return min(self._ended_s, piece.since_s + (step - piece.step) * piece.step_s)


def _saves(course: Course, book: Logbook, step: int) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Checkpoints and evaluations, those of its end included."""
    work, begun = course.begun.work, course.begun
    if not course.pieces:
        return
    first = max(book.saved, begun.resumed)
    found = chosen(first, step, work.every, _MOST_EVENTS)
    orderly = course.phase is Phase.FINISHED or (
        course.phase is Phase.STOPPED and not course.message
    )
    if orderly and step > first and step not in found:
        found.append(step)
    pieces = _Pieces(course)
    for one in found:
        yield pieces.done_s(one), f"checkpoint/{one}", _commit(work, book.run, one)
    evaluated = chosen(max(book.evaluated, begun.resumed), step, work.eval_every, _MOST_EVENTS)
    if course.phase is Phase.FINISHED and step > book.evaluated and step not in evaluated:
        evaluated.append(step)
    pieces = _Pieces(course)
    for one in evaluated:
        more = 0.01 + 0.01 * float(uniform(work.seed, one, 4)[0])
        said = {"kind": Kind.EVALUATED, "step": one, "loss": loss(work, one) + more}
        said |= {"tokens": _HELD_OUT, "bigram_loss": None, "unigram_loss": None}
        yield pieces.done_s(one), f"evaluated/{one}", said


def _commit(work: Work, run: Path, step: int) -> dict[str, Any]:
    size = work.params * _STATE_BYTES
    return {
        "kind": Kind.CHECKPOINT_COMMITTED,
        "step": step,
        "path": str(run / "checkpoints"),
        "commit": f"{int(mix(work.seed, step)[0]):016x}",
        "save_s": size / (_WIDTH_BYTES_S * max(1, work.world // 16)),
        "blocked_s": 0.0,
        "bytes": size,
        "stored_bytes": size,
    }
