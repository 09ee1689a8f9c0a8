"""Slurm's commands, each with a bound on its time, and a picture of a cluster, kept fresh."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import ConfigError, RunError
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.control.engines.slurm_decide import Answer
from meshwright.control.engines.slurm_words import (
    JOB_FORMAT,
    NODE_FORMAT,
    PORT_FORMAT,
    Node,
    SlurmJob,
    parse_jobs,
    parse_nodes,
)

_CALL_S = 0.9  # of a call that somebody waits for
_POLL_S = 0.4
_FIRST_S = 0.6


@dataclass(frozen=True)
class Picture:
    """A cluster as its controller showed it; `asked_s` is when it was asked (wall clock)."""

    asked_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[SlurmJob, ...]

    def named(self, name: str) -> list[SlurmJob]:
        """The jobs of a name, oldest first."""
        return [job for job in self.jobs if job.name == name]


@dataclass(frozen=True)
class Commands:
    """How Slurm is spoken to. `settings` are added to the environment: SLURM_CONF, say."""

    settings: Mapping[str, str]

    def call(self, *words: str, timeout_s: float = _CALL_S) -> str:
        """What a command writes. Raises RunError with its own words, or where it is too slow."""
        try:
            done = subprocess.run(
                words,
                env={**os.environ, **self.settings},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise ConfigError(
                "engine", "slurm", f"there is no command {words[0]} here; install Slurm's clients"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{words[0]} did not answer within {timeout_s:g} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RunError(f"{words[0]}: {said[-1] if said else f'exit code {done.returncode}'}")
        return done.stdout

    def nodes(self, partition: str) -> tuple[Node, ...]:
        """Those of a partition, or of the default one. Raises as `call`."""
        where = ["-p", partition] if partition else []
        text = self.call("sinfo", "-h", "-N", *where, "-o", NODE_FORMAT)
        return parse_nodes(text, self.call("sinfo", "-h", "-N", *where, "-O", PORT_FORMAT))

    def jobs(self) -> tuple[SlurmJob, ...]:
        """All that this user has, ended ones as long as Slurm knows them. Raises as `call`."""
        return parse_jobs(self.call("squeue", "-h", "--me", "-t", "all", "-o", JOB_FORMAT))

    def submit(self, options: Sequence[str], script: Path) -> int:
        """The number of a new job. Raises as `call`; the job may be there all the same."""
        # Jobs get our environment; but addresses are each machine's own.
        own = ["env", f"--unset={HOSTS_VARIABLE}"]
        answer = self.call(*own, "sbatch", "--parsable", *options, str(script))
        return int(answer.strip().partition(";")[0])


class Watcher:
    """Asks one partition again and again, on a thread of its own, until `close`."""

    def __init__(self, commands: Commands, partition: str) -> None:
        self._commands, self._partition = commands, partition
        self._picture: Picture | None = None
        self.error = "not asked yet"
        self._first, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slurm", daemon=True)
        self._thread.start()

    def picture(self) -> Picture | None:
        """The newest; None if there never was one. Waits for the first for a moment."""
        self._first.wait(_FIRST_S)
        return self._picture

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(2 * _CALL_S)

    def _watch(self) -> None:
        while not self._over.is_set():
            asked_s = time.time()
            try:
                nodes, jobs = self._commands.nodes(self._partition), self._commands.jobs()
            except (RunError, ConfigError, ValueError) as error:
                self.error = str(error)
            else:
                self._picture, self.error = Picture(asked_s, nodes, jobs), ""
            self._first.set()
            self._over.wait(_POLL_S)


def ask_daemons(nodes: Sequence[Node], bound_s: float = 0.2) -> dict[str, Answer]:
    """Whether Slurm's daemon takes connections on each of the nodes. A machine that refuses one is
    there; of one that says nothing, nobody can tell."""
    answers = {node.name: Answer.SILENT for node in nodes}
    waiting: dict[int, tuple[str, socket.socket]] = {}
    poller = select.poll()
    for node in nodes:
        door = socket.socket(socket.AF_INET)
        door.setblocking(False)
        try:
            door.connect((node.address, node.port))
        except BlockingIOError:
            waiting[door.fileno()] = (node.name, door)
            poller.register(door, select.POLLOUT)
        except OSError as error:
            answers[node.name] = _meaning(error.errno or 0)
            door.close()
        else:
            answers[node.name] = Answer.YES
            door.close()
    deadline_s = time.monotonic() + bound_s
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left_s * 1e3):
            name, door = waiting.pop(descriptor)
            poller.unregister(descriptor)
            answers[name] = _meaning(door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            door.close()
    for _, door in waiting.values():
        door.close()
    return answers


def _meaning(number: int) -> Answer:
    if number == 0:
        return Answer.YES
    refused = number in (errno.ECONNREFUSED, errno.ECONNRESET)
    return Answer.REFUSED if refused else Answer.SILENT
