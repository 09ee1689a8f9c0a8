"""A conductor that can be killed: `python chaos_conductor.py FOLDER STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path

from surviving_scene import Scene, make_job

if __name__ == "__main__":
    job = make_job(4, cluster={"spares": 2, "nodes": 2})
    Scene(Path(sys.argv[1])).play(job, steps=int(sys.argv[2]), step_s=0.01)
