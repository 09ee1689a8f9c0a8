"""What the documents name is there: files, make targets, commands, and every key of a job file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.plan.job import Job

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOP_LEVEL = ("src/", "tests/", "docs/", "recipes/", "benchmarks/", ".ci/")


def _text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def _paths(text: str) -> set[str]:
    """Paths of the repository between backticks, and files of its root."""
    quoted = re.findall(r"`([^`\s]+)`", text)
    return {name for name in quoted if name.startswith(TOP_LEVEL) or _is_root_file(name)}


def _is_root_file(name: str) -> bool:
    return name in ("Makefile", "LICENSE") or bool(re.fullmatch(r"[A-Za-z]+\.(md|txt)", name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_exist(document: Path) -> None:
    assert [path for path in sorted(_paths(_text(document))) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("howto", ["add-a-model", "add-a-parallelism"])
def test_a_howto_names_files_to_touch(howto: str) -> None:
    assert len(_paths(_text(ROOT / f"docs/howto/{howto}.md"))) >= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_make_targets_that_a_document_names_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", _text(ROOT / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", _text(document), re.MULTILINE))
    assert named <= targets


def test_commands_that_the_documents_name_exist() -> None:
    program = Path(sys.executable).with_name("meshwright")
    shown = subprocess.run(
        [program, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    pattern = re.compile(r"(?:^|`|/)meshwright ([a-z]+)", re.MULTILINE)
    named = {word for document in DOCUMENTS for word in pattern.findall(_text(document))}
    assert {"train", "check", "report", "generate"} <= named
    assert named <= set(re.findall(r"^\W ([a-z]+) ", shown.stdout, re.MULTILINE))


def _keys() -> dict[str, FieldInfo]:
    """Every key of a job file, dotted."""
    found: dict[str, FieldInfo] = {}
    for section, holder in Job.model_fields.items():
        schema = holder.annotation
        assert isinstance(schema, type) and issubclass(schema, BaseModel)
        found |= {f"{section}.{key}": field for key, field in schema.model_fields.items()}
    return found


@pytest.mark.parametrize("key, field", _keys().items())
def test_a_key_of_the_job_file_stands_in_the_readme_with_its_default(
    key: str, field: FieldInfo
) -> None:
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    assert f"\n| `{key}` | {default} |" in README


def test_the_readme_names_no_key_that_is_not_there() -> None:
    named = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", README, re.MULTILINE))
    assert named - {"model.preset"} == set(_keys())
