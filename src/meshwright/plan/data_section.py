"""`[data]` of a job file: which sources a run reads, how much of each, and how rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError
from meshwright.data.mixture import PRECISION, Mixture, Stage
from meshwright.data.opening import Reading
from meshwright.plan.section import Section

_KEY = "data.source"
MAY_CHANGE = frozenset({"bad_samples", "verify", "cache_bytes"})  # while a run is resumed


class DataSource(Section):
    """One of several sources, as an element of `data.source`."""

    path: str = Field(min_length=1)
    weight: float = Field(default=1.0, ge=0)


class DataStage(Section):
    """Weights that hold from step `step` on, as an element of `data.stages`."""

    step: int = Field(gt=0)
    weights: tuple[float, ...] = Field(strict=False)


class DataSection(Section):
    """`[data]`."""

    source: str | tuple[DataSource, ...] = "python-stdlib"
    stages: tuple[DataStage, ...] = Field(
        default=(), strict=False, description="weights of the sources from later steps on"
    )
    tokenizer: str = Field(
        default="bpe", min_length=1, description="'bpe' trains one; or a tokenizer.json"
    )
    seq_len: int = Field(gt=1, description="tokens")
    global_batch: int = Field(gt=0, description="sequences")
    packing: Literal["stream", "documents", "best-fit"] = Field(
        default="stream",
        description="documents: attention stays inside each; best-fit: rows of whole documents too",
    )
    bad_samples: int = Field(
        default=0, ge=0, description="damaged samples that a run may leave out; it counts them"
    )
    verify: bool = Field(
        default=False, description="check blocks of local builds as well when they are read"
    )
    cache_bytes: int = Field(
        default=16 << 30, gt=0, description="kept here of sources far away, by all ranks together"
    )

    @field_validator("source", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> str | tuple[DataSource, ...]:
        """By hand, since a union would complain about each of its kinds."""
        if isinstance(value, str):
            if not value:
                raise ValueError("name a file, a folder, or a list of them")
            return value
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("must be a path, or a list of paths or of {path, weight}")
        found = tuple(_source(number, one) for number, one in enumerate(value))
        _check_weights([one.weight for one in found], "the sources")
        return found

    @field_validator("stages")
    @classmethod
    def _fit_the_sources(
        cls, stages: tuple[DataStage, ...], info: ValidationInfo
    ) -> tuple[DataStage, ...]:
        source = info.data.get("source", "")
        count = 1 if isinstance(source, str) else len(source)
        for stage in stages:
            if len(stage.weights) != count:
                raise ValueError(
                    f"step {stage.step} has {len(stage.weights)} weights for {count} sources; "
                    "give each source one"
                )
            _check_weights(stage.weights, f"step {stage.step}")
        if any(a.step >= b.step for a, b in pairwise(stages)):
            raise ValueError("steps must ascend; put the stages in order")
        return stages

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """All of them; one that is named alone has weight 1."""
        return (DataSource(path=self.source),) if isinstance(self.source, str) else self.source

    @property
    def inside_documents(self) -> bool:
        """Whether attention stays inside each document."""
        return self.packing != "stream"

    @property
    def best_fit(self) -> bool:
        """Whether rows hold whole documents where those fit."""
        return self.packing == "best-fit"

    def reading(self, processes: int) -> Reading:
        """How each of `processes` reads the stores."""
        return Reading(self.verify, self.cache_bytes, processes)

    def mixture(self, seed: int) -> Mixture:
        """Shares of the sources."""
        first = Stage(0, tuple(source.weight for source in self.sources))
        later = (Stage(stage.step * self.global_batch, stage.weights) for stage in self.stages)
        return Mixture((first, *later), seed)


def _source(number: int, value: Any) -> DataSource:
    if isinstance(value, DataSource):
        return value
    if isinstance(value, str):
        value = {"path": value}
    where = f"{_KEY}[{number}]"
    if not isinstance(value, dict):
        raise ConfigError(where, value, "must be a path or {path = ..., weight = ...}")
    return parse(DataSource, value, prefix=where)


def _check_weights(weights: Sequence[float], whose: str) -> None:
    """Raises ValueError for weights that no mixture has."""
    if min(weights) < 0 or not sum(weights):
        raise ValueError(f"weights of {whose} must be >= 0, and one above it")
    if any(0 < weight < sum(weights) / PRECISION for weight in weights):
        raise ValueError(f"weights of {whose}: a share below 1/{PRECISION} is none; use 0 or more")


def with_paths(data: DataSection, found: dict[str, str]) -> DataSection:
    """`data` with the sources that are keys of `found` replaced by their values."""
    if isinstance(data.source, str):
        return data.model_copy(update={"source": found.get(data.source, data.source)})
    moved = tuple(
        one.model_copy(update={"path": found.get(one.path, one.path)}) for one in data.source
    )
    return data.model_copy(update={"source": moved})


def paths_of(data: DataSection) -> Sequence[str]:
    """The sources as the job names them."""
    return [source.path for source in data.sources]
