"""What verification found about commits: that a commit was read whole, or that it is bad."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from meshwright.checkpoint.holding import Holding

FOLDER = "marks/"
_MARK = re.compile(r"marks/([0-9a-f]{16})/(verified|bad)-(\d+)\.json")


@dataclass(frozen=True)
class Marks:
    """When commits were last found `verified` and `bad`, by id, in nanoseconds since 1970. A commit
    that was repaired and verified is bad no more."""

    verified: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)

    def trust(self, commit: str) -> bool:
        """Whether chunks of the commit of that id may be used again. Once one was found bad, others
        may share what is wrong in it: only those that were verified since may be."""
        return self.verified.get(commit, 0) >= max(self.bad.values(), default=0)


def read_marks(holding: Holding) -> Marks:
    """All marks of a store. Names say everything, so no file is read."""
    when: dict[str, dict[str, int]] = {"verified": {}, "bad": {}}
    for entry in holding.files.names(FOLDER):
        if match := _MARK.fullmatch(entry.name):
            of = when[match[2]]
            of[match[1]] = max(of.get(match[1], 0), int(match[3]))
    verified, bad = when["verified"], when["bad"]
    return Marks(
        {one: at for one, at in verified.items() if at > bad.get(one, 0)},
        {one: at for one, at in bad.items() if at >= verified.get(one, 0)},
    )


def mark(holding: Holding, commit: str, found: str, why: str = "") -> None:
    """Note that the commit of that id was found "verified" or "bad". Raises CheckpointError."""
    now_ns = time.time_ns()
    while not holding.create_json(
        f"{FOLDER}{commit}/{found}-{now_ns}.json", {"commit": commit, "found": found, "why": why}
    ):
        now_ns += 1
