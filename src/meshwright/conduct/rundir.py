"""A run directory, held by the one conductor that writes it.

```
runs/<id>/ job.toml  plan.json  events.jsonl  metrics.jsonl  logs/  checkpoints/
```
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.base.errors import InputError, RunError
from meshwright.base.events import Kind
from meshwright.conduct.protocol import Message, encode

ADDRESS_FILE = "conductor.json"  # where agents of a run that survives find its conductor
SECRET_FILE = ".secret"  # by which they know each other
_AGENT_LOCK = ".agent-"
_DONE = b"done\n"
_ENVELOPE = ("ts", "kind", "rank")  # of a worker's message; not part of a line of metrics


class RunDir:
    """An open run directory: this process holds its lock until `close()` or its own end.

    Made by `create`, `create_at` or `open_existing`. A line is on its way to the disk when the
    call that wrote it returns; a line torn by the death of an earlier conductor is cut on opening.
    """

    def __init__(self, path: Path) -> None:
        """Lock and open a directory that exists. Raises InputError if another process holds it."""
        self.path = path
        self._lock = _acquire(path)
        try:
            self.logs.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            for file in (self.events, self.metrics):
                file.touch()
                _cut_torn_line(file)
            self._seq, self._incarnation = _count(self.events)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """A new run directory `root/name-N`, N one above the highest there (from 1)."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_make_next(root, name))
        except OSError as error:
            raise _cannot_write(root, error) from error

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Raise InputError if something is at `path` already; writes nothing."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            _refuse_if_held(path)
            raise InputError(
                f"{path}: exists and is not empty; give another directory, "
                "or go on with the run in it by --resume"
            )

    @classmethod
    def create_at(cls, path: Path) -> Self:
        """A new run directory at `path`. Raises InputError if something is there already."""
        cls.refuse_taken(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            return cls(path)
        except OSError as error:
            raise _cannot_write(path, error) from error

    @classmethod
    def open_existing(cls, path: Path) -> Self:
        """The run at `path`, to go on with. Raises InputError if there is none, or it is in use."""
        if not (path / "events.jsonl").is_file():
            raise InputError(f"{path}: not a run directory; give one that `meshwright train` made")
        try:
            return cls(path)
        except OSError as error:
            raise _cannot_write(path, error) from error

    @property
    def id(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name

    @property
    def events(self) -> Path:
        """One line per event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per step, keys of `base.events.Metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """One file per rank."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Left to the trainer."""
        return self.path / "checkpoints"

    @property
    def incarnation(self) -> int:
        """How often the run was started, this time included once RUN_STARTED is written."""
        return self._incarnation

    def write_text(self, name: str, text: str) -> Path:
        """Put a whole file into the directory, never half of one; its path."""
        return _replace(self.path / name, text.encode())

    def append_event(self, message: Mapping[str, Any]) -> Message:
        """Append a message with at least `kind`; the event as it was stored.

        Raises RunError if the disk does not take it.
        """
        self._seq += 1
        self._incarnation += message["kind"] == Kind.RUN_STARTED
        stamp = {"seq": self._seq, "run": self.id, "incarnation": self._incarnation}
        event = {"ts": time.time(), **message, **stamp}
        _append(self.events, event)
        return event

    def append_metrics(self, message: Mapping[str, Any]) -> None:
        """Append one step's METRICS message, without what every message has."""
        line = {key: value for key, value in message.items() if key not in _ENVELOPE}
        _append(self.metrics, line)

    def secret(self) -> str:
        """What only the conductor and the agents of this run know; made when first asked for."""
        path = self.path / SECRET_FILE
        if not path.exists():
            partial = path.with_name(f"{SECRET_FILE}.partial")
            partial.touch(mode=0o600)
            partial.write_text(secrets.token_hex(32))
            partial.replace(path)
        return path.read_text()

    def generation(self) -> int:
        """How many conductors this run has had that spoke to agents."""
        try:
            return int(json.loads((self.path / ADDRESS_FILE).read_text())["generation"])
        except (OSError, ValueError, KeyError):
            return 0

    def next_member(self) -> int:
        """A number that no member of a run that survives has had."""
        found = (re.fullmatch(r"member-([0-9]+)\.log", log.name) for log in self.logs.iterdir())
        return max((int(name[1]) + 1 for name in found if name), default=0)

    def last_step(self) -> int:
        """The last step with metrics; 0 if none."""
        return max((line["step"] for line in read_lines(self.metrics)), default=0)

    def drop_metrics_after(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed run does again."""
        kept = (line for line in read_lines(self.metrics) if line["step"] <= step)
        _replace(self.metrics, b"".join(map(encode, kept)))

    def restore(self, said: Iterable[Message]) -> None:
        """Write down METRICS and EVALUATED messages that a checkpoint has kept, where they are
        missing: an earlier conductor may have died with them in its hands."""
        known = {(Kind.METRICS, line["step"]) for line in read_lines(self.metrics)}
        known |= {(event["kind"], event.get("step")) for event in read_lines(self.events)}
        for message in said:
            if (message["kind"], message["step"]) in known:
                continue
            if message["kind"] == Kind.METRICS:
                self.append_metrics(message)
            else:
                self.append_event(message)

    def close(self) -> None:
        """Let go of the lock. Closing twice is allowed."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def lock_agent(run: Path, node: int) -> int:
    """The descriptor by which the agent of `node` shows that it lives."""
    lock = os.open(run / f"{_AGENT_LOCK}{node}", os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    return lock


def mark_done(lock: int) -> None:
    """Show that an agent ends because nothing is left to do."""
    os.pwrite(lock, _DONE, 0)


def is_done(run: Path, node: int) -> bool:
    """Whether the last agent of `node` has ended so."""
    path = run / f"{_AGENT_LOCK}{node}"
    return path.exists() and path.read_bytes() == _DONE


def living_agents(run: Path) -> list[int]:
    """The nodes whose agents live, whoever started them."""
    return sorted(
        int(lock.name.removeprefix(_AGENT_LOCK))
        for lock in run.glob(f"{_AGENT_LOCK}*")
        if _is_held(lock)
    )


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_lines(path: Path) -> Iterator[Message]:
    """The objects of a JSON-lines file; a last line without its end is skipped.

    Raises InputError with the number of a line that is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = json.loads(line)
            except ValueError:
                fields = None
            if not isinstance(fields, dict):
                raise InputError(f"{path}:{number}: not a JSON object; mend the line or remove it")
            yield fields


def _count(events: Path) -> tuple[int, int]:
    """The last `seq` of a file of events, and how many starts of the run it tells of."""
    seq = starts = 0
    for event in read_lines(events):
        if not {"seq", "kind"} <= event.keys():
            raise InputError(f"{events}: holds other things than events; give another directory")
        seq = event["seq"]
        starts += event["kind"] == Kind.RUN_STARTED
    return seq, starts


def _make_next(root: Path, name: str) -> Path:
    pattern = re.compile(re.escape(name) + r"-([0-9]+)")
    taken = [int(found[1]) for entry in root.iterdir() if (found := pattern.fullmatch(entry.name))]
    number = max(taken, default=0) + 1
    while True:
        path = root / f"{name}-{number}"
        try:
            path.mkdir()
        except FileExistsError:  # another run took it in this moment
            number += 1
        else:
            return path


def _acquire(path: Path) -> int:
    """Lock the directory; the descriptor that holds the lock. The kernel frees it at our end."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode().strip()
        os.close(lock)
        raise InputError(
            f"{path}: in use by process {holder}; wait for it to end, stop it with "
            f"`kill {holder}`, or give another directory"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _refuse_if_held(path: Path) -> None:
    if (path / ".lock").is_file():
        os.close(_acquire(path))


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _append(path: Path, fields: Mapping[str, Any]) -> None:
    try:
        with path.open("ab") as file:
            file.write(encode(fields))
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def _replace(path: Path, data: bytes) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written ({error.strerror}); give another directory")
