"""`meshwright up`: the service, on this machine."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.base.errors import ConfigError, InputError
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.cli.service import ADDRESS_FILE, default_home

if TYPE_CHECKING:
    from meshwright.control.host import Host

_TURN_S = 0.0005
_QUIET_S = 5  # of a line on which nothing comes, before it is closed


def up(
    home: Annotated[
        Path | None, typer.Option(help="Folder of all it keeps; default MESHWRIGHT_HOME.")
    ] = None,
    db: Annotated[
        str | None,
        typer.Option("--db", metavar="URL", help="postgresql://...; default: SQLite in --home."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on, of loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8470,
    kube_api: Annotated[
        str | None, typer.Option(metavar="URL", help="API server, for engine kubernetes.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Start the service; Ctrl-C ends it, and what it has started goes on."""
    # Imported here: no other command needs what a service is made of.
    from meshwright.control.engines.every import all_engines
    from meshwright.control.host import Host

    _refuse_far(host)
    where = home or default_home()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    listener = _listen(host, port)
    address = f"http://{_bracketed(host)}:{listener.getsockname()[1]}"
    with Host(where, db, all_engines(kube_api)) as service:
        said = {"url": address, "pid": os.getpid(), "home": str(service.home)}
        _write_address(service.home / ADDRESS_FILE, said)
        if as_json:
            print_json(said)
        else:
            log_console().print(f"{address}  (home {service.home}; Ctrl-C ends it)", soft_wrap=True)
        _serve(service, listener)
    return 0


def _serve(service: Host, listener: socket.socket) -> None:
    import uvicorn

    from meshwright.control.api.app import create_app

    app = create_app(service)
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


def _refuse_far(host: str) -> None:
    try:
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    if not near:
        fix = "the service has no users yet, so it listens on loopback only; give 127.0.0.1"
        raise ConfigError("--host", host, fix)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, for asyncio lets small answers go at once only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # who reads our address may call at once, and waits
    except OSError as error:
        listener.close()
        raise InputError(
            f"--port {port}: {error.strerror}; give another one, or 0 for any"
        ) from error
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _write_address(path: Path, said: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(said))
    partial.replace(path)
