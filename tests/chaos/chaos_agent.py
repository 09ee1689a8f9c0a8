"""The agent of one node, on the machine that it is started on: says "warm", and is told on its
standard input where it belongs, as JSON of `agent.Home`."""

from __future__ import annotations

import importlib
import json
import sys

from meshwright.conduct.agent import Agent, Home

if __name__ == "__main__":
    importlib.import_module("meshwright.train.worker")  # once for all members
    sys.stdout.write("warm\n")
    sys.stdout.flush()
    Agent(Home(**json.loads(sys.stdin.readline()))).serve()
