"""How a command asks something of the conductor of a run that goes on."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.base.errors import InputError, RunError
from meshwright.conduct.rundir import ADDRESS_FILE, SECRET_FILE
from meshwright.conduct.wire import Caller


def ask(run: Path, request: Mapping[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
    """The conductor's answer. Raises InputError where nobody conducts the run in `run`, RunError
    where it does not answer in time."""
    try:
        host, port = json.loads((run / ADDRESS_FILE).read_text())["address"]
        secret = (run / SECRET_FILE).read_text()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{run}: no run that survives losses; set resilience.redundancy and start it"
        ) from error
    deadline_s = time.monotonic() + timeout_s
    caller = Caller.dial((host, port), secret, {"user": True}, timeout_s)
    if caller is None:
        raise InputError(
            f"{run}: nobody conducts it now; start it with `meshwright train --resume`"
        )
    link, trusted = caller.link, False
    try:
        while not link.broken and (left_s := deadline_s - time.monotonic()) > 0:
            select.select([link], [], [], left_s)
            if not trusted:
                trusted = caller.advance()
                if trusted:
                    link.send(request)
            elif (answer := link.receive_one()) is not None:
                return answer
    finally:
        link.close()
    raise RunError(f"{run}: its conductor does not answer")
