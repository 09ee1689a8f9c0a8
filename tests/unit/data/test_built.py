"""Builds as sources of a run, and the rows that several of them make."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.base.errors import DataError, InputError
from meshwright.data.baseline import ngram_baselines
from meshwright.data.built import check_together, has_held_out, is_build, open_build
from meshwright.data.held_out import open_held_out
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.mixture import Mixture, Stage
from meshwright.data.order import MixedRows
from meshwright.data.packing import PackedRows
from meshwright.data.rows import check_goes_on, open_rows
from meshwright.data.store import TokenStore, open_store, write_store
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.data.windows import Windows

VOCAB, END = 257, 256


def made(folder: Path, name: str, held_out: float = 0.2, count: int = 60) -> Path:
    """A build of `count` short texts."""
    rows = [{"text": f"{name} {number} " * (3 + number % 5)} for number in range(count)]
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([str(source)], folder / name, BuildOptions(held_out=held_out), processes=1)
    return folder / name


@dataclass(frozen=True)
class How:
    """As `[data]` says it."""

    seq_len: int = 31
    inside_documents: bool = True
    best_fit: bool = True
    weights: tuple[float, ...] = (1.0,)

    def mixture(self, seed: int) -> Mixture:
        return Mixture((Stage(0, self.weights),), seed)


def test_a_build_is_told_from_a_folder_of_text(tmp_path: Path) -> None:
    folder = made(tmp_path, "a")
    assert is_build(str(folder))
    (folder / "train.idx").unlink()
    assert is_build(str(folder))  # a damaged one is none the less
    text = tmp_path / "text"
    text.mkdir()
    (text / "manifest.json").write_text("{}")
    assert not is_build(str(text))
    assert not is_build("python-stdlib")


def test_what_a_run_needs_of_a_build(tmp_path: Path) -> None:
    folder = made(tmp_path, "a")
    found = open_build(str(folder), "bpe", VOCAB)
    assert found.end_of_text == END
    assert has_held_out(found)
    stores = [open_store(prefix) for prefix in (found.train_prefix, found.held_out_prefix)]
    assert sum(store.n_tokens for store in stores) == found.manifest["tokens"]
    text = json.loads(found.tokenizer_path.read_text())
    assert json.loads(byte_tokenizer().to_json()) == text


def test_bytes_are_their_own_ids_in_the_tokenizer_too() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(0x250))) + "größe 日本 🙂\n\t <|endoftext|>"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.end_of_text, tokenizer.size) == (END, VOCAB)


def torn(folder: Path) -> None:
    (folder / "train.bin").write_bytes(b"123")


def vanished(folder: Path) -> None:
    (folder / "held_out.idx").unlink()


def of_samples(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "kind": "samples"}))


def of_tomorrow(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 99, "files": {}}')


@pytest.mark.parametrize(
    "harm, asked, says",
    [
        (torn, {}, ".bin has 3 bytes"),
        (vanished, {}, "held_out.idx: No such file"),
        (of_samples, {}, "holds samples, which no model here reads; build it with --kind tokens"),
        (of_tomorrow, {}, "is of format 99"),
        (None, {"vocab": 256}, "model.vocab = 256: "),
        (None, {"tokenizer": "other.json"}, "was built with another"),
        (None, {"tokenizer": "none.json"}, "No such file"),
    ],
)
def test_a_build_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, harm: Any, asked: dict[str, Any], says: str
) -> None:
    folder = made(tmp_path, "a")
    if harm:
        harm(folder)
    other = byte_tokenizer()
    other.backend.add_tokens(["more"])
    (tmp_path / "other.json").write_text(other.to_json())
    asked = {"tokenizer": "bpe", "vocab": VOCAB, **asked}
    if asked["tokenizer"] != "bpe":
        asked["tokenizer"] = str(tmp_path / asked["tokenizer"])
    with pytest.raises(InputError) as refused:
        open_build(str(folder), **asked)
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_sources_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    found = open_build(str(made(tmp_path, "a")), "bpe", VOCAB)
    other = replace(found, manifest={**found.manifest, "source": "b", "tokenizer_sha256": "x"})
    check_together([found, found])
    with pytest.raises(DataError, match=r"data.source = 'b': its tokenizer is x.*--tokenizer"):
        check_together([found, other])


def test_sources_without_anything_held_out_are_refused(tmp_path: Path) -> None:
    kept = open_build(str(made(tmp_path, "a")), "bpe", VOCAB)
    none = open_build(str(made(tmp_path, "b", held_out=0.0)), "bpe", VOCAB)
    check_together([none, kept])
    with pytest.raises(DataError, match=r"has nothing to evaluate on.*--held-out"):
        check_together([none])


def both(tmp_path: Path, **how: Any) -> MixedRows:
    prefixes = [tmp_path / name / "train" for name in ("a", "b")]
    return open_rows(prefixes, How(weights=(3.0, 1.0), **how), 5, END)


def test_rows_are_packed_and_mixed_as_the_job_says(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path, name)
    rows = both(tmp_path)
    assert all(isinstance(source, PackedRows) for source in rows.sources)
    drawn = rows.order.at(np.arange(64)).source
    assert np.bincount(drawn).tolist() == [48, 16]
    windows = both(tmp_path, best_fit=False)
    assert all(isinstance(source, Windows) for source in windows.sources)
    assert rows.fingerprint != windows.fingerprint


def test_a_store_whose_documents_do_not_end_is_refused_where_that_matters(tmp_path: Path) -> None:
    with write_store(tmp_path / "train", VOCAB, end_of_text=7) as writer:
        writer.add(np.arange(100))
        writer.end_document()
    with pytest.raises(DataError, match=r"ends with token 7.*data.packing = 'stream'"):
        open_rows([tmp_path / "train"], How(), 0, END)
    assert len(open_rows([tmp_path / "train"], How(31, False, False), 0, END).sources) == 1


def test_a_run_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path, name)
    meta = {"data": both(tmp_path).state(640)}
    check_goes_on(both(tmp_path), meta, 640)
    check_goes_on(both(tmp_path), {}, 640)  # as of earlier versions
    with pytest.raises(DataError, match=r"at sample 640: the run would go on at 320.*global_batch"):
        check_goes_on(both(tmp_path), meta, 320)
    shutil.rmtree(tmp_path / "b")
    made(tmp_path, "b", count=61)
    with pytest.raises(DataError, match=r"data state at sample 640: is of data .*same sources"):
        check_goes_on(both(tmp_path), meta, 640)


def test_what_is_held_out_of_several_sources_is_looked_at_by_their_last_weights(
    tmp_path: Path,
) -> None:
    parts: list[Path | None] = [made(tmp_path, name) / "held_out" for name in ("a", "b")]
    mixture = Mixture((Stage(0, (1.0, 0.0)), Stage(100, (1.0, 3.0))), 0)
    joined = open_held_out(parts, 7, mixture)
    first = len(open_held_out(parts[:1], 7, Mixture((Stage(0, (1.0,)),), 0)))
    assert (joined.spread(8) >= first).sum() == 6
    alone = open_held_out([None, parts[1]], 7, mixture)
    assert isinstance(alone, Windows)


def test_baselines_leave_out_what_begins_a_document() -> None:
    tokens = np.tile(np.array([1, 2, 3, 0, 4, 5, 6, 0]), 50)
    store = TokenStore(Path("made"), tokens, np.array([0, tokens.size]))
    windows = Windows(store, 40)
    whole = ngram_baselines(store, windows, windows.spread(4), 8)
    inside = ngram_baselines(store, windows, windows.spread(4), 8, inside=0)
    assert whole.targets - inside.targets == 40
    assert inside.bigram_loss < whole.bigram_loss  # what follows an end is the one thing unsure
