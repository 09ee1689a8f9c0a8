"""S3 storage of moto's server on this machine, which can fail, and take what was torn off."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from meshwright.checkpoint.remote import Patience, RemoteFiles, open_remote

Fault = Callable[[str, str], str | None]
"""For a method and a path: "down" (an error and nothing is done), "lost" (it is done, and an error
is the answer), or None."""
_DOWN = b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"


@dataclass
class Storage:
    """Its address, what was asked of it, and what it does wrong, which may be changed."""

    url: str = ""
    bucket: str = field(default_factory=lambda: f"b-{uuid4().hex}")  # moto's are global
    folder: str = "run"
    fault: Fault = lambda *_: None
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """A folder of it."""
        return f"s3://{self.bucket}/{self.folder}/run"

    def files(self, tries: int = 3) -> RemoteFiles:
        """The folder, without waiting between tries."""
        options = {
            "key": "k",
            "secret": "s",
            "endpoint_url": self.url,
            "config_kwargs": {"retries": {"max_attempts": 0}},
            "skip_instance_cache": True,
        }
        found = open_remote(self.address, options)
        found.files.retries = 1  # leave it to us
        return RemoteFiles(found.files, found.root, Patience(tries, sleep=lambda _: None))

    def tear(self, path: str, content: bytes) -> None:
        """Begin to put an object, and go away when half of it is sent."""
        host, port = self.url.removeprefix("http://").split(":")
        head = f"PUT /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + content[: len(content) // 2])

    def around(self, app: Any) -> Any:
        """`app` with the faults."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.asked.append((method, path))
            fault = self.fault(method, path)
            if fault == "lost":
                list(app(environ, lambda *_: None))
            if fault:
                start("503 Service Unavailable", [("Content-Type", "application/xml")])
                return [_DOWN]
            return app(environ, start)  # type: ignore[no-any-return]

        return answer


@contextmanager
def serving() -> Iterator[Storage]:
    """A server of its own, with a bucket."""
    moto = importlib.import_module("moto.moto_server.werkzeug_app")
    werkzeug = importlib.import_module("werkzeug.serving")

    class Quiet(werkzeug.WSGIRequestHandler):  # type: ignore[misc, name-defined]
        def log(self, *_: object) -> None:
            pass

    storage = Storage()
    app = storage.around(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = werkzeug.make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    storage.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        storage.files().files.mkdir(storage.bucket)
        yield storage
    finally:
        server.shutdown()
        thread.join()
