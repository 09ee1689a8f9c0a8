"""A commit names the code that made it, whatever its version says."""

from __future__ import annotations

from pathlib import Path

from meshwright.base.code import code_version


def test_another_source_is_another_code(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    files = {"a.py": "1", "part/b.py": "2"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    first = code_version(tmp_path)
    assert code_version(tmp_path) == first
    (tmp_path / "notes.txt").write_text("no code")
    assert code_version(tmp_path) == first
    found = {first["source"]}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "0")
        found.add(code_version(tmp_path)["source"])
        (tmp_path / name).write_text(text)
    (tmp_path / "part/b.py").rename(tmp_path / "part/c.py")
    found.add(code_version(tmp_path)["source"])
    assert len(found) == 4
    assert code_version()["source"] not in found
