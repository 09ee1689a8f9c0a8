"""One unit of work into one part: records read, filtered, encoded, with what merging needs.

A part is whole when its .json is there, which is written last; so a build that was killed goes on
with the parts that are not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DataError
from meshwright.data.ingest.dedup import HASHES, KEY_BYTES, Signatures, key_of, signature
from meshwright.data.ingest.filters import reason_against
from meshwright.data.ingest.plan import BuildOptions, Encoder
from meshwright.data.ingest.readers import read_unit
from meshwright.data.ingest.records import Record, Unit
from meshwright.data.samples import Sample, pack, write_samples
from meshwright.data.store import write_store

_BATCH = 256  # documents encoded at once


@dataclass(frozen=True)
class Part:
    """A finished part: of each document its key [n] void, MinHash [n, HASHES] or [0, HASHES],
    and licence by number; counts of what was left out, by reason."""

    prefix: Path
    keys: npt.NDArray[np.void]
    signatures: Signatures
    licence_of: npt.NDArray[np.int64]
    licences: list[str]
    removed: dict[str, int]

    @property
    def documents(self) -> int:
        """How many it has."""
        return self.keys.size


class _Notes:
    """What is kept of each record beside its content."""

    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self.keys = bytearray()
        self.signatures: list[Signatures] = []
        self.licences: dict[str, int] = {}
        self.licence_of: list[int] = []
        self.removed: Counter[str] = Counter()

    def add(self, record: Record, content: bytes) -> None:
        self.keys += key_of(content)
        self.licence_of.append(self.licences.setdefault(record.licence, len(self.licences)))
        if self._options.dedup == "minhash":
            self.signatures.append(signature(record.text or ""))


def build_part(unit: Unit, prefix: Path, options: BuildOptions, encoder: Encoder) -> None:
    """Write `prefix`.{bin,idx,npz,json}. Raises DataError for a source that cannot be used."""
    notes = _Notes(options)
    records = _allowed(read_unit(unit, options.keys), options, notes)
    if options.kind == "tokens":
        _write_tokens(records, prefix, encoder, notes)
    else:
        _write_samples(records, prefix, notes)
    with Path(f"{prefix}.npz").open("wb") as stream:
        np.savez(
            stream,
            keys=np.frombuffer(bytes(notes.keys), np.dtype((np.void, KEY_BYTES))),
            signatures=np.array(notes.signatures, np.uint32).reshape(-1, HASHES),
            licence_of=np.array(notes.licence_of, np.int64),
        )
    about = {"unit": unit.identity, "licences": list(notes.licences), "removed": notes.removed}
    draft = Path(f"{prefix}.json.part")
    draft.write_text(json.dumps(about))
    draft.replace(f"{prefix}.json")


def open_part(prefix: Path) -> Part:
    """What `build_part` has written."""
    about = json.loads(Path(f"{prefix}.json").read_text())
    with np.load(f"{prefix}.npz") as kept:
        return Part(
            prefix,
            kept["keys"],
            kept["signatures"],
            kept["licence_of"],
            about["licences"],
            about["removed"],
        )


def is_done(prefix: Path, unit: Unit) -> bool:
    """Whether the part of `unit`, as it is now, is there."""
    try:
        done: bool = json.loads(Path(f"{prefix}.json").read_text())["unit"] == unit.identity
    except (OSError, ValueError):
        return False
    return done


def _allowed(records: Iterator[Record], options: BuildOptions, notes: _Notes) -> Iterator[Record]:
    for record in records:
        licence = record.licence or options.licence
        if options.licences and licence not in options.licences:
            notes.removed[f"licence {licence or 'unknown'}"] += 1
        elif options.kind == "tokens" and record.text is None:
            raise DataError(
                f"{record.name}: has no text under {options.keys.text!r}, it has "
                f"{', '.join(sorted(record.fields)) or 'nothing'}; name the key with --text-key"
            )
        elif record.text is not None and (why := reason_against(record.text, options.rules)):
            notes.removed[why] += 1
        else:
            yield replace(record, licence=licence)


def _write_tokens(records: Iterator[Record], prefix: Path, encoder: Encoder, notes: _Notes) -> None:
    with write_store(prefix, *encoder.about) as writer:
        while batch := list(islice(records, _BATCH)):
            encoded = encoder.encode([record.text or "" for record in batch])
            for record, ids in zip(batch, encoded, strict=True):
                writer.add(ids)
                writer.end_document()
                notes.add(record, (record.text or "").encode())


def _write_samples(records: Iterator[Record], prefix: Path, notes: _Notes) -> None:
    with write_samples(prefix) as writer:
        for record in records:
            fields = dict(record.fields)
            if not fields and record.text is not None:
                fields = {"text": record.text.encode()}
            writer.add(pack(Sample(record.name, record.licence, fields)))
            notes.add(record, b"\0".join(name.encode() + b"=" + fields[name] for name in fields))
