"""Runs on builds that stay in S3, and on builds that are damaged."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cli_runs import LIMIT_S, events, learning
from s3_server import Server, serving
from warm_cli import WarmCli, warm_cli

from meshwright.base.errors import DataError
from meshwright.base.events import Kind
from meshwright.checkpoint.opening import newest
from meshwright.cli.drill_plan import DrillFault
from meshwright.data.checksums import BLOCK_BYTES
from meshwright.data.far import mirror
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.packing import PAD
from meshwright.data.tolerance import BadSamples
from meshwright.plan.job import Job, load_job
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
    """A job file and a build of four blocks, here and in S3; and one that is damaged in the second
    of them."""
    folder = tmp_path_factory.mktemp("far")
    (folder / "job.toml").write_text(JOB)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(99)]
    rows = [{"text": " ".join(draw.choices(words, k=draw.randint(20, 200)))} for _ in range(600)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([str(folder / "text.jsonl")], folder / "text", BuildOptions(held_out=0.05), 1)
    shutil.copytree(folder / "text", folder / "damaged")
    path = folder / "damaged" / "train.bin"
    content = bytearray(path.read_bytes())
    assert len(content) > 3 * BLOCK_BYTES
    content[BLOCK_BYTES + 5] ^= 1
    path.write_bytes(content)
    for name in ("text", "damaged"):
        assert server.put(folder / name, f"bucket-{name}") == far(name)
    return folder


@pytest.fixture(scope="module")
def cli(home: Path, server: Server) -> Iterator[WarmCli]:
    env = {**server.env, "MESHWRIGHT_CACHE": str(home / "cache")}
    with warm_cli(home, env) as found:
        yield found


@pytest.fixture
def flaky(server: Server) -> Iterator[Server]:
    """Blocks fail until all that ranks ask for at first has, then now and then; others are slow:
    s3fs tries a block five times by itself, and two ranks ask for ten at most side by side."""
    before = server.asked
    server.fault = lambda n: "down" if n <= before + 45 or n % 9 == 1 else "wait"
    yield server
    server.fault = lambda _: None
    assert server.asked - before > 45


def far(name: str) -> str:
    return f"s3://bucket-{name}/{name}"


def source(where: str | Path) -> tuple[str, str]:
    return ("-o", f"data.source={json.dumps(str(where))}")


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one that says why a run ended."""
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return said


def bad_by_step(home: Path) -> npt.NDArray[np.bool_]:
    """Of the damaged build: the samples whose rows are in the damaged block, and no others."""
    job = load_job(home / "job.toml")
    rows = open_samples(str(home / "damaged" / "train"), verifying(job), 256, BadSamples(None))
    samples = np.arange(STEPS * BATCH).reshape(STEPS, BATCH)
    return np.array([rows.read(step)[:, 0] == PAD for step in samples])


def verifying(job: Job) -> Job:
    return job.model_copy(update={"data": job.data.model_copy(update={"verify": True})})


def counted(run: Path) -> list[tuple[int, int, int]]:
    """(step, bad, in all) as a run has told, once for a step that was repeated."""
    told = events(run, Kind.BAD_SAMPLES)
    return [*dict.fromkeys((event["step"], event["bad"], event["total"]) for event in told)]


def expected(bad: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    each = bad.sum(1)
    return [(n + 1, int(one), int(each[: n + 1].sum())) for n, one in enumerate(each) if one]


@pytest.fixture(scope="module")
def near(home: Path, cli: WarmCli) -> Path:
    """A run that nothing disturbed, on the damaged build here."""
    more = ("-o", "data.bad_samples=1000", "-o", "data.verify=true", "--run-dir", "near")
    cli.ok("train", "job.toml", *source(home / "damaged"), *more)
    return home / "near"


def test_bad_samples_are_left_out_where_allowed_and_counted(home: Path, near: Path) -> None:
    bad = bad_by_step(home)
    total = int(bad.sum())
    assert 5 < total < STEPS * BATCH / 2
    assert counted(near) == expected(bad)
    assert f"left out: {total}" in (near / "report.html").read_text()
    told = events(near, Kind.BAD_SAMPLE)
    assert {event["sample"] for event in told} == set(np.flatnonzero(bad).tolist())
    assert all("damaged (the checksum differs)" in event["what"] for event in told)
    assert newest(near / "checkpoints").meta["bad_samples"] == total


@pytest.mark.usefixtures("flaky")
def test_s3_teaches_the_same_though_it_fails_and_is_slow_and_a_run_is_gone_on_with(
    home: Path, cli: WarmCli, near: Path
) -> None:
    """The first part ends in one line, by more bad samples than are allowed; the second begins at
    the last commit, behind which some steps were."""
    bad, run = bad_by_step(home), home / "s"
    allowed = int(bad[: STEPS - 2].sum())
    assert bad[STEPS - 2].any()
    tight = ("-o", f"data.cache_bytes={3 * 2 * BLOCK_BYTES}")
    few = ("-o", f"data.bad_samples={allowed}", "--run-dir", "s")
    said = the_line(cli.run("train", "job.toml", *source(far("damaged")), *tight, *few))
    assert f"step {STEPS - 1}: " in said
    assert "train.bin: bytes 262144 to 524288: damaged there (the checksum differs)" in said
    assert f"bad samples, data.bad_samples = {allowed} are allowed" in said
    more = ("-o", "data.bad_samples=1000")
    summary = json.loads(cli.ok("train", "s", "--resume", "--json", *more).stdout)
    assert learning(run) == learning(near)
    assert counted(run) == expected(bad)
    assert summary["bad_samples"] == bad.sum()
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


def test_what_vanishes_under_a_run_ends_it_in_one_line(
    home: Path, cli: WarmCli, server: Server
) -> None:
    url, before = server.put(home / "text", "bucket-gone"), server.asked

    def remove(number: int) -> None:
        if number == before + 12:
            server.files().rm(f"{url}/train.bin")

    server.fault = remove
    args = ("-o", f"data.cache_bytes={3 * BLOCK_BYTES}", "-o", "job.steps=100000")
    try:
        done = cli.run("train", "job.toml", *source(url), *args, "--run-dir", "gone")
    finally:
        server.fault = lambda _: None
    said = the_line(done)
    assert "train.bin: bytes" in said and "has it been moved or removed?" in said


def test_builds_in_s3_are_looked_into_and_verified(cli: WarmCli, server: Server) -> None:
    before = server.asked
    whole = json.loads(cli.ok("data", "inspect", far("text"), "--seq-len", "256", "--json").stdout)
    assert whole == json.loads(cli.ok("data", "inspect", "text", "--seq-len=256", "--json").stdout)
    assert server.asked == before  # none of the tokens
    cli.ok("data", "verify", far("text"))
    assert server.asked - before == -(-whole["train"]["tokens"] * 2 // BLOCK_BYTES) + 1
    done = cli.run("data", "verify", far("damaged"))
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert "damaged/train.bin: bytes 262144 to 524288: damaged there" in line


@pytest.mark.usefixtures("cli", "flaky")
def test_a_run_on_s3_survives_the_loss_of_a_rank(home: Path, near: Path) -> None:
    """With the losses, and the bad samples, of the run that nothing disturbed: the rank that tells
    of them is lost, and its successor knows how many there were."""
    text = JOB.replace('"text"', f'"{far("damaged")}"\nbad_samples = 1000')
    text = text.replace('"local:2"', '"local:2"\nspares = 1')
    job, run, plan = home / "survives.toml", home / "survivor", home / "plan.json"
    job.write_text(text + '[resilience]\nredundancy = "auto"\n')
    fault = DrillFault("kill", STEPS // 2 + 1, "backward", member=0)
    about = {"job": str(job), "run": str(run), "faults": [asdict(fault)], "adopt": False}
    plan.write_text(json.dumps(about))
    command = [sys.executable, "-m", "meshwright.cli.drill_run", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len(events(run, Kind.TAKEOVER_DONE)) == 1
    assert learning(run) == learning(near)
    assert counted(run) == expected(bad_by_step(home))
