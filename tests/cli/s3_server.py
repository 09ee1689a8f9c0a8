"""An S3 server of moto's on this machine, which can be slow, fail and answer wrong."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Fault = Callable[[int], str | None]
"""For a block that is asked for the n-th time, from 1: "down" for an error, "wait", or None."""


@dataclass
class Server:
    """Its address, and how often blocks of a `.bin` were asked of it. `fault` may be changed."""

    url: str = ""
    fault: Fault = lambda _: None
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def env(self) -> dict[str, str]:
        """Of a process that is to use it, and to leave trying again to us."""
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_MAX_ATTEMPTS": "1"}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1", **keys}

    def around(self, app: Any) -> Any:
        """`app` with the faults."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".bin"):
                with self.lock:
                    self.asked += 1
                    number = self.asked
                match self.fault(number):
                    case "down":
                        start("503 Service Unavailable", [("Content-Type", "application/xml")])
                        return [b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"]
                    case "wait":
                        threading.Event().wait(0.05)
            return app(environ, start)  # type: ignore[no-any-return]

        return answer

    def files(self) -> Any:
        """It as a file system."""
        s3fs = importlib.import_module("s3fs")
        options = {"key": "k", "secret": "s", "endpoint_url": self.url}
        return s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)

    def put(self, folder: Path, bucket: str) -> str:
        """Upload a build; its address."""
        files = self.files()
        files.mkdir(bucket)
        for path in folder.iterdir():
            files.pipe_file(f"{bucket}/{folder.name}/{path.name}", path.read_bytes())
        return f"s3://{bucket}/{folder.name}"


@contextmanager
def serving() -> Iterator[Server]:
    """A server of its own."""
    moto = importlib.import_module("moto.moto_server.werkzeug_app")
    werkzeug = importlib.import_module("werkzeug.serving")
    server = Server()
    app = server.around(moto.DomainDispatcherApplication(moto.create_backend_app))
    running = werkzeug.make_server("127.0.0.1", 0, app, threaded=True)
    server.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        running.shutdown()
        thread.join()
