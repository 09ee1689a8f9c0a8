"""`meshwright checkpoint` as its user has it, and runs whose commits are encrypted, changes, far
away or on another branch."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import learning, metrics, one_error_line, snapshot
from s3_server import serving
from warm_cli import WarmCli, warm_cli

from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.store import Store

pytest.importorskip("s3fs")
pytest.importorskip("moto")

STEPS = 8
JOB = f"""\
[job]
name = "kept"
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
source = "text.txt"
seq_len = 32
global_batch = 4

[layout]
dp_shard = 2

[cluster]
ref = "local:2"

[checkpoint]
every = 2
keep = 20
"""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCli]:
    """In a folder with a job file, its text, and a run of it; with a bucket."""
    home = tmp_path_factory.mktemp("kept")
    (home / "job.toml").write_text(JOB)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(99)]
    (home / "text.txt").write_text("\n".join(" ".join(draw.choices(words, k=30)) for _ in "x" * 99))
    with (
        serving() as server,
        warm_cli(home, {**server.env, "MESHWRIGHT_CACHE": str(home / "cache")}) as found,
    ):
        server.files().mkdir("kept")
        found.ok("train", "job.toml", "--run-dir", "run")
        found.ok("checkpoint", "new-key", "key")
        yield found


@pytest.fixture
def run(cli: WarmCli, tmp_path: Path) -> Path:
    """A copy of the run, to do something with."""
    return Path(shutil.copytree(cli.cwd / "run", tmp_path / "run"))


def asked(cli: WarmCli, *args: str | Path) -> Any:
    """What `meshwright checkpoint ... --json` says."""
    return json.loads(cli.ok("checkpoint", *args, "--json").stdout)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stdout.splitlines()


def set_to(**keys: str) -> list[str]:
    return [word for key, value in keys.items() for word in ("-o", f"checkpoint.{key}={value}")]


def states(at: StoreAt) -> dict[int, dict[str, bytes]]:
    """All tensors of the last commit of each step of a branch."""
    store = at.open()
    readers = {commit.step: store.reader(commit) for commit in store.commits(at.branch)}
    return {n: {name: r.read(name).tobytes() for name in r.names} for n, r in readers.items()}


def learnt(run: Path) -> dict[tuple[str, int], list[Any]]:
    """What each step computed the last time it was taken, down to the bit."""
    return {(kind, step): rest for kind, step, *rest in learning(run)}


def test_log_and_branches(cli: WarmCli) -> None:
    shown = lines(cli.ok("checkpoint", "log", "run"))
    assert [f"main@{step} (" in line for step, line in zip((8, 6, 4, 2), shown, strict=True)]
    assert all(line.endswith("verified") for line in shown[:1])
    logged = asked(cli, "log", "run/checkpoints")
    assert [one["commit"]["step"] for one in logged] == [8, 6, 4, 2]
    heads = asked(cli, "branches", "run")["branches"]
    assert heads == {"main": logged[0]["commit"]["id"]}
    assert "branch main: main@8" in cli.ok("checkpoint", "branches", "run").stdout


@pytest.mark.parametrize("word", ["", "8", "main", "main@8", "id"])
def test_show_says_what_a_commit_was_made_with(cli: WarmCli, word: str) -> None:
    head = asked(cli, "branches", "run")["branches"]["main"]
    named = [head[:8]] if word == "id" else [word] * bool(word)
    shown = asked(cli, "show", "run", *named)
    assert (shown["id"], shown["step"], shown["depth"]) == (head, 8, 0)
    assert shown["tensors"]["param/embed.weight"] == {"dtype": "float32", "shape": [257, 16]}
    meta = shown["meta"]
    assert meta["job"]["model"]["hidden"] == 16
    assert meta["plan"]["prediction"]["step_time_s"] > 0
    assert {"meshwright", "torch", "source"} <= set(meta["code"])
    assert meta["data_identity"] == json.loads((cli.cwd / "run/data.json").read_text())
    assert meta["drawn"] == {str(cli.cwd / "text.txt"): 32} and meta["data"]["sample"] == 32
    assert meta["job"]["optimizer"]["lr"] == 3e-4 and meta["job"]["job"]["steps"] == 8
    assert meta["layout"] == "fsdp2" and meta["seed"] == 0
    assert (meta["updates"], meta["data_position"]) == (8, 32)
    assert shown["parent"] == asked(cli, "show", "run", "6")["id"]
    said = cli.ok("checkpoint", "show", "run", *named).stdout
    assert "param/embed.weight  float32 [257, 16]" in said
    for word in ("fsdp2", "seed 0", "samples 32", "meshwright", "torch"):
        assert word in said


def test_lineage_names_the_samples(cli: WarmCli) -> None:
    (found,) = asked(cli, "lineage", "run", "6")
    assert (found["first"], found["stop"], found["step"]) == (0, 24, 6)
    assert found["sources"] == {str(cli.cwd / "text.txt"): [0, 24]}
    assert "steps 1 to 6: samples 0 to 23" in cli.ok("checkpoint", "lineage", "run", "6").stdout


def test_diff_measures_what_moved(cli: WarmCli) -> None:
    found = {one["name"]: one for one in asked(cli, "diff", "run", "6", "8")}
    store = Store.open(cli.cwd / "run/checkpoints")
    old, new = (store.reader(store.find(step)) for step in ("6", "8"))
    assert set(found) == set(new.names)
    moved = np.abs(new.read("param/embed.weight") - old.read("param/embed.weight"))
    assert found["param/embed.weight"]["largest"] == pytest.approx(float(moved.max()))
    assert lines(cli.ok("checkpoint", "diff", "run", "8", "8")) == ["no tensor differs"]


def test_verify_finds_a_wrong_bit_and_exits_with_1(cli: WarmCli, run: Path) -> None:
    whole = lines(cli.ok("checkpoint", "verify", run, "--all"))
    assert len(whole) == 4 and all("bytes are as they were saved" in line for line in whole)
    pack = max((run / "checkpoints/packs").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 3] ^= 1
    pack.write_bytes(content)
    done = cli.run("checkpoint", "verify", run, "--all")
    assert done.returncode == 1
    bad = [line for line in lines(done) if "as they were saved" not in line]
    assert len(bad) == 1 and pack.name in bad[0] and "bytes" in bad[0]
    log = cli.ok("checkpoint", "log", run).stdout
    assert log.count("BAD") == 1


def test_tags_keep_commits_from_prune(cli: WarmCli, run: Path) -> None:
    cli.ok("checkpoint", "verify", run, "--all")  # the run passes over some if it is quick
    cli.ok("checkpoint", "tag", run, "best", "4")
    assert asked(cli, "show", run, "best")["step"] == 4
    said = cli.ok("checkpoint", "prune", run, "--newest", "1", "--no-spaced", "--grace-s", "0")
    assert said.stdout.startswith("removed main@2 (") and "are free" in said.stdout
    assert [one["commit"]["step"] for one in asked(cli, "log", run)] == [8, 6, 4]
    cli.ok("checkpoint", "untag", run, "best")
    gone = asked(cli, "prune", run, "--newest", "1", "--no-spaced", "--grace-s", "0")
    assert len(gone["removed"]) == 1 and gone["collected"]["packs"] > 0
    assert lines(cli.ok("checkpoint", "verify", run, "--all")) != []


def test_rolled_back_and_gone_on_with_has_the_same_bits(cli: WarmCli, run: Path) -> None:
    before, at = learnt(run), StoreAt(str(run / "checkpoints"))
    ends = states(at)[8]
    assert "main is at main@4" in cli.ok("checkpoint", "rollback", run, "4").stdout
    cli.ok("train", run, "--resume")
    assert learnt(run) == before
    assert states(at)[8] == ends
    kinds = [(one["kind"], one["on_line"]) for one in asked(cli, "log", run)]
    assert kinds[:4] == [("commit", True)] * 2 + [("rollback", False), ("commit", True)]


def test_a_damaged_head_is_passed_over_and_its_steps_are_taken_again(
    cli: WarmCli, run: Path
) -> None:
    wanted, at = learnt(run), StoreAt(str(run / "checkpoints"))
    store = at.open()
    packs = store.reader(store.find("8")).indices[0].packs
    packs -= store.reader(store.find("6")).indices[0].packs
    pack = next((run / "checkpoints/packs").rglob(packs.pop()))
    pack.write_bytes(pack.read_bytes()[:-100])
    shutil.rmtree(run / "model")
    said = cli.ok("train", run, "--resume").stderr
    assert "main@8" in said and "is damaged, and not used" in said and "from step 6" in said
    assert learnt(run) == wanted
    cli.ok("checkpoint", "verify", run)


def test_a_branch_goes_on_from_where_it_began(cli: WarmCli, run: Path) -> None:
    wanted = learning(run)
    cli.ok("checkpoint", "branch", run, "warmer", "4")
    cli.ok("train", run, "--resume", *set_to(branch="warmer"), "-o", "optimizer.lr=1e-3")
    heads = asked(cli, "branches", run)["branches"]
    assert set(heads) == {"main", "warmer"} and heads["main"] != heads["warmer"]
    assert [one["commit"]["step"] for one in asked(cli, "log", run, "--branch", "main")] == [
        *(8, 6, 4, 2)
    ]
    assert [one["kind"] for one in asked(cli, "log", run)] == ["commit", "commit", "start"]
    assert [one["stop"] for one in asked(cli, "lineage", run, "warmer")] == [32]
    steps = [row for row in learning(run) if row[0] == "step"]
    assert steps[:4] == [row for row in wanted if row[0] == "step"][:4]
    assert steps[5:] != [row for row in wanted if row[0] == "step"][5:]


def goes_on_as_before(cli: WarmCli, name: str, *more: str) -> Path:
    """A run of its own, rolled back and gone on with, learns what the first run did."""
    cli.ok("train", "job.toml", "--run-dir", name, *more)
    roll_back(cli, name, "4")
    return cli.cwd / name


def roll_back(cli: WarmCli, name: str, commit: str) -> None:
    """And go on: with the bits of the first run."""
    assert learnt(cli.cwd / name) == learnt(cli.cwd / "run")
    cli.ok("checkpoint", "rollback", name, commit)
    cli.ok("train", name, "--resume")
    assert learnt(cli.cwd / name) == learnt(cli.cwd / "run")


def test_changes_are_gone_on_with_to_the_bit(cli: WarmCli) -> None:
    at = StoreAt(str(cli.cwd / "changes/checkpoints"))
    cli.ok("train", "job.toml", "--run-dir", "changes", *set_to(deltas="true", every="4"))
    # Where storage is slower than steps, some of the changes are left out.
    commits = [one["commit"] for one in asked(cli, "log", "changes")]
    changes = [one for one in commits if one["depth"]]
    assert changes and {1, 4, 8} <= {one["step"] for one in commits}
    ours, theirs = states(at), states(StoreAt(str(cli.cwd / "run/checkpoints")))
    assert all(ours[step] == theirs[step] for step in ours.keys() & theirs.keys())
    assert f"change {changes[0]['depth']}" in cli.ok("checkpoint", "log", "changes").stdout
    roll_back(cli, "changes", changes[0]["id"])
    assert states(at)[8] == theirs[8]


def test_an_encrypted_run_its_keys_and_their_rotation(cli: WarmCli) -> None:
    key, new = f"file:{cli.cwd / 'key'}", f"file:{cli.cwd / 'new'}"
    run = goes_on_as_before(cli, "sealed", *set_to(encrypt="file:key"))
    store = run / "checkpoints"
    assert f'encrypt = "{key}"' in (run / "job.toml").read_text()  # from whatever folder
    stored = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert b"embed.weight" not in stored and b"llama" not in stored
    cli.ok("checkpoint", "verify", run, "--all")
    assert asked(cli, "show", store, "8", "--key", key)["step"] == 8
    assert "is encrypted, and no key" in one_error_line(cli.run("checkpoint", "show", store), 2)
    cli.ok("checkpoint", "new-key", "new")
    said = cli.ok("checkpoint", "rotate-keys", run, key, new).stdout
    assert "2 data keys are wrapped by" in said
    assert "wrong key" in one_error_line(cli.run("checkpoint", "show", run), 2)
    assert "wrong key" in one_error_line(cli.run("train", run, "--resume"), 2)
    cli.ok("train", run, "--resume", *set_to(encrypt=new), "-o", f"job.steps={STEPS + 2}")
    assert len(metrics(run)) == STEPS + 2


def test_a_store_in_s3(cli: WarmCli) -> None:
    run = goes_on_as_before(cli, "far", *set_to(store="s3://kept/runs", every="4"))
    assert not (run / "checkpoints/store.json").exists()
    logged = asked(cli, "log", "s3://kept/runs")
    assert [one["commit"]["step"] for one in logged if one["on_line"]] == [8, 4]
    cli.ok("checkpoint", "verify", "s3://kept/runs", "--all")
    line = one_error_line(cli.run("checkpoint", "log", "s3://no-such-bucket/x"), 2)
    assert "s3://no-such-bucket/x" in line


def test_two_runs_on_one_branch_are_refused(cli: WarmCli) -> None:
    shared = set_to(store="shared")
    cli.ok("train", "job.toml", "--run-dir", "first", *shared)
    before = snapshot(cli.cwd / "shared")
    line = one_error_line(cli.run("train", "job.toml", "--run-dir", "second", *shared), 2)
    for word in ("checkpoint.branch = 'main'", str(cli.cwd / "shared"), "step 8", "another name"):
        assert word in line
    assert snapshot(cli.cwd / "shared") == before and not (cli.cwd / "second").exists()
    cli.ok("train", "job.toml", "--run-dir", "second", *shared, *set_to(branch="two"))
    assert asked(cli, "show", "second", "4")["branch"] == "two"  # of each run its own
    assert asked(cli, "show", "first", "4")["branch"] == "main"


@pytest.mark.parametrize("form", ["hf", "safetensors", "dcp"])
def test_export_and_back(cli: WarmCli, tmp_path: Path, form: str) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    assert lines(cli.ok("checkpoint", "export", "run", out, "--format", form)) == [str(out)]
    refused = one_error_line(cli.run("checkpoint", "export", "run", out, "--format", form), 2)
    assert f"{out}: exists" in refused
    if form == "safetensors":
        assert "name such a folder" in one_error_line(
            cli.run("checkpoint", "import", out, store), 2
        )
        return
    (where,) = lines(cli.ok("checkpoint", "import", out, store, "--step", "8"))
    assert where.startswith(f"{store}#")
    (ours,) = states(StoreAt(str(store))).values()
    theirs = states(StoreAt(str(cli.cwd / "run/checkpoints")))[8]
    wanted = {n: x for n, x in theirs.items() if form == "dcp" or n.startswith("param/")}
    assert ours == wanted
    again = one_error_line(cli.run("checkpoint", "import", out, store), 2)
    assert "--branch = 'main'" in again and "has it already" in again


# What is asked of `meshwright checkpoint`, and what its complaint must hold.
WRONG = {
    "log nowhere": ("nowhere", "no checkpoints here"),
    "log run --branch nope": ("no branch 'nope'", "there are main"),
    "log nonsense://x/y": ("nonsense://x/y", "cannot be opened", "check the address"),
    "show run 7": ("no commit '7'", "a step or an id"),
    "show run best": ("no commit 'best'", "a tag, a step or an id"),
    "show run main@7": ("main@7", "see the log"),
    "show run mian@8": ("no branch mian", 'did you mean "main"?'),
    "show run ffffffff": ("no commit ffffffff",),
    "show run --key file:none": ("checkpoint.encrypt = 'file:none'", "No such file"),
    "show run --key file:open": ("file:open", "mode is 644", "chmod 600"),
    "show run --key nonsense": ("'nonsense'", "file:PATH"),
    "show run --key file:key": ("is not encrypted, and a key was given",),
    "diff run 8": ("COMMIT",),
    "diff run 8 nope": ("no commit 'nope'",),
    "lineage run nope": ("no commit 'nope'",),
    "verify run nope": ("no commit 'nope'",),
    "verify run --all --branch nope": ("no branch 'nope'",),
    "tag run bad/name": ("'bad/name'", "takes letters"),
    "untag run best": ("no tag 'best'", "there are none"),
    "branch run main 4": ("branch main is there already", "take another name"),
    "branch run a/b 4": ("'a/b'", "takes letters"),
    "branch run new nope": ("no commit 'nope'",),
    "rollback run nope": ("no commit 'nope'",),
    "rollback run 4 --branch nope": ("nope",),
    "prune run --newest 0": ("--newest", "1"),
    "prune nowhere": ("nowhere", "no checkpoints here"),
    "export run out --format pickle": ("--format = 'pickle'", "hf, safetensors, dcp"),
    "export run run": ("run: exists", "name a new folder"),
    "export run/checkpoints out": ("needs the job of the run", "--format safetensors"),
    "import nowhere store": ("nowhere", "config.json", ".metadata"),
    "import run/model run": ("--branch = 'main'", "has it already"),
    "new-key key": ("key: exists",),
    "rotate-keys run file:key file:key": ("run", "nothing is encrypted"),
    "rotate-keys nowhere file:key file:key": ("nowhere", "nothing is encrypted"),
    "nope": ("nope",),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line(cli: WarmCli, words: str) -> None:
    (cli.cwd / "open").write_bytes((cli.cwd / "key").read_bytes())
    (cli.cwd / "open").chmod(0o644)
    before = snapshot(cli.cwd)
    line = one_error_line(cli.run("checkpoint", *words.split()), 2)
    assert all(word in line for word in WRONG[words]), line
    assert snapshot(cli.cwd) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to(encrypt="file:none"), ("checkpoint.encrypt", "none", "No such file")),
        (set_to(encrypt="nonsense"), ("checkpoint.encrypt = 'nonsense'", "file:PATH")),
        (set_to(branch="a/b"), ("checkpoint.branch", "'a/b'")),
        (set_to(every="0"), ("checkpoint.every", "0", "auto")),
        (set_to(every="often"), ("checkpoint.every", "'often'", "auto")),
        (set_to(deadline_s="0"), ("checkpoint.deadline_s", "0")),
        (set_to(store="nonsense://x"), ("nonsense://x", "cannot be opened")),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_wrong_keys_are_refused_before_a_run(
    cli: WarmCli, change: list[str], words: tuple[str, ...]
) -> None:
    before = snapshot(cli.cwd)
    line = one_error_line(cli.run("train", "job.toml", "--run-dir", "bad", *change), 2)
    assert all(word in line for word in words), line
    assert snapshot(cli.cwd) == before


def test_a_branch_that_is_not_there_is_not_gone_on_with(cli: WarmCli) -> None:
    line = one_error_line(cli.run("train", "run", "--resume", *set_to(branch="nope")), 2)
    assert "no checkpoint on branch nope" in line and "checkpoint branch" in line
