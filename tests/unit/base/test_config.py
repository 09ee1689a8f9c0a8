"""TOML reading, `-o` overrides, and messages for keys and values that do not fit."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from meshwright.base.config import apply_override, parse, read_toml, schema_keys, to_toml
from meshwright.base.errors import ConfigError, InputError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = 1
    name: str | None = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inner: Inner
    rate: float = 1.0


def test_reads_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    path = tmp_path / "job.toml"
    path.write_bytes('[job]\nname = "größe"\n'.encode())
    assert read_toml(path) == {"job": {"name": "größe"}}


@pytest.mark.parametrize(
    "content, says",
    [
        (b"[job\n", "not valid TOML"),
        (b"name = \xff\n", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 50_000, "not valid TOML"),
    ],
)
def test_unreadable_toml_is_one_line_with_its_path(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_toml(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: {says}") and len(line.splitlines()) == 1


def test_absent_file_and_folder_are_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.toml: No such file or directory"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "override, value",
    [
        ("data.x=8", 8),
        ("data.x = 3e-4", 3e-4),
        ("data.x=true", True),
        ("data.x=[0.9, 0.95]", [0.9, 0.95]),
        ('data.x="8"', "8"),
        ("data.x=bf16", "bf16"),
        ("data.x=a=b", "a=b"),
        ("data.x=", ""),
        ("data.x=/some/path", "/some/path"),
        ("data.x=[1", "[1"),
        ("data.x=1\ny = 2", "1\ny = 2"),
        ("data.x=" + "9" * 5000, "9" * 5000),
    ],
)
def test_override_is_toml_and_a_bare_word_is_a_string(override: str, value: object) -> None:
    tables: dict[str, Any] = {"data": {"kept": 1}}
    apply_override(tables, override)
    assert tables == {"data": {"kept": 1, "x": value}}


def test_override_makes_a_missing_section() -> None:
    tables: dict[str, Any] = {}
    apply_override(tables, "layout.tp=2")
    assert tables == {"layout": {"tp": 2}}


@pytest.mark.parametrize("override", ["", "tp=2", "layout.tp", "=2", ".tp=2", "layout.=2", "a b"])
def test_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section\.key=value"):
        apply_override({}, override)


def test_override_into_a_value_that_is_not_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="'layout' is a single value here, not a table"):
        apply_override({"layout": "auto"}, "layout.tp=2")


@pytest.mark.parametrize(
    "raw, line",
    [
        (
            {"inner": {"sise": 2}},
            'inner.sise = 2: unknown key; did you mean "size"?',
        ),
        ({"inner": {}, "zzz": 2}, "zzz = 2: unknown key; known here: inner, rate"),
        ({"inner": {"a\nb": 2}}, "inner.'a\\nb' = 2: unknown key; known here: size, name"),
        ({}, "inner = None: required; add it to the job file or pass -o"),
        ({"inner": 3}, "inner = 3: must be a table of keys: [inner]"),
        ({"inner": {"size": "2"}}, "inner.size = '2': input should be a valid integer"),
    ],
)
def test_the_line_names_key_value_and_fix(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, raw)
    assert str(caught.value) == line


def test_prefix_stands_before_the_key_and_keys_read_earlier_are_hinted_at() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Inner, {"presett": 1}, prefix="model", also=["preset"])
    assert str(caught.value) == 'model.presett = 1: unknown key; did you mean "preset"?'


def test_schema_keys_below_a_path() -> None:
    assert schema_keys(Outer, ["inner"]) == ["size", "name"]
    assert schema_keys(Outer, ["rate"]) == schema_keys(Outer, ["absent"]) == []


toml_scalars = (
    st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
)
toml_sections = st.dictionaries(
    st.sampled_from(["a", "b_2"]), toml_scalars | st.lists(toml_scalars, max_size=3)
)


@settings(deadline=None)
@example({"data": {"a": "\x7f \N{SLIGHTLY SMILING FACE} \n\t\\"}})
@given(st.dictionaries(st.sampled_from(["job", "data"]), toml_sections))
def test_tables_written_as_toml_read_back_the_same(tables: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(to_toml(tables)) == tables


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_override_either_sets_one_key_or_is_one_line(section: str, text: str) -> None:
    tables: dict[str, Any] = {}
    try:
        apply_override(tables, f"{section}={text}")
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert [len(table) for table in tables.values()] == [1]
