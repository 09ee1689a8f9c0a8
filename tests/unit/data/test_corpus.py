"""Finding text, telling it from other files, and holding some of it out."""

from __future__ import annotations

import os
from errno import EACCES
from pathlib import Path

import pytest

from meshwright.base.errors import DataError
from meshwright.data import corpus as corpus_module
from meshwright.data.corpus import (
    Corpus,
    Document,
    TextFile,
    find_corpus,
    only_text,
    read_pieces,
    split,
)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def listed(names_and_sizes: dict[str, int]) -> Corpus:
    files = (TextFile(name, Path(name), size, 0) for name, size in names_and_sizes.items())
    return Corpus("made", Path(), tuple(files))


def content(document: Document) -> bytes:
    return document.file.path.read_bytes()[document.start : document.stop]


def read(document: Document) -> str:
    return "".join(text for text, _ in read_pieces(document))


def test_stdlib_holds_sources_and_docs_and_nothing_installed() -> None:
    corpus = find_corpus("python-stdlib")
    names = [file.name for file in corpus.files]
    assert {"os.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert {Path(name).suffix for name in names} <= {".py", ".txt", ".rst"}
    folders = {part for name in names for part in Path(name).parts}
    assert not folders & {"site-packages", "dist-packages", "__pycache__"}
    assert names == sorted(names)


def test_stdlib_split_holds_out_whole_files_and_about_a_twentieth() -> None:
    corpus = find_corpus("python-stdlib")
    train, held_out = split(corpus)
    assert {doc.file.name for doc in train}.isdisjoint({doc.file.name for doc in held_out})
    assert len(train) + len(held_out) == len(corpus.files)
    assert 0.02 < len(held_out) / len(corpus.files) < 0.08


def test_folder_is_searched_for_text_hidden_left_out(tmp_path: Path) -> None:
    write(tmp_path / "b/two.md", "zwei ä\n")
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / ".git/config", "hidden\n")
    write(tmp_path / ".env", "hidden\n")
    write(tmp_path / "image.png", b"\x89PNG\r\n\xff\xfe")
    write(tmp_path / "zeros.dat", b"text until\0here")
    write(tmp_path / "blank.txt", " \n\t\n")
    write(tmp_path / "empty.txt", "")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    corpus = only_text(find_corpus(str(tmp_path)))
    assert [file.name for file in corpus.files] == ["a.txt", "b/two.md"]


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    path = write(tmp_path / ".notes", "text\n")
    assert [file.name for file in find_corpus(str(path)).files] == [".notes"]


@pytest.mark.parametrize("kind", ["missing", "empty folder", "binary file", "empty file"])
def test_corpus_without_text_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "corpus"
    if kind == "empty folder":
        source.mkdir()
    elif kind != "missing":
        write(source, b"\xff\xfe\x00" if kind == "binary file" else b"")
    with pytest.raises(DataError, match=r"^data\.source = '.*corpus': .*name") as caught:
        find_corpus(str(source))
    assert "\n" not in str(caught.value)


def test_misspelt_source_gets_a_hint() -> None:
    with pytest.raises(DataError, match='did you mean "python-stdlib"'):
        find_corpus("python-stdlb")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not bind root, so the refusal is made up."""

    def refuse(path: Path, _mode: str) -> None:
        raise PermissionError(EACCES, "Permission denied", str(path))

    write(tmp_path / "secret.txt", "text")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"secret\.txt: cannot be read"):
        find_corpus(str(tmp_path))


def test_split_of_a_file_does_not_depend_on_its_neighbours() -> None:
    everything = listed({f"f{i}": 100 for i in range(400)})
    fewer = listed({f"f{i}": 100 for i in range(0, 400, 2)})
    all_held_out = {doc.file.name for doc in split(everything)[1]}
    some_held_out = {doc.file.name for doc in split(fewer)[1]}
    assert some_held_out == all_held_out & {file.name for file in fewer.files}
    assert 8 <= len(all_held_out) <= 34


@pytest.mark.parametrize("names", [["book.txt"], ["data.txt", "readme.md"]])
def test_small_corpus_holds_out_the_last_lines_of_each_file(
    tmp_path: Path, names: list[str]
) -> None:
    text = "".join(f"line {i}\n" for i in range(1000)).encode()
    for name in names:
        write(tmp_path / name, text)
    train, held_out = split(only_text(find_corpus(str(tmp_path))))
    assert [doc.file.name for doc in train] == [doc.file.name for doc in held_out] == names
    for head, tail in zip(train, held_out, strict=True):
        assert content(head) + content(tail) == text
        assert content(head).endswith(b"\n")
        assert read(head) + read(tail) == text.decode()
        assert 0.04 < len(content(tail)) / len(text) <= 0.05


def test_one_file_that_outweighs_all_others_is_not_held_out_whole() -> None:
    names = [f"f{i}" for i in range(400)]
    heavy = split(listed(dict.fromkeys(names, 100)))[1][0].file.name
    sizes = {**dict.fromkeys(names, 100), heavy: 1_000_000}
    by_name = {doc.file.name: doc for doc in split_on_disk_sizes(sizes)}
    assert by_name[heavy].start == 0 and 0 < by_name[heavy].stop < sizes[heavy]


def split_on_disk_sizes(sizes: dict[str, int]) -> tuple[Document, ...]:
    """Train documents where every file is a stream of zero bytes (no line ends)."""
    files = (TextFile(name, Path(os.devnull), size, 0) for name, size in sizes.items())
    return split(Corpus("made", Path(), tuple(files)))[0]


def test_file_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    for pad in range(4):
        path = write(tmp_path / f"{pad}.txt", "x" * pad + "🙂" * 500)
        train, held_out = split(find_corpus(str(path)))
        assert content(train[0]).decode() + content(held_out[0]).decode() == path.read_text()


def test_one_character_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little text"):
        split(find_corpus(str(write(tmp_path / "a.txt", "a"))))


def test_pieces_join_to_the_document_and_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 64)
    text = "".join(f"zeile {i} äöü🙂\n" for i in range(50)) + "🙂" * 100
    (file,) = find_corpus(str(write(tmp_path / "a.txt", text))).files
    pieces = list(read_pieces(Document(file, 0, file.size)))
    assert "".join(piece for piece, _ in pieces) == text
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.endswith("\n") for piece, _ in pieces[:5])
    assert max(len(piece.encode()) for piece, _ in pieces) <= 2 * 64 + 3


def test_file_that_shrank_or_went_bad_since_it_was_listed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text " * 100)
    (file,) = find_corpus(str(path)).files
    for now, message in ((b"short", "changed while"), (b"\xff" * 500, "not UTF-8")):
        path.write_bytes(now)
        with pytest.raises(DataError, match=rf"a\.txt: {message}"):
            list(read_pieces(Document(file, 0, file.size)))
