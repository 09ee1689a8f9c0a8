"""How long each member has been quiet, as far as it was watched.

Time counts in small pieces, one a look. Where the watcher itself did not run for a while - the
machine was suspended, or too busy - nobody is blamed for what nobody saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.pulse import Pulse
from meshwright.conduct.verdicts import Sample

# The most that one look may count. A gap between two looks that is longer was no watching.
LONGEST_LOOK_S = 0.25
# The same while a process is stopped. An agent that is on time looks more often; one that is late,
# as everybody is on a busy machine, has to look several times before it calls anybody frozen.
LONGEST_STOPPED_LOOK_S = 0.03


@dataclass
class Watch:
    """Turns looks at one member into samples; `rank` is None for a spare."""

    rank: int | None
    member: int
    role: str = ""
    _seen_s: float | None = None
    _pulse: Pulse | None = None
    _state: str = ""
    _quiet_s: float = 0.0
    _state_s: float = 0.0

    def look(self, now_s: float, pulse: Pulse, state: str) -> Sample:
        """What is known at `now_s`, of a clock that only goes forward.

        `state` is the letter of /proc/PID/stat. Times begin at 0 with the first look.
        """
        gap_s = 0.0 if self._seen_s is None else min(now_s - self._seen_s, LONGEST_LOOK_S)
        self._quiet_s = self._quiet_s + gap_s if pulse == self._pulse else 0.0
        state_gap_s = min(gap_s, LONGEST_STOPPED_LOOK_S) if state == "T" else gap_s
        self._state_s = self._state_s + state_gap_s if state == self._state else 0.0
        self._seen_s, self._pulse, self._state = now_s, pulse, state
        return Sample(self.rank, self.member, self.role, pulse, self._quiet_s, state, self._state_s)
