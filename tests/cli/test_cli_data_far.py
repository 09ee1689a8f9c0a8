"""Runs on builds that stay in S3, and on builds that are damaged."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Cli, events, learning
from s3_server import Server, serving

from meshwright.base.errors import DataError
from meshwright.base.events import Kind
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import commits
from meshwright.data.checksums import BLOCK_BYTES
from meshwright.data.far import mirror
from meshwright.data.packing import PAD
from meshwright.data.tolerance import BadSamples
from meshwright.plan.job import load_job
from meshwright.train.inputs import open_samples

pytest.importorskip("s3fs")
pytest.importorskip("moto")

STEPS, LENGTH, BATCH = 8, 256, 8
JOB = f"""\
[job]
name = "far"
steps = {STEPS}
eval_every = 4
eval_sequences = 8

[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
kv_heads = 2
ffn_hidden = 32
vocab = 257

[data]
source = "text"
packing = "best-fit"
seq_len = {LENGTH}
global_batch = {BATCH}

[layout]
dp_replicate = 2

[cluster]
ref = "local:2"

[checkpoint]
every = 4
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """A job file and a build of four blocks, here and in S3; and one that is damaged in two."""
    folder = tmp_path_factory.mktemp("far")
    (folder / "job.toml").write_text(JOB)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(99)]
    rows = [{"text": " ".join(draw.choices(words, k=draw.randint(20, 200)))} for _ in range(600)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli = cli_of(folder, server)
    cli.ok("data", "build", "text", "text.jsonl", "--held-out", "0.05", "--processes", "1")
    shutil.copytree(folder / "text", folder / "damaged")
    path = folder / "damaged" / "train.bin"
    content = bytearray(path.read_bytes())
    assert len(content) > 3 * BLOCK_BYTES
    content[BLOCK_BYTES + 5] ^= 1
    path.write_bytes(content)
    for name in ("text", "damaged"):
        assert server.put(folder / name, f"bucket-{name}") == far(name)
    return folder


def cli_of(home: Path, server: Server, cache: str = "cache") -> Cli:
    return Cli(home, home / cache, extra_env=server.env)


def far(name: str) -> str:
    return f"s3://bucket-{name}/{name}"


def source(where: str | Path) -> tuple[str, str]:
    return ("-o", f"data.source={json.dumps(str(where))}")


@pytest.fixture(scope="module")
def near(home: Path, server: Server) -> Path:
    cli_of(home, server).ok("train", "job.toml", "--run-dir", "near")
    return home / "near"


def test_s3_teaches_the_same_and_is_asked_again_when_it_fails_or_is_slow(
    home: Path, server: Server, near: Path
) -> None:
    # s3fs tries a block five times by itself; two ranks ask for ten at most side by side.
    before = server.asked
    server.fault = lambda n: "down" if n <= before + 45 or n % 9 == 1 else "wait"
    tight = ("-o", f"data.cache_bytes={3 * 2 * BLOCK_BYTES}")
    try:
        cli_of(home, server).ok("train", "job.toml", *source(far("text")), *tight, "--run-dir", "s")
    finally:
        server.fault = lambda _: None
    assert learning(home / "s") == learning(near)
    assert server.asked - before > 10
    kept = sum(path.stat().st_size for path in (home / "cache/data/blocks").rglob("*"))
    assert 0 < kept <= 3 * 2 * BLOCK_BYTES + 3 * 2 * 4096  # and the folders themselves


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            "s3://no-such-bucket/text",
            r"no manifest\.json: The specified bucket .*uploaded",
        ),
        ("s3://bucket-text/other", r"no manifest\.json: .*uploaded"),
        ("nonsense://x/y", "cannot be opened: .*check the address"),
    ],
    ids=["no bucket", "no build", "no protocol"],
)
def test_wrong_addresses_are_one_line(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, where: str, words: str
) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=f"^{where}: {words}"):
        mirror(where, tmp_path)


def test_what_vanishes_under_a_run_ends_it_in_one_line(home: Path, server: Server) -> None:
    url, cli = server.put(home / "text", "bucket-gone"), cli_of(home, server, "gone")
    tight = ("-o", f"data.cache_bytes={3 * BLOCK_BYTES}", "-o", "job.steps=100000")
    with cli.started("train", "job.toml", *source(url), *tight, "--run-dir", "gone-run") as command:
        command.wait_for_step(home / "gone-run", 1)
        server.files().rm(f"{url}/train.bin")
        done = command.end()
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "train.bin: bytes" in said and "has it been moved or removed?" in said


def test_bad_samples_are_left_out_where_allowed_and_counted(home: Path, server: Server) -> None:
    """In events, commits and report, though the run was killed and gone on with: those of the order
    whose rows are in the damaged block, and no others."""
    local = (*source(home / "damaged"), "-o", "data.bad_samples=1000", "-o", "data.verify=true")
    cli, run = cli_of(home, server), home / "bad"
    with cli.started("train", "job.toml", *local, "--run-dir", "bad") as command:
        command.wait_for_step(run, 5)
        command.signal(signal.SIGKILL)
        command.end()
    summary = json.loads(cli.ok("train", "bad", "--resume", "--json").stdout)
    job = load_job(run / "job.toml")
    rows = open_samples(str(home / "damaged" / "train"), job, 256, BadSamples(allowed=None))
    padding = rows.read(np.arange(STEPS * BATCH))[:, 0] == PAD
    each = padding.reshape(STEPS, BATCH).sum(1)
    expected = [(n + 1, int(bad), int(each[: n + 1].sum())) for n, bad in enumerate(each) if bad]
    found = [(e["step"], e["bad"], e["total"]) for e in events(run, Kind.BAD_SAMPLES)]
    assert [*dict.fromkeys(found)] == expected
    total = int(padding.sum())
    assert 5 < total < STEPS * BATCH / 2
    assert summary["bad_samples"] == total
    assert f"left out: {total}" in (run / "report.html").read_text()
    told = events(run, Kind.BAD_SAMPLE)
    assert {event["sample"] for event in told} == set(np.flatnonzero(padding).tolist())
    assert all("damaged (the checksum differs)" in event["what"] for event in told)
    assert Reader(commits(run / "checkpoints")[-1].path).meta["bad_samples"] == total


def test_a_damaged_block_ends_a_run_in_one_line(home: Path, server: Server) -> None:
    args = (*source(far("damaged")), "-o", "data.bad_samples=2")
    done = cli_of(home, server).run("train", "job.toml", *args)
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "train.bin: bytes 262144 to 524288: damaged there (the checksum differs)" in said
    assert "bad samples, data.bad_samples = 2 are allowed" in said
