"""What was read from a configuration of another trainer, and from which of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout

Schema = TypeVar("Schema", bound=BaseModel)
Format = Literal["huggingface", "megatron", "torchtitan", "deepspeed"]


@dataclass(frozen=True)
class Reading:
    """Part of a job. `model` and `layout` are keys of ModelSpec and Layout; what the source does
    not say is not there. `origins` names, for each dotted key, what it was read from; `unused`
    holds what means nothing to a plan or was not understood; `notes` say what had to be assumed,
    `problems` what ModelSpec cannot express, by key of the source."""

    source: str
    format: Format
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    seq_len: int | None
    global_batch: int | None
    world: int | None
    origins: Mapping[str, str]
    unused: Mapping[str, Any]
    notes: tuple[str, ...]
    problems: Mapping[str, str]

    def spec(self) -> ModelSpec:
        """The model. Raises ConfigError naming the key that lacks or does not fit."""
        for key, fix in self.problems.items():
            raise ConfigError(f"{self.source}: {key}", self.unused.get(key), fix)
        return self._parsed(ModelSpec, self.model, "model")

    def to_layout(self) -> Layout:
        """The layout; axes that were not said are 1. Raises ConfigError if the keys contradict."""
        return self._parsed(Layout, self.layout, "layout")

    def _parsed(self, schema: type[Schema], raw: Mapping[str, Any], section: str) -> Schema:
        try:
            return parse(schema, raw, section)
        except ConfigError as error:
            origin = self.origins.get(error.key)
            if error.fix.startswith("required"):
                fix = f"{self.source} does not say it; give it yourself"
                raise ConfigError(error.key, None, fix) from error
            where = f"{self.source}: {origin}" if origin else f"{self.source}: {error.key}"
            raise ConfigError(where, error.value, error.fix) from error

    def given(self, **model: Any) -> Reading:
        """The same with keys of the model that the source leaves open, as `vocab=128256`."""
        origins = {f"model.{key}": "given" for key in model}
        return replace(self, model={**self.model, **model}, origins={**self.origins, **origins})

    def and_also(self, other: Reading) -> Reading:
        """Both together, as a DeepSpeed JSON and the config.json of its model. Raises ConfigError
        where they contradict each other."""
        for section in ("model", "layout"):
            ours, theirs = getattr(self, section), getattr(other, section)
            for key in ours.keys() & theirs.keys():
                _agree(f"{section}.{key}", (self, ours[key]), (other, theirs[key]))
        for key in ("seq_len", "global_batch", "world"):
            _agree(key, (self, getattr(self, key)), (other, getattr(other, key)))
        return replace(
            self,
            source=f"{self.source} + {other.source}",
            model={**other.model, **self.model},
            layout={**other.layout, **self.layout},
            seq_len=self.seq_len or other.seq_len,
            global_batch=self.global_batch or other.global_batch,
            world=self.world or other.world,
            origins={**other.origins, **self.origins},
            unused={**other.unused, **self.unused},
            notes=self.notes + other.notes,
            problems={**other.problems, **self.problems},
        )


def _agree(key: str, ours: tuple[Reading, Any], theirs: tuple[Reading, Any]) -> None:
    if None not in (ours[1], theirs[1]) and ours[1] != theirs[1]:
        fix = f"{ours[0].source} says {ours[1]!r}; leave it out of one of them"
        raise ConfigError(f"{theirs[0].source}: {key}", theirs[1], fix)


class Keys(Mapping[str, Any]):
    """Keys of a source, which remembers which of them were asked for."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self.source, self.used = raw, source, set[str]()

    def __getitem__(self, key: str) -> Any:
        if key in self._raw:
            self.used.add(key)
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:
        if key in self._raw:
            self.used.add(str(key))
            return True
        return False

    @property
    def unused(self) -> dict[str, Any]:
        """What nobody asked for."""
        return {key: value for key, value in self._raw.items() if key not in self.used}

    def count(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least `least`; `default` where the key is absent or "auto"."""
        value = self.get(key)
        if value is None or value == "auto":
            return default
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if isinstance(value, bool) or number < least or number != _as_float(value):
            raise self.wrong(key, value, f"must be a whole number, at least {least}")
        return number

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; `default` where the key is absent or "auto"."""
        value = self.get(key)
        return default if value is None or value == "auto" else self.as_number(key, value)

    def as_number(self, key: str, value: object) -> float:
        """`value` as a number: the one of `key`, or one of several that it holds."""
        number = _as_float(value)
        if number is None or isinstance(value, bool):
            raise self.wrong(key, value, "must be a number")
        return number

    def one_of(self, key: str, known: Mapping[str, Any], default: Any) -> Any:
        """What `known` makes of the value, in any case; `default` where the key is absent."""
        value = self.get(key)
        if value is None:
            return default
        for word, meaning in known.items():
            if str(value).lower() == word.lower():
                return meaning
        raise self.wrong(key, value, f"can be read: {', '.join(known)}")

    def wrong(self, key: str, value: object, fix: str) -> ConfigError:
        """The error for a value that cannot be used; says how to mend an unset variable."""
        if isinstance(value, str) and "$" in value:
            fix = "the script does not set this variable; write a number instead"
        return ConfigError(f"{self.source}: {key}", value, fix)


def _as_float(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@dataclass
class Draft:
    """A Reading in the making."""

    source: str
    format: Format
    world: int | None
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    seq_len: int | None = None
    global_batch: int | None = None
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set the dotted `key`; nothing if the value is None."""
        if value is None:
            return
        section, dot, name = key.partition(".")
        if dot:
            getattr(self, section)[name] = value
        else:
            setattr(self, key, value)
        self.origins[key] = origin

    def put_data_axes(self, stage: int, copies: int, per_replica: int, origin: str) -> None:
        """What is left of the world for data: `copies` replicas of shards, all sharded as ZeRO
        `stage` says. `per_replica`: ranks of the model's own axes. Without a world, a note."""
        if self.world is None:
            self.notes.append("data-parallel size unknown; give the number of chips")
            return
        if self.world % (per_replica * copies):
            fix = f"the other axes take {per_replica * copies} chips; give a multiple of that"
            raise ConfigError("world", self.world, fix)
        dp = self.world // per_replica
        shard = dp // copies if stage else 1
        self.put("layout.dp_replicate", dp // shard, origin)
        self.put("layout.dp_shard", shard, origin)
        if stage and shard * self.layout.get("cp", 1) > 1:
            self.put("layout.zero", stage, origin)
        elif stage == 0:
            self.put("layout.zero", 0, origin)

    def finished(self, keys: Keys) -> Reading:
        """The Reading; all keys that were not asked for are unused."""
        return Reading(
            source=self.source,
            format=self.format,
            model=self.model,
            layout=self.layout,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            world=self.world,
            origins=self.origins,
            unused={**keys.unused, **{key: keys.get(key) for key in self.problems}},
            notes=tuple(self.notes),
            problems=self.problems,
        )
