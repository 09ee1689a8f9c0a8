"""Byte-level BPE: any text comes back, training is repeatable, what does not fit is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.data.corpus import Document, find_corpus, split
from meshwright.data.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    check_fits,
    load_tokenizer,
    train_bpe,
)

TRAIN_AND_PRINT = """
import sys
from meshwright.data.corpus import find_corpus, split
from meshwright.data.tokenizer import train_bpe
print(train_bpe(split(find_corpus(sys.argv[1]))[0], 400).to_json())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few source files of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    stdlib = {file.name: file.path for file in find_corpus("python-stdlib").files}
    for name in ("argparse.py", "ast.py", "bdb.py", "json/decoder.py"):
        (folder / name.replace("/", "-")).write_bytes(stdlib[name].read_bytes())
    return folder


@pytest.fixture(scope="module")
def documents(folder: Path) -> tuple[Document, ...]:
    return split(find_corpus(str(folder)))[0]


@pytest.fixture(scope="module")
def trained(documents: tuple[Document, ...]) -> TextTokenizer:
    return train_bpe(documents, 400)


def test_vocab_is_exactly_what_was_asked_for(
    trained: TextTokenizer, documents: tuple[Document, ...]
) -> None:
    assert trained.size == 400
    assert train_bpe(documents, 257).size == 257
    assert 0 <= trained.end_of_text < 400


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(trained: TextTokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert not len(ids) or 0 <= ids.min() <= ids.max() < trained.size


def test_merges_were_learnt(trained: TextTokenizer) -> None:
    assert len(trained.encode("def self.return import")) < 14


def test_name_of_the_special_token_in_a_text_is_plain_text(trained: TextTokenizer) -> None:
    ids = trained.encode(f"a {END_OF_TEXT} b")
    assert trained.end_of_text not in ids
    assert trained.decode(ids) == f"a {END_OF_TEXT} b"
    assert trained.decode([trained.end_of_text]) == ""


def test_two_processes_train_the_same_bytes(folder: Path, trained: TextTokenizer) -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", TRAIN_AND_PRINT, str(folder)],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.rstrip("\n")
        for _ in range(2)
    ]  # fmt: skip
    assert runs == [trained.to_json()] * 2


def test_saved_tokenizer_loads_as_it_was(trained: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_json())
    loaded = load_tokenizer(path)
    assert (loaded.size, loaded.end_of_text) == (trained.size, trained.end_of_text)
    text = f"class A:\n    x = 1  # {END_OF_TEXT}\n"
    assert loaded.encode(text).tolist() == trained.encode(text).tolist()


def test_truncation_and_padding_of_a_loaded_tokenizer_are_off(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    raw = json.loads(trained.to_json())
    raw["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw))
    assert load_tokenizer(path).decode(load_tokenizer(path).encode("x" * 50)) == "x" * 50


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{}", "not a tokenizer.json"), ("ÿ", "not a tokenizer.json")],
)
def test_unusable_tokenizer_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"^data\.tokenizer = '.*': .*{message}") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_tokenizer_without_end_of_text_is_refused(trained: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_json().replace(END_OF_TEXT, "<pad>"))
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        load_tokenizer(path)


def test_vocab_bounds(trained: TextTokenizer, documents: tuple[Document, ...]) -> None:
    check_fits(trained, 400, "bpe")
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer = 'bpe': has 400 .*model\.vocab = 399;"
    ):
        check_fits(trained, 399, "bpe")
    with pytest.raises(ConfigError, match=r"^model\.vocab = 256: .*257"):
        train_bpe(documents, 256)
