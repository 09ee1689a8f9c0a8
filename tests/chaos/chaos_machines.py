"""A run whose conductor is on the first of two machines: `python chaos_machines.py FOLDER SPACE
HOSTS ARGS`. The agent of node 1 is on the machine `SPACE`, which has the addresses `HOSTS`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from meshwright.conduct.agent import Home
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.conduct.muster import Muster
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.surviving import run
from meshwright.plan.job import Job

AGENT = str(Path(__file__).with_name("chaos_agent.py"))
ENTRY = "meshwright.train.worker"


class Machines(Fleet):
    """Node 1 is on another machine; nobody starts it again there."""

    agent: subprocess.Popen[str]

    def spawn(self, node: int, lease_s: float) -> None:
        """See `Fleet`."""
        if node == 0:
            super().spawn(node, lease_s)
        elif self.agent.stdin is not None and not self.agent.stdin.closed:
            home = json.dumps(asdict(Home(node, str(self._run), self._secret, lease_s)))
            self.agent.stdin.write(home + "\n")
            self.agent.stdin.close()


def begin(space: str, hosts: str) -> subprocess.Popen[str]:
    """An agent on the other machine."""
    command = ["ip", "netns", "exec", space, sys.executable, AGENT]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **one_thread, HOSTS_VARIABLE: hosts}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def main(folder: str, space: str, hosts: str, words: str) -> None:
    """The whole run."""
    args = json.loads(words)
    muster = Muster(Job.model_validate(args["job"]))
    with (
        begin(space, hosts) as agent,
        Machines(ENTRY) as fleet,
        RunDir.create_at(Path(folder)) as rundir,
    ):
        try:
            fleet.agent = agent
            assert agent.stdout is not None and agent.stdout.readline() == "warm\n"
            while not fleet.wait_warm(0.1):
                pass
            end = run(fleet, rundir, muster, f"{ENTRY}:main", args, lambda _: None, lambda: 0)
            assert end.error is None, end
        finally:
            agent.kill()


if __name__ == "__main__":
    main(*sys.argv[1:5])
