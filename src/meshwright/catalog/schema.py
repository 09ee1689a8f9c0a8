"""What a catalogue file may say; the shipped files and those of users are read alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.base.config import parse, read_toml
from meshwright.base.errors import ConfigError, InputError, did_you_mean
from meshwright.catalog.hardware import Figure, Kind, Wiring

TABLES = ("sources", "chips", "topologies", "instances")
_TORI = {"ring": 1, "torus2d": 2, "torus3d": 3}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SourceEntry(_Entry):
    """`[sources.NAME]`: a document, and what its figures are unless they say otherwise."""

    title: str = Field(min_length=1)
    date: str = Field(min_length=1)
    kind: Kind = "vendor"


class FigureEntry(_Entry):
    """`{ value = 450, source = "NAME" }`."""

    value: float = Field(gt=0)
    source: str
    kind: Kind | None = None


class TflopsEntry(_Entry):
    """Dense peaks by precision. fp16 is as fast as bf16 unless it is given."""

    fp32: FigureEntry | None = None
    tf32: FigureEntry | None = None
    bf16: FigureEntry
    fp16: FigureEntry | None = None
    fp8: FigureEntry | None = None
    fp4: FigureEntry | None = None

    @model_validator(mode="after")
    def _rise_with_fewer_bits(self) -> Self:
        given = [self.fp32, self.tf32, self.bf16, self.fp8, self.fp4]
        peaks = [peak.value for peak in given if peak]
        if peaks != sorted(peaks):
            raise ValueError(
                "fewer bits must not be slower: fp32 <= tf32 <= bf16 <= fp8 <= fp4; "
                "give dense peaks everywhere, not sparse ones in some places"
            )
        return self


class ChipEntry(_Entry):
    """`[chips.NAME]`."""

    title: str
    vendor: str
    memory_gib: FigureEntry
    memory_tb_s: FigureEntry
    tflops: TflopsEntry
    power_w: FigureEntry | None = None


class TopologyEntry(_Entry):
    """`[topologies.NAME]`."""

    title: str
    kind: Wiring
    size: int = Field(default=0, ge=0, description="0: the whole cluster")
    shape: list[int] = []
    wrap_every: int = Field(default=1, gt=0)
    gb_s: FigureEntry
    latency_us: FigureEntry

    @model_validator(mode="after")
    def _shape_of_a_torus(self) -> Self:
        needed = _TORI.get(self.kind, 0)
        if len(self.shape) != needed or min(self.shape, default=1) < 1:
            raise ValueError(f"kind {self.kind!r} needs {needed} extents of 1 or more in shape")
        if self.kind == "mesh" and self.size < 2:
            raise ValueError("a mesh needs its size, the chips that are linked to each other")
        return self


class InstanceEntry(_Entry):
    """`[instances.NAME]`."""

    title: str
    aliases: list[str] = []
    chip: str
    chips_per_node: int = Field(ge=0, description="0: all chips are one node")
    levels: list[str] = Field(min_length=1)
    usd_per_node_hour: FigureEntry | None = None
    usd_per_chip_hour: FigureEntry | None = None
    storage_gb_s: FigureEntry | None = Field(default=None, description="of a node, one direction")

    @model_validator(mode="after")
    def _one_price(self) -> Self:
        if self.usd_per_node_hour and self.usd_per_chip_hour:
            raise ValueError("give usd_per_node_hour or usd_per_chip_hour, not both")
        return self


class File(_Entry):
    """The entries of one file, all read."""

    sources: dict[str, SourceEntry]
    chips: dict[str, ChipEntry]
    topologies: dict[str, TopologyEntry]
    instances: dict[str, InstanceEntry]


Entry = TypeVar("Entry", bound=_Entry)


def read_file(path: Path) -> File:
    """The entries of a catalogue file. Raises ConfigError for the first thing wrong in it."""
    tables = read_toml(path)
    for key, value in tables.items():
        if key not in TABLES:
            hint = did_you_mean(key, TABLES) or f"; known here: {', '.join(TABLES)}"
            raise ConfigError(f"{path.name}: {key}", _brief(value), "unknown table" + hint)
    return File(
        sources=_entries(SourceEntry, tables, "sources", path),
        chips=_entries(ChipEntry, tables, "chips", path),
        topologies=_entries(TopologyEntry, tables, "topologies", path),
        instances=_entries(InstanceEntry, tables, "instances", path),
    )


def _entries(
    schema: type[Entry], tables: Mapping[str, Any], table: str, path: Path
) -> dict[str, Entry]:
    raw = tables.get(table, {})
    if not isinstance(raw, dict):
        fix = f"must be tables with a name: [{table}.NAME]"
        raise ConfigError(f"{path.name}: {table}", raw, fix)
    found = {}
    for name, entry in raw.items():
        if not isinstance(entry, dict):
            fix = f"must be a table: [{table}.{name}]"
            raise ConfigError(f"{path.name}: {table}.{name}", entry, fix)
        found[name] = _entry(schema, entry, f"{path.name}: {table}.{name}", path)
    return found


def _entry(schema: type[Entry], raw: Mapping[str, Any], prefix: str, path: Path) -> Entry:
    try:
        return parse(schema, raw, prefix)
    except ConfigError as error:
        if error.fix.startswith("required"):
            raise ConfigError(error.key, None, f"required; add it to {path}") from error
        raise


def figure(
    entry: FigureEntry, unit: str, scale: float, sources: Mapping[str, SourceEntry], where: str
) -> Figure:
    """`entry` in SI units with its source written out. Raises ConfigError on an unknown source."""
    source = sources.get(entry.source)
    if source is None:
        hint = did_you_mean(entry.source, sources) or f"; add [sources.{entry.source}]"
        raise ConfigError(f"{where}.source", entry.source, "no such source" + hint)
    kind = entry.kind or source.kind
    return Figure(entry.value * scale, unit, source.title, source.date, kind)


def _brief(value: object) -> object:
    if isinstance(value, dict | list) and len(repr(value)) > 40:
        return type(value).__name__
    return value


def check_readable(path: Path) -> None:
    """Raises InputError if there is no such file."""
    if not path.is_file():
        raise InputError(f"{path}: no such catalogue file; check --catalogue")
