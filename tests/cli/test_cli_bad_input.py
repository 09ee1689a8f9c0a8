"""Wrong input: exit code 2, one line that names what is wrong and the way out, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Cli, FinishedRun, one_error_line, snapshot


def override(*assignments: str) -> tuple[str, ...]:
    return tuple(arg for assignment in assignments for arg in ("-o", assignment))


# What is passed to `meshwright train job.toml`, and what its complaint must hold.
JOB_CASES = {
    "unknown key": (override("model.hiden=64"), ("model.hiden", "64", 'did you mean "hidden"?')),
    "unknown section": (override("modle.hidden=64"), ("modle", 'did you mean "model"?')),
    "no number": (override("job.steps=many"), ("job.steps", "'many'")),
    "axes": (override("layout.tp=4"), ("dp2xtp4xpp2", "16 ranks", "local:16")),
    "heads": (override("model.heads=6", "model.kv_heads=3", "model.head_dim=4"), ("kv_heads = 3",)),
    "layers": (
        override("model.layers=1"),
        ("layout.pp = 2", "model.layers = 1"),
    ),
    "batch": (override("data.global_batch=6"), ("data.global_batch = 6", "2 x 2 = 4", "4 or 8")),
    "sequence": (override("data.seq_len=33"), ("data.seq_len = 33", "layout.tp = 2")),
    "auto layout": (override("layout.dp_replicate=auto"), ("layout.dp_replicate", "'auto'")),
    "cluster": (override("cluster.ref=slurm:p:8"), ("cluster.ref", "'slurm:p:8'", "local:N")),
    "preset": (override("model.preset=tini"), ("model.preset", "'tini'", 'did you mean "tiny"?')),
    "vocab": (override("model.vocab=200"), ("model.vocab = 200", "257")),
    "not an override": (override("job.steps"), ("-o = 'job.steps'", "section.key=value")),
    "no section": (override("steps=3"), ("-o = 'steps=3'", "section.key=value")),
    "name": (override("job.name=../up"), ("job.name", "'../up'")),
    "missing corpus": (override("data.source=python-stlib"), ("no such file", "python-stdlib")),
    "missing tokenizer": (override("data.tokenizer=none.json"), ("data.tokenizer", "none.json")),
    "unknown option": (("--stesp", "3"), ("--stesp",)),
    "resume and run-dir": (("--resume", "--run-dir", "x"), ("--run-dir",)),
}


@pytest.mark.parametrize("case", JOB_CASES)
def test_bad_job(cli: Cli, job_file: Path, case: str) -> None:
    args, words = JOB_CASES[case]
    assert_refused(cli, words, "train", job_file, *args)


def assert_refused(cli: Cli, words: tuple[str, ...], *args: str | Path) -> None:
    before = snapshot(cli.cwd)
    line = one_error_line(cli.run(*args), 2)
    assert all(word in line for word in words), line
    assert snapshot(cli.cwd) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[job\nsteps = 3", ("not valid TOML", "line 1")),
        ("", ("job", "required")),
        ("job = 3", ("job", "table")),
        (b"[job]\nname = '\xff'", ("not valid TOML", "utf-8")),
    ],
    ids=["syntax", "empty", "no table", "no text"],
)
def test_bad_job_file(cli: Cli, tmp_path: Path, text: str | bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(cli, words, "train", path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("train", "none.toml"), ("none.toml", "No such file")),
        (("train", "."), ("job file", "--resume")),
        (("train", "none", "--resume"), ("none", "not a run")),
        (("check", "none.toml"), ("none.toml", "No such file")),
        (("check", "none.toml", "--steps", "0"), ("--steps", "1")),
        (("report", "."), ("not a run directory",)),
        (("report", "none", "--json"), ("none: not a run directory",)),
        (("generate", ".", "--prompt", "x"), ("holds no model",)),
        (("generate", "."), ("--prompt",)),
        (("generate", ".", "--prompt", "x", "--temperature", "-1"), ("--temperature", "0")),
        (("train",), ("JOB.toml|RUN",)),
        (("trian",), ("trian", "--help")),
        (("train", "a.toml", "b.toml"), ("b.toml",)),
    ],
    ids=" ".join,
)
def test_bad_command(cli: Cli, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(cli, words, *args)


def test_a_corpus_without_text(cli: Cli, job_file: Path, tmp_path: Path) -> None:
    empty, binary, white = (tmp_path / name for name in ("empty", "binary", "white.txt"))
    empty.mkdir()
    binary.mkdir()
    (binary / "a.bin").write_bytes(bytes(range(256)))
    white.write_text(" \n\n")
    for source in (empty, binary, white):
        words = ("data.source", str(source), "no UTF-8 text")
        assert_refused(cli, words, "train", job_file, *override(f"data.source={source}"))


def test_a_corpus_too_small_for_a_sequence(cli: Cli, job_file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("two lines\n" * 20)
    words = ("data.seq_len = 32", "data.source")
    assert_refused(cli, words, "train", job_file, *override(f"data.source={small}"))


def test_a_tokenizer_with_more_tokens_than_the_model(
    cli: Cli, job_file: Path, tokenizer_file: Path
) -> None:
    args = override(f"data.tokenizer={tokenizer_file}", "model.vocab=260")
    words = ("data.tokenizer", "320", "model.vocab = 260")
    assert_refused(cli, words, "train", job_file, *args)


def test_a_file_that_is_no_tokenizer(cli: Cli, job_file: Path) -> None:
    args = override(f"data.tokenizer={job_file}")
    assert_refused(cli, ("data.tokenizer", "not a tokenizer.json"), "train", job_file, *args)


def test_a_run_directory_that_holds_something(cli: Cli, job_file: Path) -> None:
    (cli.cwd / "mine").mkdir()
    (cli.cwd / "mine" / "thesis.txt").write_text("all of it")
    (cli.cwd / "file").write_text("")
    for name in ("mine", "file"):
        words = (name, "exists", "another directory")
        assert_refused(cli, words, "train", job_file, "--run-dir", name)


def test_a_run_without_a_model(cli: Cli, finished: FinishedRun) -> None:
    words = ("holds no model",)
    assert_refused(cli, words, "generate", finished.path / "checkpoints", "--prompt", "x")
