"""Clusters by name: `p5:1024` is 1,024 chips of AWS p5 nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.catalog import schema
from meshwright.catalog.hardware import Chip, Cluster, Figure, Level
from meshwright.catalog.tori import slice_shape

# What a node reads or writes of a checkpoint each second where nothing better is known.
_STORAGE = Figure(2e9, "bytes/s", "a parallel file system, 2 GB/s a node", "2026-11", "assumed")
_SHIPPED = ("chips.toml", "topologies.toml", "instances.toml")


@dataclass(frozen=True)
class _Shelf:
    """Everything that can be named, users' entries over the shipped ones."""

    chips: Mapping[str, Chip]
    topologies: Mapping[str, tuple[schema.TopologyEntry, Mapping[str, Figure]]]
    instances: Mapping[str, tuple[schema.InstanceEntry, Mapping[str, Figure]]]

    def instance_name(self, word: str) -> str | None:
        """The instance that `word` names, by its name or an alias, in any case."""
        word = word.lower()
        if word in self.instances:
            return word
        named = (name for name, (entry, _) in self.instances.items() if word in entry.aliases)
        return next(named, None)


def chip(name: str, extra: Path | None = None) -> Chip:
    """The chip called `name`. Raises ConfigError on an unknown name."""
    chips = _shelf(extra).chips
    if name not in chips:
        hint = did_you_mean(name, chips) or f"; known: {', '.join(chips)}"
        raise ConfigError("chip", name, "no such chip in the catalogue" + hint)
    return chips[name]


def chip_names(extra: Path | None = None) -> list[str]:
    """All chips, in the order of the file."""
    return list(_shelf(extra).chips)


def names(extra: Path | None = None) -> list[str]:
    """All instances that a cluster can be made of, in the order of the file, without aliases."""
    return list(_shelf(extra).instances)


def instance(word: str, extra: Path | None = None) -> schema.InstanceEntry:
    """What the catalogue says of the instance `word`, by name or alias. Raises ConfigError."""
    shelf = _shelf(extra)
    name = shelf.instance_name(word)
    if name is None:
        hint = did_you_mean(word.lower(), shelf.instances)
        hint = hint or f"; known: {', '.join(shelf.instances)}"
        raise ConfigError("instance", word, "no such instance in the catalogue" + hint)
    return shelf.instances[name][0]


def aliases(name: str, extra: Path | None = None) -> list[str]:
    """Other names of the instance called `name`; none for one that is not known."""
    found = _shelf(extra).instances.get(name)
    return list(found[0].aliases) if found else []


def canonical_name(word: str, extra: Path | None = None) -> str | None:
    """The name of the instance that `word` names by its name or an alias; None for none."""
    return _shelf(extra).instance_name(word)


def cluster(ref: str, extra: Path | None = None) -> Cluster:
    """The cluster that `ref` means: NAME:CHIPS. `extra` is a catalogue file of the user's.

    Raises ConfigError, one line, on an unknown name or a number of chips that cannot be had.
    """
    shelf = _shelf(extra)
    word, count = _split(ref)
    name = shelf.instance_name(word)
    if name is None:
        known = [alias for entry, _ in shelf.instances.values() for alias in entry.aliases]
        hint = did_you_mean(word.lower(), [*shelf.instances, *known])
        hint = hint or f"; known: {', '.join(shelf.instances)}"
        raise ConfigError("cluster", ref, "no such instance in the catalogue" + hint)
    entry, figures = shelf.instances[name]
    per_node = entry.chips_per_node or count
    if count > per_node and count % per_node:
        lower = count // per_node * per_node
        fix = f"{name} has {per_node} chips a node; ask for {lower} or {lower + per_node}"
        raise ConfigError("cluster", ref, fix)
    chip_there = shelf.chips[entry.chip]
    price = figures.get("price_per_chip_hour")
    return Cluster(
        name=f"{name}:{count}",
        title=entry.title,
        chip=chip_there,
        chips=count,
        chips_per_node=min(per_node, count),
        levels=_levels(shelf, entry.levels, count, ref),
        price_per_chip_hour=price.value if price else None,
        storage_bytes_s_per_node=figures["storage_bytes_s_per_node"].value,
        figures=figures,
    )


def _split(ref: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*):([1-9][0-9]{0,6})", ref)
    if match is None:
        fix = "write NAME:CHIPS, a name of the catalogue and a number of chips, as in p5:1024"
        raise ConfigError("cluster", ref, fix)
    return match[1], int(match[2])


def _levels(shelf: _Shelf, names: list[str], chips: int, ref: str) -> tuple[Level, ...]:
    """The levels that `chips` chips reach; the last one is cut to hold just them."""
    found: list[Level] = []
    for name in names:
        entry, figures = shelf.topologies[name]
        within = found[-1].size if found else 1
        if (
            entry.size
            and chips > entry.size
            and entry.kind in ("torus2d", "torus3d")
            and chips % entry.size
        ):
            fix = f"a pod has {entry.size} chips; ask for less, or for a multiple of that"
            raise ConfigError("cluster", ref, fix)
        size = min(entry.size or chips, chips)
        shape, wraps = slice_shape(entry, size // within if entry.kind == "ring" else size, ref)
        gb_s, latency = figures["bandwidth_bytes_s"], figures["latency_s"]
        found.append(
            Level(
                name=name,
                title=entry.title,
                size=size,
                bandwidth_bytes_s=gb_s.value * _links_left(entry, size),
                latency_s=latency.value,
                kind=entry.kind,
                shape=shape,
                wraps=wraps,
                figures=figures,
            )
        )
        if size == chips:
            return tuple(found)
    fix = f"the levels of {ref.partition(':')[0]} join at most {found[-1].size} chips"
    raise ConfigError("cluster", ref, fix)


def _links_left(entry: schema.TopologyEntry, size: int) -> float:
    """Share of its links that a chip uses among `size` chips: of a mesh those to chips that are
    there."""
    return (size - 1) / (entry.size - 1) if entry.kind == "mesh" and size > 1 else 1.0


@cache
def _shipped() -> _Shelf:
    shelf = _Shelf({}, {}, {})
    for name in _SHIPPED:
        with as_file(files("meshwright.catalog").joinpath(name)) as path:
            shelf = _stack(shelf, schema.read_file(path), path.name)
    _check(shelf, "shipped catalogue")
    return shelf


def _shelf(extra: Path | None) -> _Shelf:
    """The shipped catalogue with the user's entries on top."""
    if extra is None:
        return _shipped()
    schema.check_readable(extra)
    shelf = _stack(_shipped(), schema.read_file(extra), extra.name)
    _check(shelf, extra.name)
    return shelf


def _stack(below: _Shelf, file: schema.File, where: str) -> _Shelf:
    chips = {
        name: _chip(name, entry, file, f"{where}: chips.{name}")
        for name, entry in file.chips.items()
    }
    topologies = {
        name: (entry, _topology_figures(entry, file, f"{where}: topologies.{name}"))
        for name, entry in file.topologies.items()
    }
    instances = {
        name.lower(): (entry, _instance_figures(entry, file, f"{where}: instances.{name}"))
        for name, entry in file.instances.items()
    }
    return _Shelf(
        {**below.chips, **chips},
        {**below.topologies, **topologies},
        {**below.instances, **instances},
    )


def _chip(name: str, entry: schema.ChipEntry, file: schema.File, where: str) -> Chip:
    units = {
        "memory_bytes": (entry.memory_gib, "bytes", 2.0**30),
        "memory_bandwidth_bytes_s": (entry.memory_tb_s, "bytes/s", 1e12),
        "power_w": (entry.power_w, "W", 1.0),
    }
    peaks = {key: getattr(entry.tflops, key) for key in schema.TflopsEntry.model_fields}
    peaks["fp16"] = peaks["fp16"] or peaks["bf16"]
    units |= {f"peak_flops.{key}": (peak, "FLOP/s", 1e12) for key, peak in peaks.items()}
    figures = {
        key: schema.figure(value, unit, scale, file.sources, f"{where}.{key}")
        for key, (value, unit, scale) in units.items()
        if value is not None
    }
    power = figures.get("power_w")
    return Chip(
        name=name,
        title=entry.title,
        vendor=entry.vendor,
        memory_bytes=figures["memory_bytes"].value,
        memory_bandwidth_bytes_s=figures["memory_bandwidth_bytes_s"].value,
        peak_flops={k: figures[f"peak_flops.{k}"].value for k in peaks if peaks[k] is not None},
        power_w=power.value if power else None,
        figures=figures,
    )


def _topology_figures(
    entry: schema.TopologyEntry, file: schema.File, where: str
) -> dict[str, Figure]:
    return {
        "bandwidth_bytes_s": schema.figure(
            entry.gb_s, "bytes/s", 1e9, file.sources, f"{where}.gb_s"
        ),
        "latency_s": schema.figure(
            entry.latency_us, "s", 1e-6, file.sources, f"{where}.latency_us"
        ),
    }


def _instance_figures(
    entry: schema.InstanceEntry, file: schema.File, where: str
) -> dict[str, Figure]:
    figures = {"storage_bytes_s_per_node": _STORAGE}
    if entry.storage_gb_s:
        figures["storage_bytes_s_per_node"] = schema.figure(
            entry.storage_gb_s, "bytes/s", 1e9, file.sources, f"{where}.storage_gb_s"
        )
    price, share = entry.usd_per_chip_hour, 1.0
    if entry.usd_per_node_hour:
        price, share = entry.usd_per_node_hour, 1.0 / (entry.chips_per_node or 1)
    if price:
        figures["price_per_chip_hour"] = schema.figure(
            price, "USD/h", share, file.sources, f"{where}.usd_per_hour"
        )
    return figures


def _check(shelf: _Shelf, where: str) -> None:
    """What an instance names is there, and its levels grow outwards and get no faster."""
    for name, (entry, _) in shelf.instances.items():
        key = f"{where}: instances.{name}"
        if entry.chip not in shelf.chips:
            hint = did_you_mean(entry.chip, shelf.chips) or f"; add [chips.{entry.chip}]"
            raise ConfigError(f"{key}.chip", entry.chip, "no such chip" + hint)
        for level in entry.levels:
            if level not in shelf.topologies:
                hint = did_you_mean(level, shelf.topologies) or f"; add [topologies.{level}]"
                raise ConfigError(f"{key}.levels", level, "no such topology" + hint)
        _check_levels(key, [(level, shelf.topologies[level]) for level in entry.levels])


def _check_levels(
    key: str, levels: list[tuple[str, tuple[schema.TopologyEntry, Mapping[str, Figure]]]]
) -> None:
    for (_, (inner, inner_figures)), (name, (outer, outer_figures)) in pairwise(levels):
        if not inner.size or (outer.size and outer.size % inner.size):
            raise ConfigError(
                f"{key}.levels",
                name,
                "must join whole units of the level before it; innermost first",
            )
        faster = outer_figures["bandwidth_bytes_s"].value > inner_figures["bandwidth_bytes_s"].value
        if faster:
            fix = "is faster than the level inside it; name the innermost level first"
            raise ConfigError(f"{key}.levels", name, fix)
