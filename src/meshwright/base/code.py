"""Which code this is: versions, and a hash of our own sources, which a version does not tell."""

from __future__ import annotations

import platform
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path


def code_version(package: Path | None = None) -> dict[str, str]:
    """Versions of what computes, and `source`: the first 16 hex digits of a sha256 over the names
    and contents of the Python files of `package`, of ours by default."""
    root, found = package or Path(__file__).parents[1], sha256()
    for path in sorted(root.rglob("*.py")):
        body = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(body)}\0".encode())
        found.update(body)
    versions = {name: version(name) for name in ("meshwright", "torch", "numpy")}
    return {**versions, "python": platform.python_version(), "source": found.hexdigest()[:16]}
