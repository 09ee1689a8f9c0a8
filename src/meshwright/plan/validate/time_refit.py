"""`python -m meshwright.plan.validate.time_refit`: fits `constants.toml` again and says how far the
fit is from runs that it has not seen. Some four minutes, by hand after a change of the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.constants import ASSUMED, Constants
from meshwright.plan.validate.rows import Run, read_runs, read_vtrain
from meshwright.plan.validate.time_fit import Fit, cross_validate, fit, source_weights
from meshwright.plan.validate.time_model import Columns
from meshwright.plan.validate.time_report import Errors

Floats = NDArray[np.float64]

EVERY = 3  # of vTrain's rows, the third, sixth, ...; the published ones are others
HEAD = """\
# Constants of step time, written by `python -m meshwright.plan.validate.time_refit`. Their meanings
# are in rates.py.
#
# value: in SI units, or a share; prior: what it was before the fit (public measurements, data
# sheets, arithmetic of the kernels); spread: how far its logarithm may move from there (0: not
# fitted); error: the same once fitted; kind: measured where runs pin it down better than the prior
# did, else assumed. No constant belongs to a row or to a source.
"""


@dataclass(frozen=True)
class Refit:
    """A fit on all development runs, and ln(predicted / measured) of the same runs with constants
    that saw none of their source."""

    columns: Columns
    seen: Fit
    unseen: Floats

    def errors(self, kind: str) -> Errors:
        """Figures on unseen rows of the published runs: `all`, `dense` or `moe`."""
        return Errors.of(np.expm1(self.unseen[self._which(kind)]), 0)

    def _which(self, kind: str) -> NDArray[np.bool_]:
        """Rows of one kind; vTrain's own table is one source of many rows and counts apart."""
        routed = np.array([run.spec.n_experts > 0 for run in self.columns.runs])
        table = np.array([run.id.startswith("vtrain-single") for run in self.columns.runs])
        chosen = {"all": routed | ~routed, "dense": ~routed, "moe": routed}[kind]
        return np.asarray(~table & chosen)

    @property
    def constants(self) -> Constants:
        """Those of the fit, with the intervals that unseen rows give; where constants are assumed
        a quarter wider, in logarithms, than the wider of both."""
        intervals = {}
        for kind in ("dense", "moe"):
            low, high = np.exp(-np.quantile(self.unseen[self._which(kind)], [0.9, 0.1]))
            intervals[kind] = (float(low), float(high))
        low, high = intervals["moe"]
        intervals[ASSUMED] = (low**1.25, high**1.25)
        return replace(self.seen.constants, intervals=intervals)


def development(published: Path, vtrain: Path | None) -> Columns:
    """All runs that constants may be fitted on."""
    rows = read_runs(published)
    if vtrain is not None:
        rows += read_vtrain(vtrain)[EVERY::EVERY]
    return Columns.of([row for row in rows if isinstance(row, Run)])


def refit(columns: Columns, start: Constants, parts: int = 5) -> Refit:
    """Fit, and cross-validate by source."""
    seen = fit(columns, start, source_weights(columns))
    return Refit(columns, seen, cross_validate(columns, start, parts))


def as_toml(constants: Constants) -> str:
    """The text of `constants.toml`."""
    lines = [
        HEAD,
        "# One unseen run in ten lies below, and one above, these shares of its prediction.",
    ]
    lines.append("[intervals]")
    lines += [
        f"{name} = [{low:.3f}, {high:.3f}]" for name, (low, high) in constants.intervals.items()
    ]
    lines += ["", "# What stands in for a chip or style without constants of its own.", "[like]"]
    lines += [f"{name} = {json.dumps(other)}" for name, other in constants.like.items()]
    lines += ["", "# What frameworks can do (Software in rates.py); overlap is in framework.toml."]
    for name, keys in constants.styles.items():
        lines.append(f"[software.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    lines += ["", "[constants]"]
    for name, one in constants.table.items():
        lines.append(
            f'"{name}" = {{ value = {one.value:.4g}, prior = {one.prior:.4g}, '
            f'spread = {one.spread:g}, error = {one.error:.3g}, kind = "{one.kind}" }}'
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """PUBLISHED.csv [VTRAIN.csv]: writes the constants and prints the figures."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: python -m ...time_refit PUBLISHED.csv [VTRAIN.csv]\n")
        return 2
    published, *more = (Path(argument) for argument in arguments)
    found = refit(development(published, more[0] if more else None), Constants.shipped())
    path = Path(str(files("meshwright.plan.cost").joinpath("constants.toml")))
    path.write_text(as_toml(found.constants), encoding="utf-8")
    for kind in ("all", "dense", "moe"):
        sys.stdout.write(f"unseen, {kind}: {found.errors(kind)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
