"""Token stores: written, read back, read by Megatron, and refused when torn."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import DataError
from meshwright.data.store import check_tokenizer, open_store, store_paths, write_store

END = 9
DOCUMENTS = [[1, 2, 3], [], [4, 5, 6, 7], [8]]


def write_documents(
    prefix: Path, documents: list[list[int]], vocab: int = 10, tokenizer: str = ""
) -> Path:
    with write_store(prefix, vocab, END, tokenizer) as writer:
        for document in documents:
            for token in document:  # one by one: a document may come in pieces
                writer.add(np.array([token]))
            writer.end_document()
    return prefix


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_498), max_size=20), min_size=1, max_size=8),
    vocab=st.sampled_from([65_499, 65_500, 200_000]),
)
def test_documents_come_back_with_their_end(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab: int
) -> None:
    prefix = write_documents(tmp_path_factory.mktemp("store") / "s", documents, vocab)
    store = open_store(prefix)
    assert store.n_documents == len(documents)
    assert [store.document(i).tolist() for i in range(len(documents))] == [
        [*document, END] for document in documents
    ]
    assert store.tokens.tolist() == [t for document in documents for t in [*document, END]]
    assert store.n_tokens == len(store.tokens)
    # Megatron: uint16 below 65,500, else int32 (indexed_dataset.py, DType.optimal_dtype)
    assert store.tokens.dtype == (np.uint16 if vocab < 65_500 else np.int32)


def test_index_has_the_published_layout(tmp_path: Path) -> None:
    _, idx_path = store_paths(write_documents(tmp_path / "s", [[1, 2], [3]]))
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert idx_path.read_bytes() == expected


def test_the_tokenizer_is_told_behind_the_published_layout(tmp_path: Path) -> None:
    plain = write_documents(tmp_path / "plain", DOCUMENTS)
    told = write_documents(tmp_path / "told", DOCUMENTS, tokenizer="ab" * 32)
    old, new = (store_paths(prefix)[1].read_bytes() for prefix in (plain, told))
    assert new == old + b"MWTOKID\x00" + b"\xab" * 32
    stores = [open_store(prefix) for prefix in (plain, told)]
    assert [store.tokenizer for store in stores] == ["", "ab" * 32]
    assert np.array_equal(stores[0].starts, stores[1].starts)
    check_tokenizer(stores[0], "cd" * 32, "build")
    check_tokenizer(stores[1], "ab" * 32, "build")
    with pytest.raises(DataError, match=r"build/told\.idx: its ids are of tokenizer ababab.* cdcd"):
        check_tokenizer(stores[1], "cd" * 32, "build")
    store_paths(told)[1].write_bytes(new[:-1])
    with pytest.raises(DataError, match="torn"):
        open_store(told)


def test_megatron_reads_the_store(tmp_path: Path) -> None:
    megatron = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset",
        reason="megatron-core is not installed: the store was not read with it",
        exc_type=ImportError,
    )
    for vocab, tokenizer in ((10, ""), (70_000, ""), (10, "ab" * 32)):
        prefix = write_documents(tmp_path / f"s{vocab}{tokenizer}", DOCUMENTS, vocab, tokenizer)
        dataset = megatron.IndexedDataset(str(prefix))
        assert [dataset[i].tolist() for i in range(len(dataset))] == [
            [*document, END] for document in DOCUMENTS
        ]
        assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    """Megatron's own tools may write a document as several sequences."""
    bin_path, idx_path = store_paths(tmp_path / "s")
    bin_path.write_bytes(np.arange(6, dtype="<i4").tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    arrays = (
        struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 4, 12) + struct.pack("<3q", 0, 2, 3)
    )
    idx_path.write_bytes(header + arrays)
    store = open_store(tmp_path / "s")
    assert [store.document(i).tolist() for i in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "s", DOCUMENTS)
    for path in store_paths(prefix):
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(DataError, match="torn or not a store"):
                open_store(prefix)
        path.write_bytes(whole)
    assert open_store(prefix).n_documents == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("offset", "change"),
    [(0, b"X"), (9, b"\2"), (17, b"\7"), (34, b"\3"), (54, b"\2"), (82, b"\1"), (114, b"\3")],
)
def test_changed_index_is_refused(tmp_path: Path, offset: int, change: bytes) -> None:
    """Magic, version, type code, a length, an offset, first and last document entry."""
    prefix = write_documents(tmp_path / "s", DOCUMENTS)
    idx_path = store_paths(prefix)[1]
    index = bytearray(idx_path.read_bytes())
    assert index[offset : offset + 1] != change
    index[offset : offset + 1] = change
    idx_path.write_bytes(index)
    with pytest.raises(DataError, match="torn or not a store"):
        open_store(prefix)


def test_absent_half_is_named(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "s", DOCUMENTS)
    for path in store_paths(prefix):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(DataError, match=rf"{path.name}: No such file"):
            open_store(prefix)
        path.write_bytes(content)


def test_store_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokens"):
        open_store(write_documents(tmp_path / "s", []))


@pytest.mark.parametrize("token", [-1, 10])
def test_id_outside_the_vocab_is_refused_and_nothing_appears(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(DataError, match=rf"token id {token} is outside model\.vocab = 10"),
        write_store(tmp_path / "s", 10, END) as writer,
    ):
        writer.add(np.array([3, token]))
    assert list(tmp_path.iterdir()) == []


def test_failed_rewrite_leaves_the_old_store(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "s", DOCUMENTS)
    with pytest.raises(RuntimeError), write_store(prefix, 10, END) as writer:
        writer.end_document()
        raise RuntimeError
    assert open_store(prefix).n_documents == len(DOCUMENTS)
    assert len(list(tmp_path.iterdir())) == 2


def test_kill_between_the_two_renames_leaves_no_mixed_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_documents(tmp_path / "s", [[1, 2]])

    def killed(self: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        self.rename(target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_documents(prefix, [[3, 4]])  # of the same size: only the order can tell
    with pytest.raises(DataError, match=r"s\.idx: No such file"):
        open_store(prefix)
