"""Token stores: `PREFIX.bin` holds ids back to back, `PREFIX.idx` says where documents lie.

The format is that of Megatron-LM (`megatron/core/datasets/indexed_dataset.py`, version 1), all
little-endian: magic, u64 version, u8 type code, u64 sequences S, u64 entries D of the document
index, then int32[S] lengths, int64[S] byte offsets, int64[D] document index (sequence numbers,
from 0 to S). Our own stores have one sequence per document. Those of a build have the SHA-256 of
the tokenizer behind that, after `MWTOKID` and a zero byte: who reads by the header's counts, as
Megatron does, does not see it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_TOKENIZER_MAGIC, _SHA_BYTES = b"MWTOKID\x00", 32
_CODES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
_LONGEST_DOCUMENT = 2**31 - 1  # tokens; lengths are int32
_UINT16_VOCAB_LIMIT = 65_500  # Megatron's own: below it ids are uint16, else int32


@dataclass(frozen=True)
class TokenStore:
    """An opened store; nothing is read into memory but the index.

    `tokens`: ids of all documents back to back, memory-mapped, [n_tokens].
    `starts`: where each document begins in it, and n_tokens at the end, int64 [n_documents + 1].
    `tokenizer`: the SHA-256 of the one whose ids these are, in hex; empty where it is not told.
    """

    prefix: Path
    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]
    tokenizer: str = ""

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, end-of-text tokens included."""
        return int(self.tokens.size)

    @property
    def n_documents(self) -> int:
        """Documents in the store."""
        return self.starts.size - 1

    def document(self, i: int) -> npt.NDArray[np.integer]:
        """Ids of document i, its end-of-text token included, [length]."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]


def as_plain(tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """The same tokens; a slice of a memory map costs three of a plain array's."""
    return tokens.view(np.ndarray) if isinstance(tokens, np.memmap) else tokens


def bring(tokens: Any, spans: Iterable[tuple[int, int]]) -> None:
    """Get items [start, stop) of all `spans` of what is far away here at once, side by side."""
    if fetch := getattr(tokens, "fetch", None):
        fetch(spans)


def check_tokenizer(store: TokenStore, sha256: str, where: str) -> None:
    """Refuse a store whose ids are of another tokenizer than that of `sha256`, which the build
    `where` names: files of two builds were mixed up. Raises DataError."""
    if store.tokenizer not in ("", sha256):
        raise DataError(
            f"{where}/{store.prefix.name}.idx: its ids are of tokenizer {store.tokenizer[:12]}, "
            f"the manifest tells {sha256[:12]}; fetch or build it again"
        )


def open_store(prefix: Path) -> TokenStore:
    """Open `prefix`.bin and .idx. Raises DataError if they are absent, torn or do not match."""
    bin_path, idx_path = store_paths(prefix)
    try:
        index = idx_path.read_bytes()
        bin_bytes = bin_path.stat().st_size
    except OSError as error:
        raise DataError(f"token store {prefix}: {error.filename}: {error.strerror}") from error
    dtype, starts, tokenizer = read_index(prefix, index, bin_bytes)
    return TokenStore(prefix, np.memmap(bin_path, dtype=dtype, mode="r"), starts, tokenizer)


def read_index(
    prefix: Path, index: bytes, bin_bytes: int
) -> tuple[np.dtype[Any], npt.NDArray[np.int64], str]:
    """(id type, where each document begins and the last ends, hash of the tokenizer or nothing) of
    what an .idx holds beside a .bin of `bin_bytes`. Raises DataError if they are torn, do not match
    or hold nothing."""
    index, tokenizer = _without_tokenizer(index)
    dtype, lengths, document_index = _parse_index(prefix, index)
    n_tokens = int(lengths.sum(dtype=np.int64))
    if bin_bytes != n_tokens * dtype.itemsize:
        raise _torn(prefix, f".bin has {bin_bytes} bytes, .idx tells {n_tokens * dtype.itemsize}")
    if not n_tokens:
        raise _torn(prefix, "it holds no tokens")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[document_index]
    return dtype, starts, tokenizer


def store_paths(prefix: Path) -> tuple[Path, Path]:
    """(`prefix`.bin, `prefix`.idx)."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class StoreWriter:
    """Appends documents to a store that does not exist yet; see `write_store`."""

    def __init__(
        self, stream: BufferedWriter, vocab: int, end_of_text: int, tokenizer: str = ""
    ) -> None:
        self._stream = stream
        self._vocab, self._tokenizer = vocab, tokenizer
        self._end_of_text = np.array([end_of_text])
        self._code = 8 if vocab < _UINT16_VOCAB_LIMIT else 4
        self._length = 0
        self._lengths: list[int] = []

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append ids [n] to the current document. Raises DataError for one outside the vocab."""
        outside = tokens[(tokens < 0) | (tokens >= self._vocab)]
        if outside.size:
            raise DataError(
                f"token id {outside[0]} is outside model.vocab = {self._vocab}; raise it"
            )
        self._stream.write(tokens.astype(_CODES[self._code]).tobytes())
        self._length += tokens.size
        if self._length > _LONGEST_DOCUMENT:
            raise DataError(f"a document has over {_LONGEST_DOCUMENT} tokens; split its file")

    def end_document(self) -> None:
        """Close the current document with the end-of-text id."""
        self.add(self._end_of_text)
        self._lengths.append(self._length)
        self._length = 0

    def extend(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> None:
        """Append whole documents of `lengths`, each with its end-of-text id, back to back."""
        self.add(tokens)
        self._lengths += lengths.tolist()
        self._length = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the documents closed so far."""
        return sum(self._lengths)

    def index(self) -> bytes:
        """What the `.idx` file holds."""
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * _CODES[self._code].itemsize
        offsets = np.concatenate([[0], ends[:-1]]).astype("<i8")[: lengths.size]
        documents = np.arange(lengths.size + 1, dtype="<i8")
        header = _HEADER.pack(_MAGIC, _VERSION, self._code, lengths.size, documents.size)
        told = _TOKENIZER_MAGIC + bytes.fromhex(self._tokenizer) if self._tokenizer else b""
        return header + lengths.tobytes() + offsets.tobytes() + documents.tobytes() + told


@contextmanager
def write_store(
    prefix: Path, vocab: int, end_of_text: int, tokenizer: str = ""
) -> Iterator[StoreWriter]:
    """A writer whose store appears at `prefix` when the block ends without an exception.
    `tokenizer`: the SHA-256 of the one whose ids are written, in hex, if that is to be told.

    Ids are uint16 for a vocab below 65,500 and int32 from there on. A store exists when its .idx
    does, so that is removed first and published last: a kill at any point leaves the old store,
    none, or the new one.
    """
    bin_path, idx_path = store_paths(prefix)
    bin_part, idx_part = (Path(f"{path}.{os.getpid()}.part") for path in (bin_path, idx_path))
    try:
        with bin_part.open("wb") as stream:
            writer = StoreWriter(stream, vocab, end_of_text, tokenizer)
            yield writer
            _flush(stream)
        with idx_part.open("wb") as stream:
            stream.write(writer.index())
            _flush(stream)
        idx_path.unlink(missing_ok=True)
        bin_part.replace(bin_path)
        idx_part.replace(idx_path)
    finally:
        bin_part.unlink(missing_ok=True)
        idx_part.unlink(missing_ok=True)


def _flush(stream: BufferedWriter) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _without_tokenizer(index: bytes) -> tuple[bytes, str]:
    """An .idx as Megatron has it, and the hash of the tokenizer that may stand behind it."""
    at = len(index) - _SHA_BYTES - len(_TOKENIZER_MAGIC)
    if at < 0 or not index.startswith(_TOKENIZER_MAGIC, at):
        return index, ""
    return index[:at], index[-_SHA_BYTES:].hex()


def _parse_index(
    prefix: Path, index: bytes
) -> tuple[np.dtype[Any], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(id type, sequence lengths [S], document index [D]) of a whole and consistent .idx."""
    if len(index) < _HEADER.size or not index.startswith(_MAGIC):
        raise _torn(prefix, ".idx does not begin as a token index does")
    _, version, code, sequences, documents = _HEADER.unpack_from(index)
    if version != _VERSION or code not in _CODES:
        raise _torn(prefix, f".idx has version {version} and type code {code}, not 1 and 4 or 8")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if len(index) != expected:
        raise _torn(prefix, f".idx has {len(index)} bytes, its header tells {expected}")
    lengths = np.frombuffer(index, "<i4", sequences, _HEADER.size)
    offsets = np.frombuffer(index, "<i8", sequences, _HEADER.size + 4 * sequences)
    document_index = np.frombuffer(index, "<i8", documents, _HEADER.size + 12 * sequences)
    dtype = _CODES[code]
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    back_to_back = np.array_equal(offsets[1:], ends[:-1]) and not offsets[:1].any()
    covers = (
        documents > 0
        and (lengths >= 0).all()
        and document_index[0] == 0
        and document_index[-1] == sequences
    )
    if not (back_to_back and covers and (np.diff(document_index) >= 0).all()):
        raise _torn(prefix, ".idx holds offsets that do not follow from its lengths")
    return dtype, lengths, document_index


def _torn(prefix: Path, what: str) -> DataError:
    return DataError(f"token store {prefix}: {what}; it is torn or not a store: build it again")
