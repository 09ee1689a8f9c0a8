"""A job file is resolved whole, or refused in one line that names key, value and the way out."""

from __future__ import annotations

import copy
import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.config import to_toml
from meshwright.base.errors import InputError
from meshwright.data.mixture import Stage
from meshwright.plan.job import Job, load_job, resolve_job

GOOD: dict[str, Any] = {
    "job": {"name": "test", "steps": 10},
    "model": {"preset": "tiny"},
    "data": {"seq_len": 256, "global_batch": 32},
    "layout": {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 4},
    "cluster": {"ref": "local:8"},
    "optimizer": {"lr": 3e-3},
}


def _with(changes: dict[str, Any]) -> dict[str, Any]:
    """GOOD with dotted keys changed, sections replaced, or left out where the value is None."""
    tables = copy.deepcopy(GOOD)
    for dotted, value in changes.items():
        section, dot, key = dotted.partition(".")
        table, name = (tables.setdefault(section, {}), key) if dot else (tables, section)
        if value is None:
            del table[name]
        else:
            table[name] = value
    return tables


def _refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        resolve_job(_with(changes))
    return str(caught.value)


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"model.hiden": 64},
            'model.hiden = 64: unknown key; did you mean "hidden"?',
        ),
        (
            {"model": {"presets": "tiny"}},
            "model.presets = 'tiny': unknown key; did you mean \"preset\"?",
        ),
        (
            {"layout.tpp": 2},
            'layout.tpp = 2: unknown key; did you mean "tp"?',
        ),
        (
            {"optimiser": {"lr": 1.0}},
            "optimiser = {'lr': 1.0}: unknown key; did you mean \"optimizer\"?",
        ),
        (
            {"model.preset": "llama3-8"},
            "model.preset = 'llama3-8': no such preset; did you mean \"llama3-8b\"?",
        ),
        (
            {"model": 3},
            "model = 3: must be a table of keys: [model]",
        ),
        (
            {"optimizer": "adamw"},
            "optimizer = 'adamw': must be a table of keys: [optimizer]",
        ),
        (
            {"layout": "automatic"},
            "layout = 'automatic': must be a table of keys: [layout]",
        ),
        (
            {"model": None},
            "model = None: required; add it to the job file or pass -o",
        ),
        (
            {"job.steps": None},
            "job.steps = None: required; add it to the job file or pass -o",
        ),
        (
            {"layout.dp_shard": 2, "layout.zero": 0},
            "layout = {...}: zero = 0 contradicts dp_shard = 2: nothing would be sharded; "
            "use dp_replicate, or set zero to 1, 2 or 3",
        ),
        (
            {"layout.zero": 1},
            "layout = {...}: zero = 1 contradicts dp_shard = 1: there is nothing to shard over; "
            "set dp_shard > 1 or leave zero out",
        ),
        (
            {"cluster.ref": "slurm:gpu:16"},
            "cluster.ref = 'slurm:gpu:16': this version runs on local:N, N processes of this "
            "machine",
        ),
        (
            {"optimizer.min_lr": 0.1},
            "optimizer = {...}: min_lr (0.1) is above lr (0.003); lower it",
        ),
        (
            {"optimizer.betas": [0.9, 1.0]},
            "optimizer.betas = [0.9, 1.0]: both must be in [0, 1)",
        ),
        (
            {"model.hf": "/models/mine"},
            "model.preset = 'tiny': contradicts model.hf = '/models/mine', which has a shape too; "
            "leave one of them out",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_this_line(changes: dict[str, Any], line: str) -> None:
    assert _refusal(changes) == line


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("job.steps", "300", "valid integer"),
        ("job.steps", 300.0, "valid integer"),
        ("job.steps", True, "valid integer"),
        ("job.steps", 0, "greater than 0"),
        ("job.name", "../up", "match pattern"),
        ("job.name", "x" * 65, "match pattern"),
        ("job.seed", -1, "greater than or equal to 0"),
        ("layout.tp", 0, "greater than 0"),
        ("layout.tp", "2", "valid integer"),
        ("layout.sp", 1, "valid boolean"),
        ("layout.cp", -1, "greater than 0"),
        ("layout.cp_method", "rings", "'ring' or 'ulysses'"),
        ("layout.zero", 4, "0, 1, 2 or 3"),
        ("layout.schedule", "1f1f", "'1f1b', 'interleaved', 'zbv' or 'dualpipev'"),
        ("layout.precision", "fp4", "'fp32', 'bf16', 'fp16' or 'fp8'"),
        ("model.layers", "4", "valid integer"),
        ("model.family", "bert", "'qwen3_moe' or 'deepseek_v3'"),
        ("model.hf", 3, "valid string"),
        ("data.packing", "best", "'stream', 'documents' or 'best-fit'"),
        ("data.source", "", "name a file"),
        ("data.source", 3, "a path, or a list"),
        ("data.source", [], "a path, or a list"),
        ("data.source", [{"path": "a", "weight": 0}], "weights of the sources must be >= 0"),
        ("data.source", [{"path": "a"}, {"path": "b", "weight": 1e-9}], "a share below 1/1048576"),
        ("data.stages", [{"step": 5, "weights": [1, 2]}], "2 weights for 1 sources"),
        ("data.stages", [{"step": 5, "weights": [-1]}], "weights of step 5 must be >= 0"),
        ("data.stages", [{"step": 5, "weights": [1]}] * 2, "steps must ascend"),
        ("optimizer.lr", "fast", "valid number"),
        ("optimizer.lr", float("inf"), "finite number"),
        ("optimizer.lr", float("nan"), "finite number"),
        ("optimizer.lr", 10**400, "valid number"),
        ("optimizer.name", "sgd", "'adamw'"),
        ("cluster.ref", "local:0", "local:N"),
        ("cluster.ref", "local:" + "9" * 5000, "local:N"),
        ("checkpoint.every", 0, "greater than 0"),
    ],
)
def test_wrong_values_name_their_key_and_value(key: str, value: object, says: str) -> None:
    line = _refusal({key: value})
    assert line.startswith(f"{key} = {value!r}: ") and says in line


@pytest.mark.parametrize(
    "source, says",
    [
        (["a", 3], "data.source[1] = 3: must be a path or {path"),
        ([{"path": "a", "wieght": 1}], "data.source[0].wieght = 1: unknown key"),
        ([{"weight": 1.0}], "data.source[0].path = None: required"),
        ([{"path": "a", "weight": "much"}], "data.source[0].weight = 'much': input should be"),
    ],
)
def test_a_wrong_source_names_its_place(source: list[Any], says: str) -> None:
    assert says in _refusal({"data.source": source})


def test_sources_weights_and_stages_become_a_mixture() -> None:
    several = [{"path": "a", "weight": 3}, "b"]
    stages = [{"step": 10, "weights": [1, 1]}, {"step": 20, "weights": [0.0, 1]}]
    job = resolve_job(
        _with({"data.source": several, "data.stages": stages, "data.packing": "best-fit"})
    )
    batch = job.data.global_batch
    assert job.data.mixture(3).stages == (
        Stage(0, (3.0, 1.0)),
        Stage(10 * batch, (1.0, 1.0)),
        Stage(20 * batch, (0.0, 1.0)),
    )
    assert job.data.inside_documents and job.data.best_fit
    assert resolve_job(tomllib.loads(to_toml(job.model_dump()))) == job


def test_paths_of_all_sources_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "job.toml").write_text(to_toml(GOOD))
    job = load_job(tmp_path / "job.toml", ['data.source=["a", {path = "none", weight = 2}]'])
    assert [one.path for one in job.data.sources] == [str(tmp_path / "a"), "none"]
    assert [one.weight for one in job.data.sources] == [1.0, 2.0]


def test_a_file_is_read_overridden_and_resolved(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nsteps = 10\n[model]\npreset = "tiny"\n[data]\nseq_len = 64\nglobal_batch = 8\n'
    )
    job = load_job(path, ["model.layers=2", "layout.tp=2", "cluster.ref=local:2", "job.name=mine"])
    assert (job.job.name, job.model.layers, job.model.hidden) == ("mine", 2, 128)
    assert (job.layout.world, job.cluster.ranks) == (2, 2)


def test_a_home_that_nobody_has_is_a_name_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(GOOD))
    assert load_job(path, ["data.source=~nobody-here/x"]).data.source == "~nobody-here/x"


def test_a_resolved_job_written_as_toml_is_the_same_job() -> None:
    job = resolve_job(_with({"data.source": "größe/日本/🙂", "optimizer.eps": 1e-30}))
    assert resolve_job(tomllib.loads(to_toml(job.model_dump()))) == job


def test_resolving_changes_nothing_in_what_was_given() -> None:
    tables = copy.deepcopy(GOOD)
    resolve_job(tables)
    assert tables == GOOD


def test_a_huge_size_is_refused_at_once() -> None:
    assert "it takes 1, 3" in _refusal({"model.vocab": 3 * 10**30 + 3})


SECTIONS = [*Job.model_fields, "modle", ""]
KEYS = sorted(
    {key for field in Job.model_fields.values() for key in field.annotation.model_fields}  # type: ignore[union-attr]
    | {"preset", "hiden", "a\nb", ""}
)
scalars = st.one_of(
    st.integers(),
    st.integers(-1, 9),
    st.floats(),
    st.booleans(),
    st.text(max_size=9),
    st.sampled_from(["auto", "tiny", "gpt2", "llama", "local:8", "bf16", "adamw"]),
    st.dates(),
    st.times(),
    st.just(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
junk_sections = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), values, max_size=4)
junk_tables = st.dictionaries(
    st.sampled_from(SECTIONS) | st.text(max_size=5), values | junk_sections, max_size=6
)


@st.composite
def nearly_good(draw: st.DrawFn) -> dict[str, Any]:
    """GOOD with one or two keys of junk: this gets further than tables of nothing but junk."""
    tables = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 2))):
        section = tables[draw(st.sampled_from(sorted(GOOD)))]
        section[draw(st.sampled_from(KEYS))] = draw(values)
    return tables


@settings(max_examples=400, deadline=None)
@given(junk_tables | nearly_good())
def test_junk_is_refused_in_one_line_or_resolves_to_a_job_that_survives_json(
    tables: dict[str, Any],
) -> None:
    try:
        job = resolve_job(tables)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert resolve_job(json.loads(job.model_dump_json())) == job
