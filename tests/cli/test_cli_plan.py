"""`plan`, `predict` and `calibrate` as a user types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli

from meshwright.plan.read import read

PLAN = ("plan", "--model", "llama3-8b", "--cluster", "p5:64", "--global-batch", "512")
PREDICT = ("predict", "--model", "llama2-70b", "--cluster", "h100:128", "--global-batch", "128")


@pytest.fixture
def planner(cli: Cli, tmp_path: Path) -> Cli:
    """With a folder of its own for calibrations."""
    cli.extra_env["MESHWRIGHT_CONFIG"] = str(tmp_path / "config")
    return cli


def _parts(text: str, *words: str) -> Iterator[str]:
    return (word for word in words if word not in text)


def test_plan_says_what_was_asked_for(planner: Cli) -> None:
    said = planner.ok(*PLAN, "--scale", "64,128", "--why", "tp8,pp8").stdout
    wanted = (
        "tokens/s/chip", "MFU", "P(oom)", "$/T tokens", "time: ", "memory of", "bound by: ",
        "single changes", "goodput", "why not tp8,pp8", "scaling: ", "dense bf16 peak of 989",
    )  # fmt: skip
    assert list(_parts(said, *wanted)) == []


def test_plan_as_json_with_its_files(planner: Cli) -> None:
    done = planner.ok(
        *PLAN, "--json", "--top", "2", "--pareto", "--plot", "a.html", "--trace", "a.json",
        "--emit", "torchtitan", "--out", "files",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["best"]) == 2 and found["legal_layouts"] > 1000
    assert found["best"][0]["step_time_s"] <= found["best"][1]["step_time_s"]
    assert found["mapping"]["terms_s"] and found["front"] and found["run"]["days"] > 0
    assert "<svg" in (planner.cwd / "a.html").read_text()
    assert json.loads((planner.cwd / "a.json").read_text())["traceEvents"]
    assert any((planner.cwd / "files").iterdir())
    assert found["written"]["files"] and found["written"]["command"]


def test_what_is_written_for_another_trainer_is_named(planner: Cli) -> None:
    said = planner.ok(
        *PLAN, "--framework", "megatron", "--emit", "torchtitan", "--out", "files"
    ).stdout
    assert "(the trainer does not take tp2,pp1,dp32,zero1,mbs2) written to files" in said
    assert "start it with: " in said


def test_options_that_a_job_file_says_are_refused_beside_it(planner: Cli, job_file: Path) -> None:
    idle = (("--seq-len", "64"), ("--global-batch", "8"), ("--framework", "megatron"))
    for option in (*idle, ("--precision", "fp8"), ("--constants", "none.toml")):
        done = planner.run("predict", job_file, *option)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {option[0]} = ")
    done = planner.run(*PREDICT, "--layout", "tp8", "-o", "model.layers=3")
    assert done.returncode == 2 and "--override" in done.stderr


def test_single_changes_are_compared_with_the_fastest(planner: Cli) -> None:
    found = [
        json.loads(planner.ok(*PLAN, "--json", "--objective", wish).stdout)["single_changes"]
        for wish in ("time", "memory")
    ]
    assert found[0] == found[1]


def test_charts_are_written_as_an_image_too(planner: Cli) -> None:
    planner.ok(*PLAN, "--top", "2", "--plot", "a.PNG")
    assert (planner.cwd / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_an_encoder_gets_chips_of_its_own(planner: Cli) -> None:
    encoder = ("--encoder", "internvit-6b", "--images", "4")
    said = planner.ok(*PLAN, *encoder).stdout
    wanted = (
        "of 64 chips 48 for the language model", "on chips of its own: 16 of 64 (25.0%)",
        "bound by: ", "colocated with the first stage", "busy ", "image_bytes = 100000: assumed",
        "data: a step reads",
    )  # fmt: skip
    assert list(_parts(said, *wanted)) == []
    done = planner.ok(*PLAN, *encoder, "--freeze-encoder", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    frozen = found["encoder"]
    assert frozen["frozen"] and frozen["share"] == frozen["encoder"]["chips"] / 64
    assert frozen["language"]["best"]["name"] == found["best"][0]["name"]
    assert frozen["encoder"]["best"]["time_parts"]["optimizer"] == 0
    assert frozen["colocated"]["step_time_s"] > 0 and len(frozen["tried"]) >= 1
    days = 1e12 / frozen["tokens_per_s"] / found["run"]["goodput"]["share"] / 86400
    assert found["run"]["days"] == pytest.approx(days)
    assert json.loads(planner.ok(*PLAN, "--json").stdout)["encoder"] is None


def test_an_impossible_plan_is_one_line_with_the_way_out(planner: Cli) -> None:
    done = planner.run("plan", "--model", "llama3-70b", "--cluster", "a100:8")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "memory" in done.stderr and "smallest cluster" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("plan", "--model", "llama-70b", "--cluster", "p5:64"),
        ("plan", "--model", "llama3-8b", "--cluster", "p55:64"),
        (*PLAN, "--objective", "fast"),
        (*PLAN, "--precision", "fp4"),
        (*PLAN, "--framework", "megatrn"),
        (*PLAN, "--scale", "64,x"),
        (*PLAN, "--plot", "a.gif"),
        (*PLAN, "--images", "2"),
        (*PLAN, "--objective", "cost", "--spares", "1"),
        (*PLAN, "--failures", "0"),
        (*PLAN, "--why", "tp8,tp4"),
        (*PLAN, "--freeze-encoder"),
        (*PLAN, "--encoder", "vit-xl"),
        (*PLAN, "--encoder", "vit-l-14", "--images", "33"),
        (*PLAN, "--encoder", "vit-l-14", "--scale", "64,128"),
        (*PLAN, "--encoder", "vit-l-14", "--objective", "cost"),
        ("plan", "--model", "llama3-8b", "--cluster", "p5:8", "--encoder", "vit-l-14"),
        (*PREDICT, "--layout", "tpp8"),
        (*PREDICT, "--layout", "tp8,pp8", "--measured", "tokens=3"),
        PREDICT,
        ("predict",),
    ],
)
def test_wrong_input_is_one_line(planner: Cli, wrong: tuple[str, ...]) -> None:
    done = planner.run(*wrong)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_predict_explains_a_shortfall(planner: Cli) -> None:
    layout = ("--layout", "tp8,pp8,dp2,mbs1,full", "--measured", "tflops=296.5")
    said = planner.ok(*PREDICT, *layout).stdout
    assert "recomputation costs" in said and "faster on the same chips" in said
    found = json.loads(planner.ok(*PREDICT, *layout, "--json").stdout)
    wanted = {
        "step_time_s", "tokens_per_s_per_chip", "mfu", "memory_bytes", "memory_parts",
        "oom_probability", "time_parts", "assumptions",
    }  # fmt: skip
    assert wanted <= found.keys()
    assert sum(found["gap"]["seconds"].values()) == pytest.approx(found["gap"]["measured_s"])


def test_predict_takes_the_layout_of_another_trainers_file(planner: Cli) -> None:
    script = planner.cwd / "run.sh"
    script.write_text(
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 "
        "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --disable-bias-linear --vocab-size 32000 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--global-batch-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer --sequence-parallel --bf16\n"
    )
    assert read(script, world=16).layout
    found = json.loads(
        planner.ok("predict", "--model", "run.sh", "--cluster", "p5:16", "--json").stdout
    )
    assert (found["layout"]["tp"], found["layout"]["pp"], found["layout"]["zero"]) == (4, 2, 1)


def test_calibration_makes_the_prediction_of_a_job_right(planner: Cli, job_file: Path) -> None:
    before = json.loads(planner.ok("predict", job_file, "--json").stdout)
    assert before["origin"] == "assumed"
    told = json.loads(planner.ok("calibrate", job_file, "--json").stdout)
    after = json.loads(planner.ok("predict", job_file, "--json").stdout)
    assert after["origin"] == "measured"
    assert after["step_time_s"] == pytest.approx(told["measured_step_time_s"], rel=0.15)
    assert Path(told["file"]).is_file() and told["peak_flops_per_chip"] > 0
