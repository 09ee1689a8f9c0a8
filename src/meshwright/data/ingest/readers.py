"""Units of every form read as records."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from meshwright.base.errors import DataError
from meshwright.data.ingest.mds import read_mds
from meshwright.data.ingest.records import ANNOTATIONS, Keys, Record, Unit, damaged, need

_TEXT_FIELDS = ("txt", "text", "caption")
_BATCH_ROWS = 1024


def read_unit(unit: Unit, keys: Keys) -> Iterator[Record]:
    """Records of `unit`. Raises DataError for what is damaged or has vanished."""
    try:
        yield from _READERS[unit.form](unit, keys)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{unit.path}: cannot be read: {reason}; is it still there?") from error
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise damaged(unit.path, error) from error


def _text(unit: Unit, _keys: Keys) -> Iterator[Record]:
    data = unit.path.read_bytes()
    if len(data) != unit.stop:
        raise DataError(f"{unit.path}: changed while it was being read; run again")
    if b"\0" in data:
        raise DataError(f"{unit.path}: is not text; leave it out or build --kind samples")
    yield Record(unit.path.name, _decoded(unit.path, data))


def _jsonl(unit: Unit, keys: Keys) -> Iterator[Record]:
    """Lines that begin in [start, stop)."""
    with unit.path.open("rb") as stream:
        if unit.start:
            stream.seek(unit.start - 1)
            stream.readline()
        while (at := stream.tell()) < unit.stop and (line := stream.readline()):
            yield from _row(unit.path, f"byte {at}", line, keys)


def _jsonl_gz(unit: Unit, keys: Keys) -> Iterator[Record]:
    with gzip.open(unit.path) as stream:
        for number, line in enumerate(stream, 1):
            yield from _row(unit.path, f"line {number}", line, keys)


def _row(path: Path, where: str, line: bytes, keys: Keys) -> Iterator[Record]:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except ValueError as error:
        raise damaged(path, f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise damaged(path, f"{where}: a line is an object with a key for the text")
    yield _of_row(f"{path.name}:{where.replace(' ', '')}", row, keys)


def _of_row(name: str, row: Mapping[str, Any], keys: Keys) -> Record:
    text = row.get(keys.text)
    fields = {str(key): _as_bytes(value) for key, value in row.items() if value is not None}
    return Record(name, text if isinstance(text, str) else None, fields, _licence(row, keys))


def _parquet(unit: Unit, keys: Keys) -> Iterator[Record]:
    parquet, arrow = need("pyarrow.parquet", unit.path), need("pyarrow", unit.path)
    try:
        file = parquet.ParquetFile(unit.path)
        yield from _batches(unit, file.iter_batches(_BATCH_ROWS), keys)
    except arrow.ArrowException as error:
        raise damaged(unit.path, error) from error


def _arrow(unit: Unit, keys: Keys) -> Iterator[Record]:
    """A shard of a Hugging Face data set on disk."""
    arrow = need("pyarrow", unit.path)
    need("pyarrow.ipc", unit.path)
    try:
        with arrow.memory_map(str(unit.path)) as source:
            yield from _batches(unit, arrow.ipc.open_stream(source), keys)
    except arrow.ArrowException as error:
        raise damaged(unit.path, error) from error


def _batches(unit: Unit, batches: Any, keys: Keys) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield _of_row(f"{unit.path.name}:{number}", _flat(row), keys)
            number += 1


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Images and audio of Hugging Face are {"bytes": ..., "path": ...}."""
    inside = {k: v["bytes"] if isinstance(v, dict) and "bytes" in v else v for k, v in row.items()}
    return {key: value for key, value in inside.items() if value is not None}


def _tar(unit: Unit, keys: Keys) -> Iterator[Record]:
    """WebDataset: consecutive members of one name are a sample, what follows the first dot of the
    base name is the field."""

    def members() -> Iterator[tuple[str, bytes]]:
        with tarfile.open(unit.path) as archive:
            for member in archive:
                stream: IO[bytes] | None = archive.extractfile(member)
                if member.isfile() and stream is not None:
                    yield member.name, stream.read()

    yield from _grouped(members(), keys)


def _zip(unit: Unit, keys: Keys) -> Iterator[Record]:
    with zipfile.ZipFile(unit.path) as archive:
        names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
        yield from _annotated(unit.path, names, archive.read, keys)


def _files(unit: Unit, keys: Keys) -> Iterator[Record]:
    """Loose files of a folder, or one file."""
    if unit.path.is_file():
        yield from _grouped(iter([(unit.path.name, unit.path.read_bytes())]), keys)
        return
    names = sorted(path.name for path in unit.path.iterdir() if path.is_file())
    shown = [name for name in names if name[0] != "."]
    yield from _annotated(unit.path, shown, lambda name: (unit.path / name).read_bytes(), keys)


def _annotated(
    path: Path, names: list[str], read: Callable[[str], bytes], keys: Keys
) -> Iterator[Record]:
    """Samples of the files `names`, with what the rows of annotation files say of them."""
    about: dict[str, Mapping[str, Any]] = {}
    notes = [name for name in names if name.rpartition("/")[2] in ANNOTATIONS]
    for note in notes:
        folder = note[: note.rfind("/") + 1]
        for row in _lines(path / note, read(note)):
            about[folder + str(row.get("file_name", row.get("file")))] = row
    files = ((name, read(name)) for name in names if name not in notes)
    yield from _grouped(files, keys, about)


def _lines(path: Path, data: bytes) -> Iterator[Mapping[str, Any]]:
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError as error:
            raise damaged(path, error) from error
        if isinstance(row, dict):
            yield row


def _grouped(
    members: Iterator[tuple[str, bytes]],
    keys: Keys,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Record]:
    for stem, group in groupby(members, key=lambda member: _split(member[0])[0]):
        files = dict(group)
        fields = {_split(name)[1]: data for name, data in files.items()}
        meta = _meta(fields)
        for name in files:
            row = (about or {}).get(name, {})
            fields |= {key: _as_bytes(value) for key, value in row.items() if value is not None}
            meta = {**meta, **row}
        yield Record(stem, _first_text(fields, meta, keys), fields, _licence(meta, keys))


def _split(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, field = base.partition(".")
    return folder + slash + stem, field.lower() or "bin"


def _meta(fields: Mapping[str, bytes]) -> Mapping[str, Any]:
    """What the JSON beside a sample says, if there is one."""
    try:
        found = json.loads(fields.get("json", b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _first_text(fields: Mapping[str, bytes], meta: Mapping[str, Any], keys: Keys) -> str | None:
    for name in (keys.text, *_TEXT_FIELDS):
        if name in fields:
            return fields[name].decode("utf-8", errors="replace")
        if isinstance(meta.get(name), str):
            return str(meta[name])
    return None


def _mds(unit: Unit, keys: Keys) -> Iterator[Record]:
    for number, row in enumerate(read_mds(unit)):
        yield _of_row(f"{unit.path.name}:{number}", row, keys)


def _fasta(unit: Unit, _keys: Keys) -> Iterator[Record]:
    """Sequences as text; stop marks are left out."""
    name, lines = "", list[str]()
    text = _decoded(unit.path, unit.path.read_bytes())
    if not text.lstrip().startswith(">"):
        raise damaged(unit.path, "FASTA begins with '>'")
    for line in [*text.splitlines(), ">"]:
        if not line.startswith(">"):
            lines.append(line.strip())
            continue
        if lines:
            sequence = "".join(lines).rstrip("*")
            yield Record(name, sequence, {"sequence": sequence.encode(), "id": name.encode()})
        name, lines = line[1:].split(" ")[0], []


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; convert it or leave it out") from error


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode()


def _licence(row: Mapping[str, Any], keys: Keys) -> str:
    found = row.get(keys.licence, row.get("license", ""))
    return found if isinstance(found, str) else json.dumps(found)


_READERS: Mapping[str, Callable[[Unit, Keys], Iterator[Record]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "jsonl.gz": _jsonl_gz,
    "parquet": _parquet,
    "arrow": _arrow,
    "tar": _tar,
    "zip": _zip,
    "files": _files,
    "mds": _mds,
    "fasta": _fasta,
}
