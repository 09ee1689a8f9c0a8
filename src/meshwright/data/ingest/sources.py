"""From what a user names to units of work: files, folders and data sets on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.base.errors import DataError
from meshwright.data.ingest.records import ANNOTATIONS, Unit, damaged

RANGE_BYTES = 64 << 20  # of a JSONL file: what one process reads in one go

_FORMS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".tar.gz": "tar",
    ".tgz": "tar",
    ".zip": "zip",
    ".fa": "fasta",
    ".faa": "fasta",
    ".fasta": "fasta",
}


def find_units(sources: Sequence[str], kind: str) -> tuple[Unit, ...]:
    """Units of `sources` for stores of `kind` "tokens" or "samples", in order of their names.

    Raises DataError for a source that is not there or has nothing in it.
    """
    units: list[Unit] = []
    for source in sources:
        path = Path(source).expanduser().absolute()
        if not path.exists():
            raise DataError(f"source {source!r}: no such file or folder; check the path")
        found = [unit for unit in _of_path(path, kind) if unit.stop > unit.start]
        if not found:
            raise DataError(f"source {source!r}: is empty; name a file or folder with data in it")
        units += found
    return tuple(units)


def _of_path(path: Path, kind: str) -> Iterator[Unit]:
    if path.is_file():
        yield from _of_file(path, kind)
    elif (path / "index.json").is_file():
        yield from _mds(path)
    elif (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; name one, as {path.name}/…")
    elif (path / "state.json").is_file():
        files = _json(path / "state.json").get("_data_files", [])
        for file in files:
            yield from _of_file(_there(path / file["filename"]), kind)
    else:
        yield from _of_folder(path, kind)


def _of_file(path: Path, kind: str) -> Iterator[Unit]:
    form = _form(path)
    if form is None:
        form = "text" if kind == "tokens" else "files"
    status = path.stat()
    step = RANGE_BYTES if form == "jsonl" else max(1, status.st_size)
    for start in range(0, status.st_size, step):
        stop = min(start + step, status.st_size)
        yield Unit(path, form, start, stop, status.st_mtime_ns)


def _of_folder(path: Path, kind: str) -> Iterator[Unit]:
    """Shards one by one; loose files of samples by folder, for those of one name belong together.
    Hidden ones are left out."""
    inside = sorted(child for child in path.iterdir() if child.name[0] != ".")
    loose = [child for child in inside if child.is_file() and _form(child) is None]
    if kind == "samples" and loose:
        loose += [child for child in inside if child.name in ANNOTATIONS]
        newest = max(child.stat().st_mtime_ns for child in loose)
        yield Unit(path, "files", 0, sum(child.stat().st_size for child in loose), newest)
    for child in inside:
        if child.is_dir():
            yield from _of_path(child, kind)
        elif child.is_file() and (kind == "tokens" or child not in loose):
            yield from _of_file(child, kind)


def _mds(path: Path) -> Iterator[Unit]:
    """Shards of a MosaicML data set, format version 2."""
    index = _json(path / "index.json")
    for shard in index.get("shards", []):
        if shard.get("format") != "mds" or shard.get("compression"):
            raise DataError(
                f"{path / 'index.json'}: shards of {shard.get('format')!r}, compression "
                f"{shard.get('compression')!r}; write them as 'mds' and uncompressed"
            )
        file = _there(path / shard["raw_data"]["basename"])
        about = {key: shard[f"column_{key}"] for key in ("names", "encodings", "sizes")}
        status = file.stat()
        if status.st_size != shard["raw_data"]["bytes"]:
            raise damaged(file, f"{status.st_size} bytes, index.json tells otherwise")
        yield Unit(file, "mds", 0, status.st_size, status.st_mtime_ns, about)


def _form(path: Path) -> str | None:
    """By the last two suffixes, else the last."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return _FORMS.get("".join(suffixes[-2:])) or _FORMS.get("".join(suffixes[-1:]))


def _there(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path}: is in the index of its data set but not there; fetch it again")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except ValueError as error:
        raise damaged(path, error) from error
