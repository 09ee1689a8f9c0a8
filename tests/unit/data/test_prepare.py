"""Building stores in the cache: right, reused, and safe against kills and rivals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError, DataError
from meshwright.data import corpus as corpus_module
from meshwright.data import prepare as prepare_module
from meshwright.data.corpus import find_corpus, only_text, split
from meshwright.data.prepare import Prepared, prepare
from meshwright.data.store import open_store
from meshwright.data.tokenizer import load_tokenizer

VOCAB = 300
CHILD = """
import sys
from pathlib import Path
from meshwright.data.prepare import prepare

def progress(what, done):
    print(what, flush=True)
    if what == sys.argv[3]:
        sys.stdin.read()

print(prepare(sys.argv[1], "bpe", 300, Path(sys.argv[2]), progress).train_prefix)
"""


def ignore(what: str, done: float) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sixty small texts, one of them with the name of the special token in it."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(60):
        lines = [f"def function_{i}_{j}(x):\n    return x * {j}\n" for j in range(20)]
        (folder / f"module{i}.py").write_text("".join(lines) + "# <|endoftext|> ä\n")
    (folder / "image.bin").write_bytes(b"\xff\x00\xff")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(source: Path, cache: Path, tokenizer: str = "bpe", vocab: int = VOCAB) -> Prepared:
    return prepare(str(source), tokenizer, vocab, cache, ignore)


def start_child(source: Path, cache: Path, stop_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(cache), stop_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("piece_bytes", [256 * 1024, 100])
def test_stores_hold_the_text_of_the_split(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Also where documents are read in several pieces and pieces fall into several batches."""
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARS", 3 * piece_bytes)
    prepared = build(source, cache)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    parts = split(only_text(find_corpus(str(source))))
    prefixes = (prepared.train_prefix, prepared.held_out_prefix)
    for prefix, documents in zip(prefixes, parts, strict=True):
        store = open_store(prefix)
        assert store.n_documents == len(documents) > 0
        assert (store.tokens == prepared.end_of_text).sum() == len(documents)
        for i, document in enumerate(documents):
            assert store.document(i)[-1] == prepared.end_of_text
            assert tokenizer.decode(store.document(i)) == document.file.path.read_text()


def test_manifest_tells_what_was_built(source: Path, cache: Path) -> None:
    prepared = build(source, cache)
    manifest = prepared.manifest
    texts = [path.read_bytes() for path in source.glob("*.py")]
    assert manifest["source"] == str(source)
    assert (manifest["files"], manifest["bytes"]) == (60, sum(map(len, texts)))
    for part, prefix in (("train", "train_prefix"), ("held_out", "held_out_prefix")):
        assert manifest[part]["tokens"] == open_store(getattr(prepared, prefix)).n_tokens
    assert manifest["tokens"] == manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    digest = sha256(prepared.tokenizer_path.read_bytes()).hexdigest()
    assert manifest["tokenizer_sha256"] == digest
    assert (manifest["vocab"], manifest["tokenizer_size"]) == (VOCAB, VOCAB)


def test_second_call_builds_nothing(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(source, cache)
    monkeypatch.delattr(prepare_module, "_build")
    assert build(source, cache) == first


@pytest.mark.parametrize("change", ["content", "new file", "vocab", "tokenizer"])
def test_whatever_changes_gets_stores_of_its_own(source: Path, cache: Path, change: str) -> None:
    first = build(source, cache)
    tokenizer, vocab = "bpe", VOCAB
    if change == "content":
        path = source / "module3.py"
        path.write_text(path.read_text().replace("return", "RETURN"))
        os.utime(path, ns=(0, 0))
    elif change == "new file":
        (source / "extra.py").write_text("pass\n")
    elif change == "vocab":
        vocab = 310
    else:
        tokenizer = str(shutil.copy(first.tokenizer_path, source.parent / "own.json"))
    assert build(source, cache, tokenizer, vocab).train_prefix != first.train_prefix
    assert len(list(cache.iterdir())) == 2


def test_same_files_give_the_same_bytes(source: Path, cache: Path) -> None:
    first, second = build(source, cache), build(source, cache.with_name("other"))
    for path in first.train_prefix.parent.iterdir():
        assert path.read_bytes() == (second.train_prefix.parent / path.name).read_bytes()


def test_progress_goes_from_nothing_to_all(source: Path, cache: Path) -> None:
    seen: list[tuple[str, float]] = []
    prepare(str(source), "bpe", VOCAB, cache, lambda what, done: seen.append((what, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert seen[-2][1] == pytest.approx(1.0)


@pytest.mark.parametrize("case", ["no text", "vocab too small", "tokenizer too large"])
def test_bad_input_writes_nothing(source: Path, cache: Path, tmp_path: Path, case: str) -> None:
    if case == "no text":
        with pytest.raises(DataError, match=r"^data\.source"):
            build(source / "image.bin", cache)
    elif case == "vocab too small":
        with pytest.raises(ConfigError, match=r"^model\.vocab = 200"):
            build(source, cache, vocab=200)
    else:
        own = str(shutil.copy(build(source, tmp_path / "a").tokenizer_path, tmp_path / "own.json"))
        with pytest.raises(ConfigError, match=r"^data\.tokenizer = .*has 300 tokens"):
            build(source, cache, tokenizer=own, vocab=299)
    assert not cache.exists()


def test_cache_that_cannot_be_written_is_named(source: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(DataError, match=r"data cache .*cache: File exists; .*another folder"):
        build(source, cache)


@pytest.mark.parametrize(
    "moment", ["training the tokenizer", "encoding text", "publishing the stores"]
)
def test_kill_leaves_nothing_half_used(source: Path, cache: Path, moment: str) -> None:
    with start_child(source, cache, moment) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != moment:
            assert child.poll() is None
        child.kill()
    assert [path for path in cache.iterdir() if path.name[0] != "."] == []
    prepared = build(source, cache)
    assert open_store(prepared.train_prefix).n_tokens == prepared.manifest["train"]["tokens"]


def test_two_processes_at_once_agree(source: Path, cache: Path) -> None:
    children = [start_child(source, cache, "") for _ in range(2)]
    outputs = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] == str(build(source, cache).train_prefix)
    assert [path.name for path in cache.iterdir()] == [Path(outputs[0][-1]).parent.name]


def test_slower_of_two_builders_uses_what_the_faster_published(source: Path, cache: Path) -> None:
    faster: list[Prepared] = []
    inode: list[int] = []

    def let_another_win(what: str, _done: float) -> None:
        if what == "encoding text" and not faster:
            faster.append(build(source, cache))
            inode.append(faster[0].tokenizer_path.stat().st_ino)

    slower = prepare(str(source), "bpe", VOCAB, cache, let_another_win)
    assert slower == faster[0]
    assert slower.tokenizer_path.stat().st_ino == inode[0]
    assert [path.name for path in cache.iterdir()] == [slower.train_prefix.parent.name]


def test_source_that_changes_during_the_build_is_not_published(source: Path, cache: Path) -> None:
    def touch(what: str, _done: float) -> None:
        if what == "encoding text":
            (source / "module0.py").write_text("changed\n")

    with pytest.raises(DataError, match="changed during reading; run again"):
        prepare(str(source), "bpe", VOCAB, cache, touch)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["train.bin", "held_out.idx", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_stores_are_built_again(source: Path, cache: Path, name: str, damage: str) -> None:
    first = build(source, cache)
    path = first.train_prefix.parent / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-3])
    assert build(source, cache) == first
    assert path.read_bytes() == whole
    assert len(list(cache.iterdir())) == 1


def test_leftovers_of_killed_builds_go_and_live_builds_stay(source: Path, cache: Path) -> None:
    dead, live = cache / ".building-dead", cache / ".building-live"
    for folder in (dead, live):
        folder.mkdir(parents=True)
        (folder / "train.bin.1.part").write_bytes(b"x")
        os.utime(folder, (0, 0))
    os.utime(dead / "train.bin.1.part", (0, 0))
    build(source, cache)
    assert (dead.exists(), live.exists()) == (False, True)


def test_manifest_is_plain_json(source: Path, cache: Path) -> None:
    prepared = build(source, cache)
    path = prepared.train_prefix.parent / "manifest.json"
    assert json.loads(path.read_text()) == prepared.manifest
