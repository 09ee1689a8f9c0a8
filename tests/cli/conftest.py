"""A small corpus, and one run on 8 ranks that went to its end, made once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from cli_runs import Cli, FinishedRun, write_job

WORDS = ("alpha", "beta", "gamma", "value", "index", "count", "total", "result", "items", "path")


def some_code(seed: int) -> str:
    """About 4 kB of Python."""
    draw = random.Random(seed).choice
    return "".join(
        f"def {draw(WORDS)}_{draw(WORDS)}({draw(WORDS)}):\n    return {draw(WORDS)} + {n}\n\n"
        for n in range(70)
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(24):
        (folder / f"module_{number}.py").write_text(some_code(number))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(tmp_path: Path, cache: Path) -> Cli:
    home = tmp_path / "home"
    home.mkdir()
    return Cli(home, cache)


@pytest.fixture
def job_file(tmp_path: Path, corpus: Path) -> Path:
    return write_job(tmp_path / "job.toml", corpus)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> FinishedRun:
    """Trained with `--json`. Tests read it and leave it as it is."""
    home = tmp_path_factory.mktemp("finished")
    job_file = write_job(home / "job.toml", corpus)
    said = Cli(home, cache).run("train", job_file, "--json")
    assert said.returncode == 0, said.stderr
    return FinishedRun(home / "runs" / "small-1", job_file, said)


@pytest.fixture(scope="session")
def tokenizer_file(finished: FinishedRun) -> Path:
    """A tokenizer.json of 320 tokens."""
    path = finished.path / "model" / "tokenizer.json"
    assert len(json.loads(path.read_text())["model"]["vocab"]) <= 320
    return path
