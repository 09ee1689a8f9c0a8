"""Builds that stay far away, as sources of a run.

What is small of one (manifest, tokenizer, indices, checksums) is kept here in a folder like a
build's, with `far.json` in the place of the `.bin` files; so a far store has a prefix here like any
other. Blocks of the `.bin` are fetched when they are needed (`remote.RemoteFile`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import ConfigError, DataError
from meshwright.data.blocks import BlockCache
from meshwright.data.remote import Patience, RemoteArray, RemoteFile, connect, read_whole
from meshwright.data.store import TokenStore, read_index, store_paths

FAR, MANIFEST = "far.json", "manifest.json"
_BLOCKS = "blocks"


def is_far(source: str) -> bool:
    """Whether `source` is an address, as `s3://bucket/corpus`, and no path."""
    return "://" in source


def mirror(url: str, folder: Path) -> Path:
    """Where in `folder` the small parts of the build at `url` are, fetched if they are not there.
    Raises DataError."""
    url, patience = url.rstrip("/"), Patience()
    files, root = connect(url)
    content = read_whole(files, root, url, MANIFEST, patience)
    names = _small_files(url, content)
    here = folder / f"far-{sha256(url.encode() + content).hexdigest()[:20]}"
    if here.is_dir():
        return here
    draft = folder / f".far-{uuid4().hex}"
    draft.mkdir(parents=True)
    try:
        for name, hashed in names.items():
            data = read_whole(files, root, url, name, patience)
            if sha256(data).hexdigest() != hashed:
                raise DataError(f"{url}/{name}: damaged (its hash differs); upload it again")
            (draft / name).write_bytes(data)
        (draft / MANIFEST).write_bytes(content)
        (draft / FAR).write_text(json.dumps({"url": url}))
        try:
            draft.rename(here)
        except OSError:
            if not here.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return here


def _small_files(url: str, content: bytes) -> dict[str, str]:
    """The hash of each file of a manifest that is fetched whole."""
    try:
        manifest: Mapping[str, Any] = json.loads(content)
        int(manifest["block_bytes"])
        files = {name: str(told["sha256"]) for name, told in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{url}/{MANIFEST}: is not one of ours; build it again") from error
    return {
        name: hashed
        for name, hashed in files.items()
        if not name.endswith(".bin") and Path(name).name == name
    }


def open_far(prefix: Path, cache_bytes: int, processes: int) -> TokenStore:
    """The store at `prefix` in a folder that `mirror` has made. `cache_bytes` of its blocks and
    those of others are kept on this machine, shared out among `processes`. Raises DataError, and
    ConfigError for too few bytes."""
    folder = prefix.parent
    try:
        url = json.loads((folder / FAR).read_text())["url"]
        manifest = json.loads((folder / MANIFEST).read_text())
        index, sums = (prefix.with_suffix(end).read_bytes() for end in (".idx", ".crc"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: is torn ({error}); remove it and start again") from error
    name, block_bytes = store_paths(prefix)[0].name, manifest["block_bytes"]
    if cache_bytes < processes * block_bytes:
        fix = f"{processes} processes need {block_bytes} bytes each at least; raise it"
        raise ConfigError("data.cache_bytes", cache_bytes, fix)
    files, root = connect(url)
    file = RemoteFile(
        f"{url}/{name}",
        manifest["files"][name]["bytes"],
        np.frombuffer(sums, "<u4"),
        block_bytes,
        lambda start, stop: bytes(files.cat_file(f"{root}/{name}", start=start, end=stop)),
        block_cache(folder.parent / _BLOCKS, cache_bytes, processes, block_bytes),
    )
    dtype, starts, tokenizer = read_index(Path(f"{url}/{prefix.name}"), index, file.size)
    tokens = cast("npt.NDArray[np.integer]", RemoteArray(file, dtype))
    return TokenStore(Path(prefix.name), tokens, starts, tokenizer)


def block_cache(folder: Path, cache_bytes: int, processes: int, block_bytes: int) -> BlockCache:
    """That of this process, which all its stores share: a part of `folder` that no living process
    has. Parts beyond the number of processes are removed, if nobody has them."""
    return _opened(folder, cache_bytes // processes, processes, block_bytes, os.getpid())[0]


@lru_cache
def _opened(
    folder: Path, limit_bytes: int, processes: int, block_bytes: int, _pid: int
) -> tuple[BlockCache, int]:
    """A cache, and the open file by whose lock others know that its part is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.lock"):
        if int(path.stem) >= processes and (held := _locked(path)) is not None:
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            os.close(held)
    for number in count():
        lock = folder / f"{number}.lock"
        if (held := _locked(lock)) is not None:
            return BlockCache(lock.with_suffix(""), limit_bytes, block_bytes), held
    raise AssertionError("one of endlessly many is free")


def _locked(path: Path) -> int | None:
    """The file, open, if nobody else has it locked."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        flock(fd, LOCK_EX | LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
