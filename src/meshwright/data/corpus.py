"""Text to train on: which files a corpus holds, what of it is held out, and how it is read.

Listing a corpus only looks at names, sizes and times of change, so that a warm start is fast.
Whether a file holds text is found out when it is first read.
"""

from __future__ import annotations

import os
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from meshwright.base.errors import DataError, did_you_mean

STDLIB = "python-stdlib"
HELD_OUT_SHARE = 0.05
PIECE_BYTES = 256 * 1024

_STDLIB_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class TextFile:
    """A file as it was when the corpus was listed; `name` is its path relative to the root."""

    name: str
    path: Path
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class Corpus:
    """Files under one root, sorted by name. `name` is the source that the user gave."""

    name: str
    root: Path
    files: tuple[TextFile, ...]


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a file: what one end-of-text token closes."""

    file: TextFile
    start: int
    stop: int


def find_corpus(source: str) -> Corpus:
    """The corpus that `data.source` names.

    `python-stdlib` is the source and the text docs of the running Python's standard library;
    anything else is a text file, or a folder that is searched for files, hidden ones left out.
    Empty files are left out. Raises DataError if nothing there can be read as text.
    """
    corpus = _list_stdlib() if source == STDLIB else _list_user_source(source)
    if not any(is_text(file) for file in corpus.files):
        raise _cannot_use(source, f"no UTF-8 text in {corpus.root}; name a file or folder of text")
    return corpus


def only_text(corpus: Corpus) -> Corpus:
    """`corpus` without the files that are not text. Reads every file once."""
    return replace(corpus, files=tuple(file for file in corpus.files if is_text(file)))


def split(corpus: Corpus) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """(train, held out), both with text in them; expects what `only_text` returns.

    A file is held out if the hash of its name falls into the lowest 5 %, whatever else is in the
    corpus. Where that would hold out less than 1 % or more than 20 % of the bytes (a single file,
    a handful of files, one file that outweighs all others), the last 5 % of every file are held
    out instead, from the beginning of a line where there is one, as a document of their own.
    Raises DataError if there is too little text to cut.
    """
    held_out = [file for file in corpus.files if _name_hash(file) < HELD_OUT_SHARE]
    train = [file for file in corpus.files if _name_hash(file) >= HELD_OUT_SHARE]
    share = _total_bytes(held_out) / max(1, _total_bytes(corpus.files))
    if 0.01 <= share <= 0.20:
        return _whole(train), _whole(held_out)
    cuts = [(file, _held_out_start(file)) for file in corpus.files]
    heads = tuple(Document(file, 0, cut) for file, cut in cuts if cut > 0)
    tails = tuple(Document(file, cut, file.size) for file, cut in cuts if cut < file.size)
    if not (heads and tails):
        raise _cannot_use(corpus.name, "too little text to hold some out; name more of it")
    return heads, tails


def scatter(documents: tuple[Document, ...]) -> list[Document]:
    """`documents` in an order unrelated to their names' order, for unbiased samples."""
    return sorted(documents, key=lambda doc: (_name_hash(doc.file), doc.file.name, doc.start))


def read_pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """(text, is this the last piece) in pieces of about `PIECE_BYTES` that end with a line.

    Raises DataError if it cannot be read, is shorter than listed, or is not UTF-8.
    """
    try:
        yield from _decode_pieces(document)
    except UnicodeDecodeError as error:
        raise DataError(f"{document.file.path}: not UTF-8; convert it or leave it out") from error


def _decode_pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """`read_pieces` that raises UnicodeDecodeError."""
    decoder = getincrementaldecoder("utf-8")()
    path = document.file.path
    try:
        with path.open("rb") as stream:
            stream.seek(document.start)
            left = document.stop - document.start
            while left > 0:
                block = stream.read(min(PIECE_BYTES, left))
                block += stream.readline(min(PIECE_BYTES, left - len(block)))
                if not block:
                    raise DataError(f"{path}: changed while it was being read; run again")
                left -= len(block)
                yield decoder.decode(block, final=left == 0), left == 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; make it readable") from error


def is_text(file: TextFile) -> bool:
    """Whether a file is UTF-8 without NUL bytes and more than white space. Reads all of it."""
    has_ink = False
    try:
        for text, _ in _decode_pieces(Document(file, 0, file.size)):
            if "\0" in text:
                return False
            has_ink = has_ink or bool(text.strip())
    except UnicodeDecodeError:
        return False
    return has_ink


def _list_stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = (
        file for file in _walk(STDLIB, root, _NOT_STDLIB) if file.path.suffix in _STDLIB_SUFFIXES
    )
    return Corpus(STDLIB, root, _sorted(files))


def _list_user_source(source: str) -> Corpus:
    root = Path(source).expanduser().absolute()
    if root.is_file():
        return Corpus(source, root, _sorted(_stat(root, root.name)))
    if root.is_dir():
        return Corpus(source, root, _sorted(_walk(source, root, frozenset())))
    hint = did_you_mean(source, [STDLIB])
    raise _cannot_use(source, f"no such file or folder; name one, or use {STDLIB!r}{hint}")


def _walk(source: str, root: Path, skipped: frozenset[str]) -> Iterator[TextFile]:
    def refuse(error: OSError) -> None:
        raise _cannot_use(source, f"{error.filename}: {error.strerror}; make it readable")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [sub for sub in subfolders if sub not in skipped and sub[0] != "."]
        for path in (Path(folder, name) for name in names if name[0] != "."):
            yield from _stat(path, path.relative_to(root).as_posix())


def _stat(path: Path, name: str) -> Iterator[TextFile]:
    """The one regular file at `path`; nothing for a broken link, a socket or an empty file."""
    if path.is_file():
        status = path.stat()
        if status.st_size:
            yield TextFile(name, path, status.st_size, status.st_mtime_ns)


def _sorted(files: Iterator[TextFile]) -> tuple[TextFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


def _cannot_use(source: str, fix: str) -> DataError:
    return DataError(f"data.source = {source!r}: {fix}")


def _name_hash(file: TextFile) -> float:
    """A number in [0, 1) that depends on the relative path alone."""
    digest = blake2b(file.name.encode(errors="surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _total_bytes(files: list[TextFile] | tuple[TextFile, ...]) -> int:
    return sum(file.size for file in files)


def _whole(files: list[TextFile]) -> tuple[Document, ...]:
    return tuple(Document(file, 0, file.size) for file in files)


def _held_out_start(file: TextFile) -> int:
    """Where the last 5 % begin: after a line end if one follows, else between characters."""
    target = int(file.size * (1 - HELD_OUT_SHARE))
    with file.path.open("rb") as stream:
        stream.seek(target)
        tail = stream.read(PIECE_BYTES)
    line_end = tail.find(b"\n") + 1
    if line_end and target + line_end < file.size:
        return target + line_end
    continuation_bytes = len(tail) - len(tail.lstrip(bytes(range(0x80, 0xC0))))
    return target + continuation_bytes
