"""A process that has imported what a script needs, and becomes a rank of it when told.

Run by its path with the script's own interpreter, which need not have Meshwright: it imports the
standard library alone. `argv`: descriptor of a socket, then modules to import. It writes one byte
when warm, and reads one line of JSON: `env`, `log`, and `argv` (what follows the interpreter).
"""

import sys

del sys.path[0]  # the folder of this file: its neighbours are not the script's

import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import socket  # noqa: E402
from typing import Any  # noqa: E402


def main() -> None:
    """Import, wait, be the rank."""
    with socket.socket(fileno=int(sys.argv[1])) as control:
        sys.path.insert(0, "")
        for name in sys.argv[2:]:
            importlib.import_module(name)
        del sys.path[0]
        with contextlib.suppress(BrokenPipeError):  # the order has come already
            control.sendall(b"w")
        line = b""
        with contextlib.suppress(ConnectionError), control.makefile("rb") as orders:
            line = orders.readline()
    if line:  # else whoever might need us is gone
        _become(json.loads(line))


def _become(order: dict[str, Any]) -> None:
    os.environ.update(order["env"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    argv = order["argv"]
    if argv[0] == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))  # noqa: PTH100, PTH120
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
