"""Between the process that acts and the one that answers: figures one way, "look now" the other.

A frame of figures is a line of JSON and, after it, as many bytes as the line says. Figures may be
lost where the other side is slow: the next second brings new ones.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.control.samples import Recorder, Rows

_WAITING = 256  # frames
_END_S = 2.0


class Teller:
    """The end of who acts; `wake` is called for each "look now"."""

    def __init__(self, line: socket.socket, wake: Callable[[], None]) -> None:
        self._line, self._wake = line, wake
        self._frames: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._threads = [
            threading.Thread(target=self._send, name="tell-figures", daemon=True),
            threading.Thread(target=self._listen, name="hear-wakes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def sample(self, cluster: str, ts: float, sample: Rows) -> None:
        """Figures of a cluster at `ts`, of shape (chips, figures)."""
        plain = np.ascontiguousarray(sample, np.float32)
        words = {"cluster": cluster, "ts": ts, "shape": plain.shape}
        self._put(json.dumps(words).encode() + b"\n" + plain.tobytes())

    def gone(self, cluster: str | None) -> None:
        """Figures of a cluster, or of all of them (None), are no longer followed here."""
        self._put(json.dumps({"gone": cluster}).encode() + b"\n")

    def close(self) -> None:
        """End; the other side sees it."""
        self._put(None)
        self._threads[0].join(_END_S)
        self._line.close()

    def _put(self, frame: bytes | None) -> None:
        try:
            self._frames.put_nowait(frame)
        except queue.Full:
            return

    def _send(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._line.sendall(frame)
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # who answers is gone, and the service ends with it

    def _listen(self) -> None:
        try:
            while self._line.recv(4096):
                self._wake()
        except OSError:
            return


class Hearer:
    """The end of who answers; `made` makes the recorder of a cluster, with what is kept of it."""

    def __init__(self, line: socket.socket, made: Callable[[str, int, float], Recorder]) -> None:
        self._line, self._made = line, made
        self._recorders: dict[str, Recorder] = {}
        self._thread = threading.Thread(target=self._listen, name="hear-figures", daemon=True)
        self._thread.start()

    def recorder(self, cluster: str) -> Recorder | None:
        """What the service that leads, if it is this one, has seen of a cluster of late."""
        return self._recorders.get(cluster)

    def wake(self) -> None:
        """Something was asked for."""
        try:
            self._line.send(b".", socket.MSG_DONTWAIT)
        except OSError:
            return  # it has wakes enough before it, or ends

    def _listen(self) -> None:
        with self._line.makefile("rb") as stream:
            while line := stream.readline():
                words: dict[str, Any] = json.loads(line)
                if "gone" in words:
                    self._forget(words["gone"])
                    continue
                chips, figures = words["shape"]
                data = stream.read(4 * chips * figures)
                rows = np.frombuffer(data, np.float32).reshape(chips, figures)
                self._take(words["cluster"], words["ts"], rows)

    def _take(self, cluster: str, ts: float, rows: Rows) -> None:
        recorder = self._recorders.get(cluster)
        if recorder is None or recorder.chips != len(rows):
            recorder = self._made(cluster, len(rows), ts)
            self._recorders[cluster] = recorder
        recorder.add(ts, rows)

    def _forget(self, cluster: str | None) -> None:
        for gone in [cluster] if cluster else list(self._recorders):
            self._recorders.pop(gone, None)
