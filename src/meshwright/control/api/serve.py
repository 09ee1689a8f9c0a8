"""The process that answers: the application on a listening socket."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from meshwright.control.api.app import create_app
from meshwright.control.engines.every import all_engines
from meshwright.control.host import Host

_TURN_S = 0.0005
_QUIET_S = 5  # of a line on which nothing comes, before it is closed


def serve(
    listener: socket.socket,
    line: socket.socket,
    home: Path,
    url: str,
    me: str,
    kube_api: str | None,
) -> None:
    """Answer until a signal ends it. Begins when the process at the other end of `line`, which
    acts, says by a byte that the database is open; ends at once if that says nothing any more."""
    if not line.recv(1):
        return
    app = create_app(Host(home, url, me, all_engines(kube_api), line))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_QUIET_S,
        timeout_graceful_shutdown=2,
        server_header=False,
        lifespan="off",
    )

    class Server(uvicorn.Server):
        """Tells streams, which would go on for ever, that it ends."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.ending.set()
            super().handle_exit(sig, frame)

    # A request goes from thread to thread, and would wait at each for the whole turn of another.
    sys.setswitchinterval(_TURN_S)
    Server(config).run(sockets=[listener])
