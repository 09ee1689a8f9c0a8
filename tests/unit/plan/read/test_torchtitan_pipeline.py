"""Stages of torchtitan's pipelines, as `generate_llm_fqn_per_model_part` cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError
from meshwright.models import presets
from meshwright.plan.layout import Layout
from meshwright.plan.read import read

LAYERS = presets.preset("llama3-8b").layers  # 32


def layout_of(folder: Path, pp: int, *lines: str) -> Layout:
    text = "\n".join(
        [
            '[model]\nname = "llama3"\nflavor = "8B"',
            f"[parallelism]\npipeline_parallel_degree = {pp}",
            *lines,
        ]
    )
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return read(path, world=pp).to_layout()


INTERLEAVED = 'pipeline_parallel_schedule = "Interleaved1F1B"'
NO_ENDS = (
    "pipeline_parallel_first_stage_less_layers = 0",
    "pipeline_parallel_last_stage_less_layers = 0",
)


def test_ends_have_a_layer_less_unless_told_otherwise(tmp_path: Path) -> None:
    # 34 shares over 4: 9 9 8 8, of which embedding and head take one each.
    assert layout_of(tmp_path, 4).stages == [8, 9, 8, 7]
    assert layout_of(tmp_path, 4, *NO_ENDS).stages == [8, 8, 8, 8]
    assert layout_of(tmp_path, 4, NO_ENDS[0]).stages == [9, 8, 8, 7]
    more = "pipeline_parallel_last_stage_less_layers = 3"
    assert layout_of(tmp_path, 4, more).stages == [8, 9, 9, 6]
    assert sum(layout_of(tmp_path, 4, more).stages) == LAYERS


def test_looped_schedules_have_two_stages_on_a_rank(tmp_path: Path) -> None:
    found = layout_of(tmp_path, 2, INTERLEAVED)
    assert (found.vpp, found.stages) == (2, [8, 9, 8, 7])
    zbv = layout_of(tmp_path, 2, 'pipeline_parallel_schedule = "ZBVZeroBubble"')
    assert (zbv.vpp, zbv.schedule, zbv.stages) == (1, "zbv", [8, 9, 8, 7])


def test_ends_count_among_the_layers_of_a_stage(tmp_path: Path) -> None:
    per_stage = "pipeline_parallel_layers_per_stage = 4"
    found = layout_of(tmp_path, 4, INTERLEAVED, per_stage, *NO_ENDS)
    assert (found.vpp, found.stages) == (2, [4] * 8)
    with pytest.raises(ConfigError, match="makes 9 stages of 32 layers and 2 for the ends"):
        layout_of(tmp_path, 4, INTERLEAVED, per_stage)
    one = "pipeline_parallel_layers_per_stage = 9"
    assert layout_of(tmp_path, 4, one).stages == [8, 9, 8, 7]


def test_modules_of_each_part_come_first(tmp_path: Path) -> None:
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["norm"]]'
    lines = (INTERLEAVED, f"module_fqns_per_model_part = {parts}")
    found = layout_of(tmp_path, 2, *lines)
    assert (found.vpp, found.stages) == (2, [1, 2, 1, 0])


@pytest.mark.parametrize(
    "pp, lines, key, says",
    [
        (
            4,
            ["pipeline_parallel_last_stage_less_layers = 20"],
            "last_stage_less_layers",
            "above the 13 layers",
        ),
        (4, ["pipeline_parallel_layers_per_stage = 4"], "layers_per_stage", "must be 4"),
        (
            2,
            ['pipeline_parallel_schedule = "DualPipeV"', "pipeline_parallel_layers_per_stage = 4",
             *NO_ENDS],
            "layers_per_stage",
            "dualpipev has 2 x 2",
        ),
        (2, ['module_fqns_per_model_part = "all"'], "module_fqns", "must be lists of modules"),
        (4, ["pipeline_parallel_first_stage_less_layers = -1"], "first_stage", "at least 0"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_cut_are_named(
    tmp_path: Path, pp: int, lines: list[str], key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        layout_of(tmp_path, pp, *lines)
    assert key in caught.value.key and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_are_not_shared_out_are_cut_as_all_else(tmp_path: Path) -> None:
    path = tmp_path / "moe.toml"
    text = '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\ntensor_parallel_degree = 4'
    path.write_text(text, encoding="utf-8")
    assert read(path, world=8).to_layout().etp == 4
    path.write_text(text + "\nexpert_parallel_degree = 2", encoding="utf-8")
    assert read(path, world=8).to_layout().etp == 1
