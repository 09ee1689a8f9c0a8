"""Constants of the cost model: fitted once on published runs, kept with what they miss by."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from meshwright.base.errors import ConfigError
from meshwright.plan.cost.framework import Framework
from meshwright.plan.cost.rates import Software

# A constant that was fitted is `measured`; one that no published run says anything about is
# `assumed`, and what rests on it gets the wider interval.
ASSUMED = "assumed"


@dataclass(frozen=True)
class Constant:
    """One number: its value, what it was before any run was looked at and how far it may move
    (standard deviation of its logarithm; 0: not fitted), the same after the fit, and its kind."""

    value: float
    prior: float
    spread: float
    error: float
    kind: str


@dataclass(frozen=True)
class Constants:
    """`constants.toml`, or the same from a calibration of a user's own cluster.

    `like` names for a chip or style without constants of its own the one that stands in for it.
    `intervals` holds, by kind of run, the share of the prediction below and above which one
    published run in ten lies that the fit has not seen.
    """

    table: Mapping[str, Constant]
    like: Mapping[str, str]
    styles: Mapping[str, Mapping[str, Any]]
    intervals: Mapping[str, tuple[float, float]]

    @classmethod
    def shipped(cls) -> Self:
        """Those that come with Meshwright."""
        path = files("meshwright.plan.cost").joinpath("constants.toml")
        return cls.parse(_tables(path.read_text(encoding="utf-8")))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Those of a file. Raises ConfigError where it is none."""
        try:
            return cls.parse(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ConfigError("constants", str(path), f"cannot be read: {error}") from error

    @classmethod
    def parse(cls, tables: Mapping[str, Any]) -> Self:
        """From the tables of such a file."""
        return cls(
            table={name: Constant(**entry) for name, entry in tables["constants"].items()},
            like=tables["like"],
            styles=tables["software"],
            intervals={name: (low, high) for name, (low, high) in tables["intervals"].items()},
        )

    @property
    def values(self) -> dict[str, float]:
        """Names and values alone."""
        return {name: constant.value for name, constant in self.table.items()}

    def software(self, framework: Framework, flash: bool = True) -> Software:
        """What `framework` can do, as far as time depends on it. One that is not in the file is
        taken for Transformer Engine with everything overlapped."""
        known = dict(self.styles.get(framework.name, self.styles["any"]))
        if not flash:
            known["attention"] = "unfused"
        return Software(
            **known,
            tp_overlap=framework.overlaps_tp,
            dp_overlap=framework.overlaps_dp,
            pp_overlap=framework.overlaps_pp,
            gathers=framework.gathers_tokens,
        )

    def origin(self, chip: str) -> str:
        """`measured` where products were fitted on this very chip, `interpolated` where on one that
        it is like, else `assumed`."""
        own = self.table.get(f"product.{chip}")
        if own and own.kind != ASSUMED:
            return "measured"
        stand_in = self.table.get(f"product.{self.like.get(chip, '')}")
        return "interpolated" if stand_in and stand_in.kind != ASSUMED else ASSUMED

    def spread(self, chip: str, moe: bool) -> tuple[float, float]:
        """Shares of the prediction between which four of five runs lie."""
        if self.origin(chip) == ASSUMED:
            return self.intervals[ASSUMED]
        return self.intervals["moe" if moe else "dense"]

    def assumed(self, chip: str, software: Software, precision: str) -> tuple[str, ...]:
        """Names of the constants behind a prediction that no run speaks for."""
        low = {"fp8": "product8", "fp4": "product4"}.get(precision, "product")
        wanted = {
            low: chip,
            f"attention.{software.attention}": chip,
            "link": chip,
            **dict.fromkeys(("moves", "host_layer_s", "step_s", "shard_hidden"), software.style),
        }
        names = [self._resolve(name, key) for name, key in wanted.items()]
        return tuple(name for name in names if self.table[name].kind == ASSUMED)

    def _resolve(self, name: str, key: str) -> str:
        while f"{name}.{key}" not in self.table and key in self.like:
            key = self.like[key]
        own = f"{name}.{key}"
        return own if own in self.table else f"{name}.any"


@cache
def _tables(text: str) -> dict[str, Any]:
    return tomllib.loads(text)
