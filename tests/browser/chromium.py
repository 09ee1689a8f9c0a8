"""Headless Chromium by the DevTools protocol over a pair of pipes: what the tests of pages need."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ANSWER_S = 30.0
_POLL_S = 0.1


def installed() -> str | None:
    """The browser's program, of Debian's package or another."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._rest = b""
        self.complaints: list[str] = []  # of the page: exceptions, errors, refused by the policy

    def __enter__(self) -> Self:
        to_read, self._to = os.pipe()
        self._back, to_write = os.pipe()
        program = installed()
        assert program
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
        quiet = ("--disable-dev-shm-usage", "--disable-background-networking", "--lang=en-GB")
        command = [program, *flags, *quiet, "--remote-debugging-pipe"]
        # The protocol is spoken on descriptors 3 and 4.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command, f"--user-data-dir={self._profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._to)  # which ends it
        os.close(self._back)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(5)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Do one thing of the protocol; its result."""
        self._number += 1
        words: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            words["sessionId"] = self._session
        os.write(self._to, json.dumps(words).encode() + b"\0")
        end_s = time.monotonic() + _ANSWER_S
        while (message := self._next(end_s)) is not None:
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
        raise TimeoutError(f"{method}: no answer of the browser in {_ANSWER_S} s")

    def _next(self, end_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], max(0.0, end_s - time.monotonic()))[0]:
                return None
            data = os.read(self._back, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        elif message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """As a window of that size, of who prefers dark or light."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """What an expression is in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 90.0) -> Any:
        """What an expression is as soon as it is something."""
        end_s = time.monotonic() + seconds
        while not (found := self.ask(script)):
            assert time.monotonic() < end_s, f"after {seconds} s not yet: {script}\n{self.text()}"
            time.sleep(_POLL_S)
        return found

    def press(self, key: str) -> None:
        """A key, by its name."""
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        for kind in ("rawKeyDown", "keyUp"):
            words = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **words)

    def text(self) -> str:
        """All that is to be read."""
        return str(self.ask("document.body.innerText"))

    def picture(self, path: Path) -> None:
        """A PNG of the window."""
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))
