"""`meshwright data`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.cli.data import data


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
