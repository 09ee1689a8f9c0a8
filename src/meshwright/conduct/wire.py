"""Lines of JSON between conductor and agents, and how each proves to the other that it is no
stranger: both know the secret of the run, and neither ever sends it.

```
conductor: {"nonce": A}
agent:     {"nonce": B, "proof": HMAC(secret, "agent" A B), "hello": {...}}
conductor: {"proof": HMAC(secret, "conductor" A B)}
```
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.conduct.protocol import LineBuffer, encode

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 22  # a table of thousands of members is a tenth of that
_MOST_UNSENT_BYTES = 1 << 26  # a peer that reads nothing while we say so much is gone


class Link:
    """A stream of JSON objects that never blocks: what cannot be sent yet waits for `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._lines = LineBuffer()
        self._unread: deque[dict[str, Any]] = deque()
        self._unsent = bytearray()
        self.broken = False

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` should be called once it can be written to."""
        return bool(self._unsent) and not self.broken

    def send(self, fields: Mapping[str, Any]) -> None:
        """Send one object, now or later; nothing happens once the link is broken."""
        self._unsent += encode(fields)
        self.flush()

    def flush(self) -> None:
        """Send as much as goes without waiting."""
        try:
            while self._unsent and not self.broken:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self.broken = len(self._unsent) > _MOST_UNSENT_BYTES
        except OSError:
            self.broken = True

    def receive(self) -> list[dict[str, Any]]:
        """The objects that have arrived. Sets `broken` at the end of the stream, or of sense."""
        self._read()
        found = list(self._unread)
        self._unread.clear()
        return found

    def receive_one(self) -> dict[str, Any] | None:
        """The next object, if one has arrived; those after it stay."""
        self._read()
        return self._unread.popleft() if self._unread else None

    def _read(self) -> None:
        try:
            while data := self._sock.recv(_READ_BYTES):
                for line in self._lines.feed(data):
                    self._unread.append(dict(json.loads(line)))
                if self._lines.unfinished_bytes > _MOST_LINE_BYTES:
                    break
            self.broken = True
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError):
            self.broken = True

    def close(self) -> None:
        """Let go of the socket."""
        self.broken = True
        self._sock.close()


def proof(secret: str, who: str, first: str, second: str) -> str:
    """What `who` shows to have known the secret when it saw both nonces."""
    said = f"{who}:{first}:{second}".encode()
    return hmac.new(secret.encode(), said, "sha256").hexdigest()


class Door:
    """The conductor's side of one connection that has not proved anything yet. Whom `admits` turns
    away gets no answer."""

    def __init__(
        self, link: Link, secret: str, admits: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> None:
        self.link, self.proven = link, False
        self._secret, self._admits = secret, admits
        self._nonce = secrets.token_hex(16)
        link.send({"nonce": self._nonce})

    def answer(self) -> dict[str, Any] | None:
        """What the other says of itself once it has proved itself, else None.

        A stranger's link is broken by then.
        """
        said = self.link.receive_one()
        if said is None:
            return None
        nonce, shown, hello = (said.get(key) for key in ("nonce", "proof", "hello"))
        if isinstance(nonce, str) and isinstance(shown, str) and isinstance(hello, dict):
            expected = proof(self._secret, "agent", self._nonce, nonce)
            self.proven = hmac.compare_digest(shown.encode(), expected.encode())
            if self.proven and self._admits(hello):
                self.link.send({"proof": proof(self._secret, "conductor", self._nonce, nonce)})
                return hello
        self.link.broken = True
        return None


class Caller:
    """The agent's side of a connection until both have proved themselves."""

    def __init__(self, link: Link, secret: str, hello: Mapping[str, Any]) -> None:
        self.link = link
        self._secret, self._hello = secret, hello
        self._nonce = secrets.token_hex(16)
        self._theirs = ""

    @classmethod
    def dial(
        cls, address: tuple[str, int], secret: str, hello: Mapping[str, Any], timeout_s: float
    ) -> Caller | None:
        """Connect, or None if nobody answers within `timeout_s`."""
        try:
            sock = socket.create_connection(address, timeout=timeout_s)
        except OSError:
            return None
        return cls(Link(sock), secret, hello)

    def advance(self) -> bool:
        """Read what has come; true once the other has proved itself. It has not if the link is
        broken."""
        said = self.link.receive_one()
        if said is None:
            return False
        if not self._theirs:
            self._theirs = str(said.get("nonce"))
            mine = proof(self._secret, "agent", self._theirs, self._nonce)
            self.link.send({"nonce": self._nonce, "proof": mine, "hello": self._hello})
            return False
        expected = proof(self._secret, "conductor", self._theirs, self._nonce)
        if hmac.compare_digest(str(said.get("proof")).encode(), expected.encode()):
            return True
        self.link.broken = True
        return False
