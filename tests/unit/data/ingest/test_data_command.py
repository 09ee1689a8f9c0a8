"""`meshwright data`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError, DataError
from meshwright.cli.data import data
from meshwright.data.ingest.verify import faults


def call(*arguments: str) -> int | None:
    status: int | None = data(list(arguments), standalone_mode=False)
    return status


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"text": f"document number {n}", "licence": "CC0"} for n in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0]]))
    return path


def test_build_inspect_verify(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert call("build", out, str(source), "--held-out", "0.2", "--processes", "1") == 0
    told = capsys.readouterr().out
    assert "left out, exact copy: 1" in told
    assert call("inspect", out, "--seq-len", "32") == 0
    assert "licences: CC0 30" in capsys.readouterr().out
    assert call("verify", out) == 0
    assert "every byte is as it was built" in capsys.readouterr().out


def test_a_damaged_build_exits_1(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call("build", str(out), str(source), "--processes", "1", "--json")
    manifest: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert manifest["train"]["documents"] == 30
    content = (out / "train.bin").read_bytes()
    (out / "train.bin").write_bytes(content[:-1] + b"\xff")
    assert call("verify", str(out), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["whole"]
    assert "are damaged" in found["faults"][0]


def test_what_is_there_is_not_overwritten(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        call("build", str(tmp_path / "out"), str(source))


@pytest.fixture(params=["folder", "address"])
def address(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """How a build is named."""
    return str if request.param == "folder" else lambda path: f"file://{path}/"


@pytest.mark.parametrize("kind", ["tokens", "samples"])
def test_whatever_was_built_is_looked_into_and_read_whole_wherever_it_lies(
    tmp_path: Path,
    source: Path,
    address: Callable[[Path], str],
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    call("build", str(out), str(source), "--held-out", "0.3", "--kind", kind, "--processes", "1")
    capsys.readouterr()
    assert call("inspect", address(out), "--seq-len", "32", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["train"]["documents"] + found["held_out"]["documents"] == 30
    assert found["bytes"] == sum(p.stat().st_size for p in out.iterdir() if p.stem != "manifest")
    if kind == "tokens":
        assert found["packing"]["rows"] == -(-found["train"]["tokens"] // 33)
        assert found["held_out_packing"]["rows"] == -(-found["held_out"]["tokens"] // 33)
        assert found["held_out_document_tokens"]["most"] == len("document number 10") + 1
    else:
        assert found["fields"] == found["held_out_fields"] == ["licence", "text"]
        assert found["held_out_sample_bytes"]["least"] > 20
    assert call("verify", address(out)) == 0
    for part in ("train", "held_out"):
        path = out / f"{part}.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"\xff")
        assert call("verify", address(out)) == 1
        path.write_bytes(whole)
        assert f"{part}.bin: bytes 0 to {len(whole)}" in capsys.readouterr().out
    assert call("verify", address(out)) == 0


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", lambda old: old.replace(b"a", b"b", 1), "damaged (its hash differs)"),
        ("train.idx", lambda old: old[:-1] + b"\xff", "damaged (its hash differs)"),
        ("train.crc", lambda old: old[:-1] + b"\xff", "damaged (its hash differs)"),
        ("held_out.bin", lambda old: old + b"x", "the manifest tells"),
        ("held_out.idx", None, "is gone; fetch or build it again"),
    ],
)
def test_every_file_of_a_build_is_verified(
    tmp_path: Path,
    source: Path,
    address: Callable[[Path], str],
    name: str,
    change: Callable[[bytes], bytes] | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    call("build", str(out), str(source), "--held-out", "0.3", "--processes", "1")
    if change is None:
        (out / name).unlink()
    else:
        (out / name).write_bytes(change((out / name).read_bytes()))
    capsys.readouterr()
    assert call("verify", address(out)) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{name}: " in line
    assert words in line


def test_ids_that_no_tokenizer_has_are_found_though_every_byte_is_as_it_was(
    tmp_path: Path, source: Path, address: Callable[[Path], str]
) -> None:
    """Two builds' files mixed up by hand, with a manifest to fit."""
    out = tmp_path / "out"
    call("build", str(out), str(source), "--processes", "1")
    manifest = json.loads((out / "manifest.json").read_text())
    for key, value, words in (
        ("sha256", "ab" * 32, "train.idx: its ids are of tokenizer"),
        ("vocab", 100, "outside the vocab of 100"),
        ("end_of_text", 7, "30 documents lack their end-of-text token"),
    ):
        told = {**manifest, "tokenizer": {**manifest["tokenizer"], key: value}}
        (out / "manifest.json").write_text(json.dumps(told))
        (line,) = faults(address(out))
        assert words in line
    (out / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match="this version reads 1"):
        list(faults(address(out)))
