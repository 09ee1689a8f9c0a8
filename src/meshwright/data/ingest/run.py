"""A build from its sources to a folder with stores and a manifest, over several processes.

It happens in `OUT.building`, which a killed build leaves behind and the next one of the same
sources and options goes on with. The folder takes its place at the end, in one rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, DataError
from meshwright.data.checksums import BLOCK_BYTES, block_sums
from meshwright.data.ingest.merge import Counts, merge, summary
from meshwright.data.ingest.part import build_part, is_done, open_part
from meshwright.data.ingest.plan import FORMAT, BuildOptions, Encoder, open_encoder
from meshwright.data.ingest.records import Unit
from meshwright.data.ingest.sources import find_units
from meshwright.data.tokenizer import byte_tokenizer

Progress = Callable[[str, float], None]

MANIFEST = "manifest.json"
_MERGING = 0.9  # of the work is done when merging begins


def build(
    sources: Sequence[str],
    out: Path,
    options: BuildOptions,
    processes: int,
    progress: Progress = lambda _what, _done: None,
    restart: bool = False,
) -> dict[str, Any]:
    """Build `out` and return its manifest. `progress(what, done)`, done from 0 to 1.

    Raises DataError or ConfigError for sources, options or an `out` that cannot be used.
    """
    if out.exists():
        raise ConfigError("OUT", str(out), "is there already; name another or remove it")
    encoder = open_encoder(options.tokenizer)
    units = find_units(sources, options.kind)
    folder = out.with_name(out.name + ".building")
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    _begin(folder, options, encoder)
    _build_parts(units, folder, options, processes, progress)
    progress("merging", _MERGING)
    parts = [open_part(_prefix(folder, unit)) for unit in units]
    counts = merge(parts, folder, options, encoder)
    manifest = _finish(folder, sources, options, encoder, counts)
    shutil.rmtree(folder / "parts")
    (folder / "build.json").unlink()
    folder.rename(out)
    progress("done", 1.0)
    return manifest


def _begin(folder: Path, options: BuildOptions, encoder: Encoder) -> None:
    """Make the folder, or see to it that what is in it was built in the same way."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    plan = json.dumps([FORMAT, options.document(), encoder.identity])
    note = folder / "build.json"
    if not note.exists():
        note.write_text(plan)
    elif note.read_text() != plan:
        fix = "holds an unfinished build with other options; use those, or add --restart"
        raise ConfigError("OUT", str(folder), fix)


def _prefix(folder: Path, unit: Unit) -> Path:
    name = sha256(json.dumps(unit.identity[:4]).encode()).hexdigest()[:20]
    return folder / "parts" / name


def _build_parts(
    units: Sequence[Unit], folder: Path, options: BuildOptions, processes: int, progress: Progress
) -> None:
    todo = [unit for unit in units if not is_done(_prefix(folder, unit), unit)]
    total = sum(unit.stop - unit.start for unit in units)
    done = total - sum(unit.stop - unit.start for unit in todo)
    progress("reading", _MERGING * done / total)
    for unit in _work(todo, folder, options, processes):
        done += unit.stop - unit.start
        progress(f"read {unit.path.name}", _MERGING * done / total)


def _work(
    todo: Sequence[Unit], folder: Path, options: BuildOptions, processes: int
) -> Iterator[Unit]:
    """Build the parts of `todo`, yielding each unit when it is done. After a failure no new unit is
    begun."""
    if processes == 1 or len(todo) < 2:
        for unit in todo:
            _one(unit, _prefix(folder, unit), options)
            yield unit
        return
    with ProcessPoolExecutor(min(processes, len(todo)), get_context("spawn"), _alone) as pool:
        running = {pool.submit(_one, unit, _prefix(folder, unit), options): unit for unit in todo}
        try:
            for future in as_completed(running):
                future.result()
                yield running[future]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _alone() -> None:
    """A process is enough for a unit: the tokenizer's own threads would only be in the way."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _one(unit: Unit, prefix: Path, options: BuildOptions) -> None:
    build_part(unit, prefix, options, _encoder(options.tokenizer))


@lru_cache(1)
def _encoder(tokenizer: str) -> Encoder:
    return open_encoder(tokenizer)


def _finish(
    folder: Path, sources: Sequence[str], options: BuildOptions, encoder: Encoder, counts: Counts
) -> dict[str, Any]:
    """Checksums, the tokenizer and the manifest beside the stores."""
    if options.kind == "tokens":
        backend = encoder.backend or byte_tokenizer()
        (folder / "tokenizer.json").write_text(backend.to_json(), encoding="utf-8")
    for path in sorted(folder.glob("*.bin")):
        path.with_suffix(".crc").write_bytes(block_sums(path).tobytes())
    suffixes = (".bin", ".idx", ".crc")
    files = [path for path in sorted(folder.iterdir()) if path.suffix in suffixes]
    files += list(folder.glob("tokenizer.json"))
    about = {"tokenizer": {}} if options.kind == "samples" else {"tokenizer": _tokenizer(encoder)}
    manifest = {
        "format": FORMAT,
        "kind": options.kind,
        "sources": list(sources),
        "options": options.document(),
        **about,
        **summary(counts),
        "block_bytes": BLOCK_BYTES,
        "files": {path.name: _hashed(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _tokenizer(encoder: Encoder) -> dict[str, Any]:
    return {
        "sha256": encoder.identity,
        "vocab": encoder.vocab,
        "end_of_text": encoder.end_of_text,
    }


def _hashed(path: Path) -> dict[str, Any]:
    digest = sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a build. Raises DataError."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        fix = "name what `meshwright data build` has built"
        raise DataError(f"{folder}: no {MANIFEST}: {error.strerror}; {fix}") from error
    except ValueError as error:
        raise DataError(f"{folder / MANIFEST}: is not JSON ({error}); build it again") from error
    check_format(str(folder), manifest)
    return manifest


def check_format(where: str, manifest: Mapping[str, Any]) -> None:
    """Refuse the manifest of the build at `where` if it is of another version. Raises DataError."""
    if manifest.get("format") != FORMAT or "files" not in manifest:
        told = f"is of format {manifest.get('format')!r}, this version reads {FORMAT}"
        raise DataError(f"{where}/{MANIFEST}: {told}; build it again")


def identity_of(folder: Path) -> str:
    """The hash of a build's manifest, which holds those of its files."""
    read_manifest(folder)
    return sha256((folder / MANIFEST).read_bytes()).hexdigest()
