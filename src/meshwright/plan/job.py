"""The job file: its sections, and the one place that refuses combinations that cannot run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwright.base.config import apply_override, parse, read_toml
from meshwright.base.errors import ConfigError
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class JobSection(_Section):
    """`[job]`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    steps: int = Field(gt=0)
    seed: int = Field(default=0, ge=0, lt=2**31)
    eval_every: int = Field(default=100, gt=0, description="steps; the last step always evaluates")
    eval_sequences: int = Field(default=64, gt=0, description="held out")


class DataSection(_Section):
    """`[data]`."""

    source: str = Field(default="python-stdlib", min_length=1)
    tokenizer: str = Field(
        default="bpe", min_length=1, description="'bpe' trains one; or a tokenizer.json"
    )
    seq_len: int = Field(gt=1, description="tokens")
    global_batch: int = Field(gt=0, description="sequences")


class ClusterSection(_Section):
    """`[cluster]`."""

    ref: str = Field(default="local:1", description="local:N, N processes of this machine")

    @field_validator("ref")
    @classmethod
    def _local(cls, ref: str) -> str:
        if not re.fullmatch(r"local:[1-9][0-9]{0,5}", ref):
            raise ValueError("this version runs on local:N, N processes of this machine")
        return ref

    @property
    def ranks(self) -> int:
        """Chips asked for."""
        return int(self.ref.rpartition(":")[2])


class OptimizerSection(_Section):
    """`[optimizer]`: AdamW, linear warm-up, cosine to `min_lr`."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    grad_clip: float = Field(default=1.0, gt=0, description="bound of the global gradient norm")

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _min_below_peak(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr}); lower it")
        return self


class CheckpointSection(_Section):
    """`[checkpoint]`."""

    every: int = Field(default=100, gt=0, description="steps; the last step always saves")
    keep: int = Field(default=2, gt=0, description="newest checkpoints kept")


class Job(_Section):
    """A job file, resolved: every default filled in, every combination checked."""

    job: JobSection
    model: ModelSpec
    data: DataSection
    layout: Layout = Layout()
    cluster: ClusterSection = ClusterSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()


def load_job(path: Path, overrides: list[str] | None = None) -> Job:
    """Read, override and check a job file. Raises InputError or ConfigError, one line each."""
    tables = read_toml(path)
    for override in overrides or []:
        apply_override(tables, override)
    return _with_absolute_paths(resolve_job(tables))


def _with_absolute_paths(job: Job) -> Job:
    """Files that the job names, found from anywhere: a run may be resumed from another folder."""
    found = {
        key: str(Path(value).expanduser().absolute())
        for key, value in (("source", job.data.source), ("tokenizer", job.data.tokenizer))
        if Path(value).expanduser().exists()
    }
    return job.model_copy(update={"data": job.data.model_copy(update=found)})


def resolve_job(tables: dict[str, Any]) -> Job:
    """A checked `Job` from the tables of a job file."""
    if "model" in tables:
        tables = {**tables, "model": _resolve_model(tables["model"])}
    job = parse(Job, tables)
    check_job(job)
    return job


def _resolve_model(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    shape = presets.shape(str(section["preset"])) if "preset" in section else {}
    own = {key: value for key, value in section.items() if key != "preset"}
    return parse(ModelSpec, {**shape, **own}, prefix="model", also=["preset"])


def check_resume(begun: Job, now: Job) -> None:
    """Refuse to go on with a run as another: what it learns, and from what, stays as it began.

    Raises ConfigError. Layout, cluster, steps, optimizer and checkpoints may change.
    """
    before, after = begun.model_dump(), now.model_dump()
    fixed = [("model", key) for key in before["model"]]
    fixed += [("job", "seed"), *(("data", key) for key in before["data"])]
    for section, key in fixed:
        old, new = before[section][key], after[section][key]
        if new != old:
            fix = f"the run began with {old!r}; leave it out, or start a new run"
            raise ConfigError(f"{section}.{key}", new, fix)


def check_job(job: Job) -> None:
    """Refuse what cannot run, naming both options and the way out. Raises ConfigError."""
    _check_axes(job)
    _check_model_split(job)
    _check_batch(job)


def _check_axes(job: Job) -> None:
    layout, ranks = job.layout, job.cluster.ranks
    if layout.world != ranks:
        raise ConfigError(
            "layout",
            layout.label,
            f"its axes multiply to {layout.world} ranks but cluster.ref = {job.cluster.ref!r} has "
            f"{ranks}; change an axis or set cluster.ref = 'local:{layout.world}'",
        )


def _check_model_split(job: Job) -> None:
    model, layout = job.model, job.layout
    for name, size in (
        ("heads", model.heads),
        ("kv_heads", model.kv_heads),
        ("ffn_hidden", model.ffn_hidden),
        ("vocab", model.vocab),
    ):
        if size % layout.tp:
            fits = ", ".join(str(tp) for tp in range(1, min(size, 64) + 1) if size % tp == 0)
            raise ConfigError(
                "layout.tp", layout.tp, f"does not divide model.{name} = {size}; it takes {fits}"
            )
    if model.layers < layout.pp:
        raise ConfigError(
            "layout.pp",
            layout.pp,
            f"more stages than model.layers = {model.layers}; use pp <= {model.layers}",
        )
    if layout.sequence_parallel and job.data.seq_len % layout.tp:
        raise ConfigError(
            "data.seq_len",
            job.data.seq_len,
            f"is not a multiple of layout.tp = {layout.tp}, which splits the sequence; "
            "change it or set layout.sp = false",
        )
    if job.data.seq_len > model.max_seq_len:
        raise ConfigError(
            "data.seq_len",
            job.data.seq_len,
            f"is longer than model.max_seq_len = {model.max_seq_len}; "
            f"shorten it or set model.max_seq_len = {job.data.seq_len}",
        )


def _check_batch(job: Job) -> None:
    layout, batch = job.layout, job.data.global_batch
    unit = layout.dp * layout.micro_batch
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        raise ConfigError(
            "data.global_batch",
            batch,
            f"is not a multiple of dp x micro_batch = {layout.dp} x {layout.micro_batch} = {unit}; "
            f"use {f'{below} or ' if below else ''}{above}",
        )
