"""What a run says of itself in its events, followed as they are written."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.events import Kind
from meshwright.control.engines.slurm_decide import End

_ENDS = {
    Kind.RUN_FINISHED: End.FINISHED,
    Kind.RUN_INTERRUPTED: End.INTERRUPTED,
    Kind.RUN_FAILED: End.FAILED,
}


@dataclass
class Story:
    """Of one run. `follow` reads on; what it then says is of the last start at or after a time."""

    run_dir: Path
    started_s: float = 0.0
    world: int = 0
    error: str = ""
    end: End = End.NONE
    _ready: set[int] = field(default_factory=set)
    _offset: int = 0
    _inode: int = 0

    def follow(self) -> None:
        """Take in what is new. A file that was replaced is read from its beginning."""
        path = self.run_dir / "events.jsonl"
        try:
            with path.open("rb") as file:
                if self._inode != (inode := os.fstat(file.fileno()).st_ino):
                    self._inode, self._offset = inode, 0
                    self._begin(0.0, 0)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:  # a torn line that is mended on opening
                continue

    def since(self, at_s: float) -> tuple[bool, End, str]:
        """Whether all ranks have been ready, the last word and the error, of a start since then."""
        if self.started_s < at_s:
            return False, End.NONE, ""
        return 0 < self.world <= len(self._ready), self.end, self.error

    def _begin(self, ts: float, world: int) -> None:
        self.started_s, self.world, self.end, self.error = ts, world, End.NONE, ""
        self._ready = set()

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == Kind.RUN_STARTED:
            self._begin(event["ts"], event["world"])
            if event.get("adopted"):  # they train all the while
                self._ready = set(range(self.world))
        elif kind == Kind.RANK_READY:
            self._ready.add(event["rank"])
        elif kind in _ENDS:
            self.end, self.error = _ENDS[Kind(kind)], event.get("error") or ""
