"""The GPU benchmark, as far as it goes without a GPU: what it skips, and what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import report, row, verdicts
from gpu_case import WARM_UP, Case, cases_for, known_peak
from gpu_launch import OURS, PEER, Run, launch, our_run, titan_run
from gpu_titan import logged_steps

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
CASE = Case("8B", 16, "bf16", batch=2)
LOG = (
    "[titan] 2026-11-30 10:00:00,000 - root - INFO - Model llama3 8B size: 4,540,469,248 total\n"
    "[titan] 2026-11-30 10:00:01,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.26561  "
    "\x1b[38;2;180;60;0mgrad_norm:  4.1250  \x1b[38;2;54;234;195mmemory: 96.41GiB(69.01%)  "
    "\x1b[34mtps: 412  \x1b[36mtflops: 11.25  \x1b[35mmfu: 1.14%\x1b[39m\n"
    "[titan] 2026-11-30 10:00:02,000 - root - INFO - step: 10  loss:  9.91235  grad_norm:  1.0000  "
    "memory: 98.00GiB(70.10%)  tps: 17,412  tflops: 475.56  mfu: N/A\n"
)


def test_it_says_in_one_line_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"skipped: no CUDA GPU (torch {torch.__version__} finds none)\n"


def test_steps_are_read_from_torchtitans_log() -> None:
    first, tenth = logged_steps(LOG)
    assert (first.step, first.loss, first.memory_gib, first.tokens_per_s) == (
        1,
        12.26561,
        96.41,
        412,
    )
    assert (tenth.step, tenth.loss, tenth.tokens_per_s) == (10, 9.91235, 17412)
    assert logged_steps("step: 3  loss: ") == []


def test_a_run_is_what_follows_the_warm_up() -> None:
    steps = [{"loss": 12.0 - i, "step_s": 0.5 if i >= WARM_UP else 60.0, "memory_gib": 90.0 + i}
             for i in range(WARM_UP + 2)]  # fmt: skip
    log = "a library's line\n" + "\n".join(map(json.dumps, steps))
    run = our_run(log, CASE)
    assert run.tokens_per_s == [2 * 4096 / 0.5] * 2
    assert (run.losses[0], run.losses[-1], run.memory_gib) == (12.0, 7.0, 95.0)
    assert titan_run(LOG, CASE).losses == [12.26561, 9.91235]


def test_a_launch_that_fails_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "python"
    told = launch(PEER, CASE, missing, 10.0)
    assert told == f"{missing} is not there: run it with --setup first"
    assert launch(OURS, CASE, missing, 0.0) == "there was no time left"
    assert launch(PEER, CASE, Path(sys.executable), 60.0) == (
        f"{sys.executable}: Error while finding module specification for 'torchtitan.train' "
        "(ModuleNotFoundError: No module named 'torchtitan')"
    )


def test_the_table() -> None:
    found: dict[tuple[Case, str], list[Run | str]] = {
        (CASE, OURS): [Run([20_000.0], [12.0, 9.0], 97.0)],
        (CASE, PEER): [Run([16_000.0], [12.1, 9.1], 99.0)],
    }
    cells = row(CASE, OURS, found[CASE, OURS], 989.4e12)
    flops = CASE.model.flops_per_token(4096)
    assert cells[2] == "**20000**" and cells[4] == f"{20_000 * flops / 989.4e12:.1%}"
    assert verdicts(found) == [
        "8B, 16 of 32 layers, bf16: ours is **1.250** times as fast as torchtitan."
    ]
    failed = dict(found)
    failed[CASE, PEER] = ["it fell over"]
    assert "torchtitan: it fell over" in report(failed, "H200", 989.4e12, "data sheet")
    assert verdicts(failed) == ["There is nothing to compare."]


def test_cases_and_peaks() -> None:
    assert [case.layers for case in cases_for(139)] == [16, 16, 16, 16]
    assert [case.layers for case in cases_for(79)] == [16, 16, 8, 8]
    assert cases_for(139)[0].model.params == 1_235_814_400
    assert known_peak("NVIDIA H200") == known_peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert known_peak("NVIDIA H100 PCIe") == 756.5e12
    assert known_peak("Something new") is None
