"""What ranks tell the committer: that they have written what they hold, and where its index is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.record import IndexRef

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_PART = re.compile(r"parts/([^/]+)/(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class Attempt:
    """A try to commit `step` by `ranks` ranks. `name` belongs to this try alone. `parent`: id of
    the commit that it goes on from; if it is given, the branch must still be there."""

    step: int
    name: str
    ranks: int
    parent: str | None = None


@dataclass(frozen=True)
class Part:
    """What `rank` has written for an attempt. `depth`: commits to replay to have it. `found`: packs
    that it need not write, since they were there, and that perhaps no commit needs."""

    attempt: Attempt
    rank: int
    depth: int
    index: IndexRef
    found: tuple[str, ...] = ()


def check_name(what: str, name: str) -> None:
    """Raises CheckpointError if `name` cannot be that of a branch, a tag or an attempt."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{what} {name!r}: takes letters, digits and . _ + - only, up to 100, "
            "and begins with a letter or digit"
        )


def parts_of(attempt: str) -> str:
    """Where the parts of an attempt are."""
    return f"parts/{attempt}/"


def run_of(attempt: str, step: int) -> str:
    """The run that an attempt is of, if its name is STEP-RUN-RANKS; else empty."""
    match = re.fullmatch(rf"{step:09d}-(.+)-\d+", attempt)
    return match[1] if match else ""


def part_name(attempt: Attempt, rank: int) -> str:
    """Where the part of a rank is."""
    return f"{parts_of(attempt.name)}{rank}-of-{attempt.ranks}.json"


def publish_part(holding: Holding, part: Part) -> bool:
    """Say that a rank has written. False if it has said so before. Raises CheckpointError."""
    attempt = part.attempt
    content = {
        "step": attempt.step,
        "attempt": attempt.name,
        "parent": attempt.parent,
        "rank": part.rank,
        "ranks": attempt.ranks,
        "depth": part.depth,
        "index": part.index.to_json(),
        "found": part.found,
    }
    bound = ("part", attempt.name, part.rank, attempt.ranks)
    return holding.create_json(part_name(attempt, part.rank), content, *bound)


def read_part(holding: Holding, name: str) -> Part:
    """The part in that file. Raises FileNotFoundError and CheckpointError."""
    match = _PART.fullmatch(name)
    if not match:
        raise CheckpointError(f"{holding.address}/{name}: is no part of an attempt; remove it")
    bound = ("part", match[1], int(match[2]), int(match[3]))
    raw: Mapping[str, Any] = holding.read_json(name, *bound)
    attempt = Attempt(raw["step"], raw["attempt"], raw["ranks"], raw["parent"])
    return Part(attempt, raw["rank"], raw["depth"], IndexRef(*raw["index"]), tuple(raw["found"]))


def index_bound(attempt: str, rank: int) -> tuple[object, ...]:
    """What the index of a rank is sealed to."""
    return "index", attempt, rank
