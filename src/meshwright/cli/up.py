"""`meshwright up`: the service, on this machine."""

from __future__ import annotations

import ipaddress
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.errors import ConfigError, InputError
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.cli.service import ADDRESS_FILE, default_home
from meshwright.conduct.protocol import die_with_parent

_FORK = multiprocessing.get_context("fork")
_LOOK_S = 0.5
_END_S = 5.0


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
    from meshwright.control.actor import Actor
    from meshwright.control.engines.every import all_engines
    from meshwright.control.service.events import new_id

    _refuse_far(host)
    where = (home or default_home()).resolve()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    listener = _listen(host, port)
    address = f"http://{_bracketed(host)}:{listener.getsockname()[1]}"
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    url, me = db or f"sqlite:///{where / 'service.db'}", new_id("svc")
    ours, theirs = socket.socketpair()
    # Forked before there are threads. It has an interpreter of its own, so that answers do not
    # wait for what the other half computes.
    answers = _FORK.Process(
        target=_answer, args=(ours, listener, theirs, where, url, me, kube_api), daemon=True
    )
    answers.start()
    theirs.close()
    with Actor(where, url, me, all_engines(kube_api), ours):
        ours.sendall(b"\n")
        said = {"url": address, "pid": os.getpid(), "home": str(where)}
        _write_address(where / ADDRESS_FILE, said)
        if as_json:
            print_json(said)
        else:
            log_console().print(f"{address}  (home {where}; Ctrl-C ends it)", soft_wrap=True)
        return _until_ended(answers)


def _answer(
    others: socket.socket, listener: socket.socket, line: socket.socket, *rest: Any
) -> None:
    """The process that answers; it lives no longer than the one that acts."""
    die_with_parent()
    others.close()
    from meshwright.control.api.serve import serve

    serve(listener, line, *rest)


def _until_ended(answers: ForkProcess) -> int:
    """Wait for a signal, then have the process that answers end too; the command's exit code."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ended.set())
    while not ended.wait(_LOOK_S) and answers.is_alive():
        continue
    if not ended.is_set():
        log_console().print(f"the process that answers has ended ({answers.exitcode}), so this one")
        return 1
    answers.terminate()
    answers.join(_END_S)
    return 0


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
