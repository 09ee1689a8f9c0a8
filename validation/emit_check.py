"""Every emitted configuration through the parser of its framework, without a GPU.

Long, and no part of `make test`: it installs the frameworks, without what of them needs a GPU, into
folders of their own below `--into` (kept and used again if given, else thrown away). `--write`
writes EMIT.md. FSDP2 scripts are run on two processes, with a model of 2 layers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.catalog import cluster
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit import Plan, emit
from meshwright.plan.layout import Layout

HERE = Path(__file__).parent
LIMIT_S = 300.0
INSTALL_LIMIT_S = 900.0
Row = tuple[str, str, str, str]
SCRIPTS = (
    Layout(dp_shard=2, precision="bf16", recompute="full", micro_batch=2),
    Layout(dp_shard=2, zero=2),
)

# Per framework, without dependencies, which would bring gigabytes; what several of them import is
# in emit_common.txt.
PACKAGES: Mapping[str, Sequence[str]] = {
    "torchtitan": ("torchtitan==0.3.0",),
    "torchtitan-toml": ("torchtitan==0.2.2",),
    "megatron": ("megatron-core==0.19.2",),
    "megatron-bridge": (
        "megatron-bridge==0.6.2",
        "megatron-core==0.19.2",
        "transformers==5.12.1",
        "huggingface_hub==1.5.0",
        "tokenizers==0.22.2",
    ),
    "deepspeed": ("deepspeed==0.19.8",),
    "colossalai": (
        "colossalai==0.5.0",
        "transformers==4.51.3",
        "peft==0.13.2",
        "huggingface_hub==0.30.2",
        "tokenizers==0.21.1",
        "galore_torch",
        "diffusers==0.29.0",
    ),
}
# Only built for Python 3.12: unpacked all the same, as what is checked of it is plain Python.
NEWER_PYTHON = ("megatron-core", "megatron-bridge")


@dataclass(frozen=True)
class Case:
    """A plan, and what the framework has to have understood of it."""

    framework: str
    model: str
    layout: Mapping[str, Any]
    wants: Mapping[str, Any]

    def plan(self) -> Plan:
        layout = Layout(**self.layout)
        spec = presets.preset(self.model)
        where = cluster(f"h100:{layout.world}")
        return Plan(spec, layout, min(4096, spec.max_seq_len), 256, 1000, where)


CASES = (
    Case("torchtitan", "llama3-8b", {"dp_shard": 16, "precision": "bf16", "recompute": "full"},
         {"dp_shard": 16, "tp": 1, "global_batch": 256}),
    Case("torchtitan", "qwen3-30b-a3b",
         {"dp_shard": 8, "tp": 2, "pp": 4, "schedule": "zbv", "ep": 16, "precision": "bf16"},
         {"dp_shard": 8, "tp": 2, "pp": 4, "ep": 16}),
    Case("torchtitan-toml", "llama3-70b",
         {"dp_shard": 4, "tp": 8, "cp": 2, "precision": "fp8", "zero": 3},
         {"dp_shard": 4, "tp": 8, "cp": 2, "global_batch": 256}),
    Case("torchtitan-toml", "deepseek-v3",
         {"dp_shard": 64, "pp": 4, "vpp": 2, "schedule": "interleaved", "ep": 32, "zero": 2},
         {"dp_shard": 64, "pp": 4, "ep": 32}),
    Case("megatron", "llama3-70b",
         {"dp_shard": 8, "tp": 8, "pp": 4, "vpp": 5, "schedule": "interleaved", "zero": 1,
          "precision": "bf16", "recompute": "selective"},
         {"tp": 8, "pp": 4, "dp": 8, "layers": 80, "global_batch": 256}),
    Case("megatron", "deepseek-v3",
         {"dp_shard": 64, "pp": 16, "ep": 64, "zero": 1, "precision": "bf16",
          "stages": [3, *[4] * 14, 2]},
         {"pp": 16, "ep": 64, "dp": 64, "layers": 61}),
    Case("megatron", "llama3-8b",
         {"dp_replicate": 2, "dp_shard": 8, "cp": 2, "zero": 3, "precision": "bf16"},
         {"cp": 2, "dp": 16, "layers": 32}),
    Case("megatron", "gpt3-13b",
         {"dp_shard": 4, "pp": 4, "zero": 1, "precision": "fp16", "stages": [9, 11, 11, 9]},
         {"pp": 4, "dp": 4, "layers": 40}),
    Case("megatron-bridge", "llama3-8b",
         {"dp_shard": 8, "tp": 4, "pp": 2, "zero": 1, "precision": "bf16", "recompute": "full"},
         {"tp": 4, "pp": 2, "layers": 32, "global_batch": 256}),
    Case("megatron-bridge", "qwen3-30b-a3b",
         {"dp_shard": 8, "tp": 2, "ep": 8, "zero": 1, "precision": "bf16"},
         {"tp": 2, "ep": 8, "layers": 48}),
    Case("deepspeed", "llama3-8b",
         {"dp_shard": 16, "tp": 2, "sp": False, "zero": 2, "precision": "bf16",
          "offload": "optimizer"},
         {"dp": 16, "tp": 2, "zero": 2, "global_batch": 256}),
    Case("deepspeed", "mixtral-8x7b",
         {"dp_shard": 16, "ep": 8, "zero": 3, "precision": "bf16", "micro_batch": 2},
         {"dp": 16, "zero": 3, "global_batch": 256}),
    Case("colossalai", "llama3-8b",
         {"dp_shard": 4, "tp": 4, "pp": 2, "zero": 1, "precision": "bf16"},
         {"tp": 4, "pp": 2, "zero": 1, "mesh": [4, 2, 4, 1]}),
    Case("colossalai", "llama3-8b",
         {"dp_shard": 2, "cp": 4, "sp": False, "zero": 2, "precision": "bf16"},
         {"tp": 1, "zero": 2, "mesh": [2, 1, 4, 1]}),
    Case("colossalai", "llama3-8b",
         {"dp_shard": 2, "pp": 4, "schedule": "zbv", "zero": 1, "precision": "bf16"},
         {"pp": 4, "mesh": [2, 4, 1, 1]}),
)  # fmt: skip


def pip(*arguments: str) -> None:
    """Install without dependencies. Raises CalledProcessError or TimeoutExpired."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    subprocess.run([*command, *arguments], check=True, timeout=INSTALL_LIMIT_S)


def installed(framework: str, into: Path) -> list[Path]:
    """Folders that hold what the framework needs, made once."""
    common, own = into / "common", into / framework
    if not common.exists():
        pip("--target", str(common), "--requirement", str(HERE / "emit_common.txt"))
    if not own.exists():
        newer = [name for name in PACKAGES[framework] if name.startswith(NEWER_PYTHON)]
        others = [name for name in PACKAGES[framework] if name not in newer]
        if newer:
            built = (
                "--python-version",
                "3.12",
                "--only-binary",
                ":all:",
                "--ignore-requires-python",
            )
            pip("--target", str(own), *built, *newer)
        if others:
            pip("--target", str(own), "--upgrade", *others)
    return [own, common]


def write_files(case: Case, folder: Path) -> None:
    """The configuration, and what the launcher of a script would have been given."""
    emitted = emit(case.framework, case.plan())
    folder.mkdir(parents=True)
    for name, text in emitted.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "world").write_text(str(case.plan().layout.world), encoding="utf-8")
    if case.framework == "megatron":
        stub = folder / "torchrun"
        stub.write_text(
            "#!/bin/bash\nprintf '%s\\0' \"$@\" > words\n"
            'printf %s "$CUDA_DEVICE_MAX_CONNECTIONS" > connections\n',
            encoding="utf-8",
        )
        stub.chmod(0o755)
        path = {"PATH": f"{folder}:{os.environ['PATH']}", "HOST": "localhost", "NODE": "0"}
        subprocess.run(["bash", "run.sh"], cwd=folder, env=path, check=True, timeout=LIMIT_S)


def probe(case: Case, folder: Path, into: Path) -> str:
    """Empty if the framework understood the plan, else what went wrong, in one line."""
    try:
        paths = ":".join(map(str, installed(case.framework, into)))
        write_files(case, folder)
        done = subprocess.run(
            [sys.executable, str(HERE / "emit_probe.py"), case.framework, str(folder)],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        return str(error).splitlines()[0]
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    understood = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = {k: understood.get(k) for k, want in case.wants.items() if understood.get(k) != want}
    return f"understood {wrong}, not {dict(case.wants)}" if wrong else ""


def run_fsdp2(folder: Path, layout: Layout) -> str:
    """Two steps of the script on two gloo ranks; empty if its loss is that of random weights."""
    spec = ModelSpec(family="llama", layers=2, hidden=64, heads=4, vocab=256, max_seq_len=64)
    emitted = emit("fsdp2", Plan(spec, layout, 64, 8, 2, cluster("local:2")))
    folder.mkdir(parents=True)
    for name, text in emitted.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [str(torchrun), *emitted.command.split()[1:]]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    if done.returncode or len(lines) != 2:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    loss = float(lines[0].split()[3])
    return "" if 5.3 < loss < 5.8 else f"loss {loss}, ln(256) is 5.545"


def report(rows: Sequence[Row]) -> str:
    """EMIT.md."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "# Emitted configurations and the parsers of their frameworks",
        "",
        f"Written by `python validation/emit_check.py --write` on {day}, Python "
        f"{sys.version.split()[0]}, without a GPU.",
        "",
        "| For | Parser | Plan | Result |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        (HERE / "emit_limits.md").read_text(encoding="utf-8").strip(),
    ]
    return "\n".join(lines) + "\n"


def check_all(into: Path, only: str | None) -> list[Row]:
    """Every case; rows of the table."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        for number, case in enumerate(CASES):
            if only in (None, case.framework):
                wrong = probe(case, Path(made, str(number)), into)
                said = f"{case.model}, {case.plan().layout.label}"
                parser = PACKAGES[case.framework][0]
                rows.append(reported(case.framework, parser, said, wrong or "agrees"))
        for layout in SCRIPTS if only in (None, "fsdp2") else ():
            wrong = run_fsdp2(Path(made, f"fsdp2-{layout.zero_stage}"), layout)
            said = f"2 layers, {layout.label}, 2 steps on gloo"
            rows.append(reported("fsdp2", f"run, torch {version('torch')}", said, wrong or "runs"))
    return rows


def reported(*row: str) -> Row:
    """The row, shown as soon as it is known."""
    sys.stderr.write(": ".join(row) + "\n")
    framework, parser, said, result = row
    return framework, parser, said, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="folder for the frameworks, kept")
    parser.add_argument("--only", help="one framework")
    parser.add_argument("--write", action="store_true", help="write EMIT.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as thrown_away:
        rows = check_all(given.into or Path(thrown_away), given.only)
    if given.write:
        (HERE / "EMIT.md").write_text(report(rows), encoding="utf-8")
    return int(any(row[-1] not in ("agrees", "runs") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
