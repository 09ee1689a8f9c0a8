"""Sources that cannot be trained on, as `meshwright train` refuses them: one line each, exit 2."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import app, train
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.reader import BatchReader
from meshwright.data.rows import open_rows
from meshwright.data.share import Share
from meshwright.data.tokenizer import load_tokenizer
from meshwright.plan.job import resolve_job

JOB = """\
[job]
steps = 4
[model]
preset = "tiny"
vocab = 300
[data]
source = "good"
packing = "best-fit"
seq_len = 64
global_batch = 16
"""


@contextmanager
def nothing_started(*_about: object) -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two builds that go together and one of another tokenizer; files to build of."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("good", "fine"):
        rows = [{"text": f"{name} {number} " * 9} for number in range(60)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        build([str(path)], folder / name, BuildOptions(held_out=0.2), processes=1)
    (folder / "job.toml").write_text(JOB)
    text = (folder / "good" / "tokenizer.json").read_text()
    own = json.loads(text)
    own["model"]["vocab"]["zz"] = 257
    (folder / "other.json").write_text(json.dumps(own))
    assert load_tokenizer(folder / "other.json").size == 258
    options = BuildOptions(held_out=0.2, tokenizer=str(folder / "other.json"))
    build([str(folder / "good.jsonl")], folder / "other", options, processes=1)
    no_held_out = BuildOptions()
    build([str(folder / "good.jsonl")], folder / "train-only", no_held_out, processes=1)
    shutil.copytree(folder / "good", folder / "torn")
    (folder / "torn" / "train.bin").write_bytes(b"12")
    shutil.copytree(folder / "good", folder / "vanished")
    (folder / "vanished" / "train.bin").unlink()
    shutil.copytree(folder / "good", folder / "unsummed")
    (folder / "unsummed" / "train.crc").unlink()
    (folder / "nothing").mkdir()
    (folder / "empty.txt").touch()
    (folder / "few.txt").write_text("a few words\n" * 3)
    return folder


CASES = {
    "an empty folder": (['data.source="nothing"'], ("nothing", "no UTF-8 text", "name a file")),
    "an empty file": (['data.source="empty.txt"'], ("empty.txt", "no UTF-8 text")),
    "an empty one among others": (['data.source=["good", "nothing"]'], ("nothing", "no UTF-8")),
    "less than one window": (
        ['data.source="few.txt"', "data.packing=stream"],
        ("few.txt", "tokens, too few for a window of data.seq_len = 64"),
    ),
    "a build of another tokenizer": (
        ['data.source=["good", "other"]'],
        ("other': its tokenizer is", "build all sources with the same --tokenizer"),
    ),
    "another tokenizer than the build's": (
        ["data.tokenizer=other.json"],
        ("data.tokenizer", "good", "was built with another", "leave it out"),
    ),
    "more ids than the model has": (["model.vocab=200"], ("model.vocab = 200", "257 ids")),
    "nothing held out": (['data.source="train-only"'], ("train-only", "--held-out")),
    "torn": (['data.source="torn"'], ("torn", "train: .bin has 2 bytes", "build it again")),
    "vanished": (['data.source="vanished"'], ("vanished", "train.bin", "No such file")),
    "no checksums": (
        ['data.source="unsummed"', "data.verify=true"],
        ("unsummed", "train.bin", "no checksums", "leave data.verify out"),
    ),
    "no number of bad samples": (["data.bad_samples=some"], ("data.bad_samples", "'some'")),
    "too small a cache": (
        ['data.source="file://{here}/good"', "data.cache_bytes=10"],
        ("data.cache_bytes = 10", "262144", "raise it"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_trained_on_is_one_line(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    overrides, words = CASES[case]
    monkeypatch.chdir(made)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(train, "start_engine", nothing_started)
    assignments = [one.replace("{here}", str(made)) for one in overrides]
    options = [arg for one in assignments for arg in ("-o", one)]
    monkeypatch.setattr(sys, "argv", ["meshwright", "train", "job.toml", *options])
    assert app.run() == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert not (made / "runs").exists()


def test_a_source_of_fewer_rows_than_a_batch_is_gone_through_again_and_again(made: Path) -> None:
    """Each time all of it, in another order: several times in one batch, on any ranks."""
    long = JOB.replace("seq_len = 64", "seq_len = 255").replace("batch = 16", "batch = 64")
    job = resolve_job(tomllib.loads(long))
    rows = open_rows([made / "good" / "train"], job.data, job.job.seed, 256)
    (size,), batch = rows.order.sizes, job.data.global_batch
    assert 4 < size < batch
    readers = [BatchReader(rows, Share(batch, rank, 3)) for rank in range(3)]
    found = np.concatenate([next(one).content for _ in range(3) for one in readers])
    whole = rows.sources[0].read(np.arange(size))
    numbers = [np.flatnonzero((whole == row).all(1)).item() for row in found]
    epochs = [numbers[first : first + size] for first in range(0, 3 * batch - size, size)]
    assert all(sorted(epoch) == [*range(size)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
