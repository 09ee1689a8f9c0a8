"""A real PostgreSQL of its own, on a socket in a folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 60.0


def programs() -> Path | None:
    """The folder of initdb and postgres; None where they are not installed."""
    found = shutil.which("initdb")
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).resolve().parent if found else known[-1].parent if known else None


@contextmanager
def postgres() -> Iterator[str]:
    """The address of an empty database, while the block lasts. It does not run as root, so root
    lends it a user."""
    bin_folder = programs()
    assert bin_folder is not None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: it holds a socket
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    user = user if os.geteuid() == 0 else []
    if user:
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"
    make = [*user, str(bin_folder / "initdb"), "-D", str(data), "-U", "test", "--auth=trust"]
    subprocess.run(make, check=True, capture_output=True, timeout=LIMIT_S, cwd=folder)
    serve = [*user, str(bin_folder / "postgres"), "-D", str(data), "-k", str(folder)]
    serve += ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=60"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / ".s.PGSQL.5432").exists():
            assert server.poll() is None and time.monotonic() < deadline, (
                folder / "log"
            ).read_text()
            time.sleep(0.05)
        yield f"postgresql://test@/postgres?host={folder}"
    finally:
        server.send_signal(signal.SIGQUIT)
        server.wait(LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)
