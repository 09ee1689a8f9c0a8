"""The transit engine of Vault over HTTP, as much of it as a store's keys need.

Written by Vault's documentation of the API and held against the answers of a real OpenBao 2.7.2:
paths, replies and errors are the same, and the tests of `keys/vault.py` run against either.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TOKEN = "root"


class RefusedError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class Transit:
    """Named keys with versions. `busy` counts answers of 503 that come first."""

    def __init__(self) -> None:
        self.keys: dict[str, list[bytes]] = {}
        self.derived: set[str] = set()
        self.calls: list[str] = []
        self.busy = 0

    def answer(self, token: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        mount, *operation, name = path.removeprefix("/v1/").split("/")
        self.calls.append("/".join(operation))
        if self.busy:
            self.busy -= 1
            raise RefusedError(503, "Vault is sealed")
        if token != TOKEN:
            raise RefusedError(403, "permission denied")
        if mount != "transit":
            raise RefusedError(404, f'no handler for route "{path}". route entry not found.')
        return self._transit("/".join(operation), name, body)

    def _transit(self, operation: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if operation == "keys":
            self.keys.setdefault(name, [os.urandom(32)])
            if body.get("derived"):
                self.derived.add(name)
            return {}
        if operation == "encrypt":  # makes a key that is not there, as Vault does
            self.keys.setdefault(name, [os.urandom(32)])
        if name not in self.keys:
            raise RefusedError(400, "encryption key not found")
        bound = body["context"].encode() if name in self.derived else b""
        if operation == "datakey/plaintext":
            plain = os.urandom(body.get("bits", 256) // 8)
            return {"plaintext": _text(plain), "ciphertext": self._seal(name, plain, bound)}
        if operation == "encrypt":
            plain = base64.b64decode(body["plaintext"])
            return {"ciphertext": self._seal(name, plain, bound)}
        plain = self._open(name, body["ciphertext"], bound)
        if operation == "rewrap":
            return {"ciphertext": self._seal(name, plain, bound)}
        return {"plaintext": _text(plain)}

    def _seal(self, name: str, plain: bytes, bound: bytes) -> str:
        nonce, version = os.urandom(12), len(self.keys[name])
        body = AESGCM(self.keys[name][-1]).encrypt(nonce, plain, bound)
        return f"vault:v{version}:{_text(nonce + body)}"

    def _open(self, name: str, text: str, bound: bytes) -> bytes:
        if not text.startswith("vault:v"):
            raise RefusedError(400, "invalid ciphertext: no prefix")
        version, _, encoded = text.removeprefix("vault:v").partition(":")
        try:
            sealed = base64.b64decode(encoded)
        except ValueError as error:
            raise RefusedError(400, "invalid ciphertext: could not decode base64") from error
        if int(version) > len(self.keys[name]):
            raise RefusedError(400, "invalid ciphertext: version is too new")
        if len(sealed) < 12:
            raise RefusedError(400, "invalid ciphertext length")
        try:
            key = AESGCM(self.keys[name][int(version) - 1])
            return key.decrypt(sealed[:12], sealed[12:], bound)
        except InvalidTag as error:
            raise RefusedError(400, "cipher: message authentication failed") from error


@contextmanager
def serving(transit: Transit) -> Iterator[str]:
    """Serve on a free port of this machine; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            token = self.headers.get("X-Vault-Token", "")
            reply: dict[str, Any]
            try:
                if self.path.endswith("/rotate"):
                    name = self.path.split("/")[-2]
                    transit.keys[name].append(os.urandom(32))
                    code, reply = 200, {"data": {}}
                else:
                    code, reply = 200, {"data": transit.answer(token, self.path, body)}
            except RefusedError as refusal:
                code, reply = refusal.code, {"errors": [str(refusal)]}
            content = json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _text(plain: bytes) -> str:
    return base64.b64encode(plain).decode()
