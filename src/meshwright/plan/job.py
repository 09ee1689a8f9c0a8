"""The job file: its sections, and the one place that refuses combinations that cannot run."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from meshwright.base.config import apply_override, parse, read_toml
from meshwright.base.errors import ConfigError
from meshwright.models import hf_folder, presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.combinations import check_job
from meshwright.plan.data_section import MAY_CHANGE, DataSection, paths_of, with_paths
from meshwright.plan.layout import Layout
from meshwright.plan.section import Section


class JobSection(Section):
    """`[job]`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    steps: int = Field(gt=0)
    seed: int = Field(default=0, ge=0, lt=2**31)
    eval_every: int = Field(default=100, gt=0, description="steps; the last step always evaluates")
    eval_sequences: int = Field(default=64, gt=0, description="held out")


class ClusterSection(Section):
    """`[cluster]`."""

    ref: str = Field(default="local:1", description="local:N, N processes of this machine")
    spares: int = Field(default=0, ge=0, description="chips that wait to take over; 4 for each 64")
    nodes: int = Field(default=1, gt=0, description="agents that share the chips out")

    @field_validator("ref")
    @classmethod
    def _local(cls, ref: str) -> str:
        if not re.fullmatch(r"local:[1-9][0-9]{0,5}", ref):
            raise ValueError("this version runs on local:N, N processes of this machine")
        return ref

    @model_validator(mode="after")
    def _few_spares(self) -> Self:
        most = 4 * ceil(self.ranks / 64)
        if self.spares > most:
            raise ValueError(
                f"spares = {self.spares} for {self.ranks} chips: a job takes 0 to 4 for each 64; "
                f"set spares to {most} or less"
            )
        if self.nodes > self.ranks:
            raise ValueError(
                f"nodes = {self.nodes} for {self.ranks} chips: each has at least one; "
                f"set nodes to {self.ranks} or less"
            )
        return self

    @property
    def processes(self) -> int:
        """Those that train or wait to, and the conductor."""
        return self.ranks + self.spares + 1

    @property
    def ranks(self) -> int:
        """Chips asked for."""
        return int(self.ref.rpartition(":")[2])


class OptimizerSection(Section):
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


def _steps_or_auto(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError('a number of steps, or "auto"')
    if value < 1:
        raise ValueError('must be greater than 0, or "auto"')
    return value


class CheckpointSection(Section):
    """`[checkpoint]`."""

    every: Annotated[int | Literal["auto"], PlainValidator(_steps_or_auto)] = Field(
        default=100,
        description='steps, or "auto": by what a save costs; the last step always saves',
    )
    keep: int = Field(
        default=2, gt=0, description="newest checkpoints kept, and older verified ones"
    )
    store: str = Field(
        default="", description="folder or address (s3://...) of the store; the run's own if empty"
    )
    branch: str = Field(
        default="main",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$",
        description="where the commits of the run go",
    )
    deltas: bool = Field(default=False, description="save every step too, as its change")
    compress: bool = Field(default=True, description="without loss")
    encrypt: str = Field(
        default="", description="who wraps the keys: file:PATH, kms:ALIAS or vault:URL"
    )
    replica: str = Field(default="", description="another store, that damage is repaired from")
    copy_bytes: int = Field(default=0, ge=0, description="host memory for copies; 0: as needed")
    deadline_s: float = Field(default=600.0, gt=0, description="longest wait for a part of a rank")


class ResilienceSection(Section):
    """`[resilience]`: what a run survives, and at what price."""

    redundancy: Literal["auto", "none", "twin", "mirror", "shadow", "parity"] = Field(
        default="none", description="who else holds the state; none: a lost rank ends the run"
    )
    longest_stall_s: float = Field(
        default=30.0, gt=0, description="a run may stand still so long; all limits follow"
    )
    on_no_spare: Literal["shrink", "wait"] = Field(
        default="shrink", description="go on with fewer replicas, or wait for a chip"
    )
    max_takeovers: int = Field(default=20, gt=0, description="in an hour; more end the run")
    recheck_every: int = Field(
        default=0, ge=0, description="steps between two samples of work done again; 0: none"
    )

    @property
    def survives(self) -> bool:
        """Whether a lost rank is given to a spare."""
        return self.redundancy != "none"


class Job(Section):
    """A job file, resolved: every default filled in, every combination checked."""

    job: JobSection
    model: ModelSpec
    data: DataSection
    layout: Layout = Layout()
    cluster: ClusterSection = ClusterSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()


def load_job(path: Path, overrides: list[str] | None = None) -> Job:
    """Read, override and check a job file. Raises InputError or ConfigError, one line each."""
    tables = read_toml(path)
    for override in overrides or []:
        apply_override(tables, override)
    return _with_absolute_paths(resolve_job(tables))


def _with_absolute_paths(job: Job) -> Job:
    """Files that the job names, found from anywhere: a run may be resumed from another folder."""
    named = [*paths_of(job.data), job.data.tokenizer]
    found = {one: str(_at_home(one).absolute()) for one in named if _at_home(one).exists()}
    tokenizer = found.get(job.data.tokenizer, job.data.tokenizer)
    data = with_paths(job.data, found).model_copy(update={"tokenizer": tokenizer})
    stores = {
        key: str(_at_home(place).absolute())
        for key in ("store", "replica")
        if (place := getattr(job.checkpoint, key)) and "://" not in place
    }
    kind, _, path = job.checkpoint.encrypt.partition(":")
    if kind == "file" and path:
        stores["encrypt"] = f"file:{_at_home(path).absolute()}"
    checkpoint = job.checkpoint.model_copy(update=stores)
    return job.model_copy(update={"data": data, "checkpoint": checkpoint})


def _at_home(path: str) -> Path:
    """`path` with the home of a user for its `~`, if there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolve_job(tables: dict[str, Any]) -> Job:
    """A checked `Job` from the tables of a job file."""
    if "model" in tables:
        model = _resolve_model(tables["model"])
        tables = {**tables, "model": model, **_own_tokenizer(model, tables.get("data"))}
    if tables.get("layout") == "auto":
        return _planned(parse(Job, {k: table for k, table in tables.items() if k != "layout"}))
    job = parse(Job, tables)
    check_job(job)
    return job


def _planned(job: Job) -> Job:
    """`job` with the layout that the planner takes for the fastest on its cluster."""
    # Imported here: the planner knows jobs too, and most jobs name their layout.
    from meshwright.plan.auto import best_layout
    from meshwright.plan.calibration import calibrated

    return job.model_copy(update={"layout": best_layout(job, calibrated(job.cluster.ref))})


def _resolve_model(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    return parse(ModelSpec, _all_keys(section), prefix="model", also=["preset"])


def _all_keys(section: dict[str, Any]) -> dict[str, Any]:
    """`[model]` with the keys that its preset or model folder gives. That of a run that has begun
    is complete, and needs the folder no more."""
    own = {key: value for key, value in section.items() if key != "preset"}
    folder = own["hf"] if isinstance(own.get("hf"), str) else ""
    if "preset" in section and folder:
        fix = f"contradicts model.hf = {folder!r}, which has a shape too; leave one of them out"
        raise ConfigError("model.preset", section["preset"], fix)
    if "preset" in section:
        return {**presets.shape(str(section["preset"])), **own}
    if folder and not own.keys() >= ModelSpec.model_fields.keys():
        return hf_folder.shape(_at_home(folder).absolute(), own)
    return own


def _own_tokenizer(model: Any, data: Any) -> dict[str, Any]:
    """`[data]` with the tokenizer of the model's folder, where the job names none."""
    if isinstance(model, ModelSpec) and model.hf and isinstance(data, dict):
        path = Path(model.hf) / hf_folder.TOKENIZER_NAME
        if "tokenizer" not in data and path.is_file():
            return {"data": {**data, "tokenizer": str(path)}}
    return {}


def check_resume(begun: Job, now: Job) -> None:
    """Refuse to go on with a run as another: what it learns, and from what, stays as it began.

    Raises ConfigError. Layout, cluster, steps, optimizer and checkpoints may change, and how data
    are read.
    """
    before, after = begun.model_dump(), now.model_dump()
    fixed = [("model", key) for key in before["model"]]
    fixed += [("job", "seed")]
    fixed += [("data", key) for key in before["data"] if key not in MAY_CHANGE]
    for section, key in fixed:
        old, new = before[section][key], after[section][key]
        if new != old:
            fix = f"the run began with {old!r}; leave it out, or start a new run"
            raise ConfigError(f"{section}.{key}", new, fix)
