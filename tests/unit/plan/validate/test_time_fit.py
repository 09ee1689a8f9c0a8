"""The fit of constants finds what made the data, and stays at its priors where nothing speaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.cost.constants import Constants
from meshwright.plan.validate.rows import Run, read_row
from meshwright.plan.validate.time_fit import CEILINGS, fit, folds, source_weights
from meshwright.plan.validate.time_model import Columns
from meshwright.plan.validate.time_refit import as_toml, refit

BASE = {
    "source": "made up", "model": "Llama", "layers": "32", "hidden": "4096", "ffn_hidden": "14336",
    "heads": "32", "kv_heads": "8", "vocab": "128256", "chip": "H100", "precision": "bf16",
    "sharding": "zero1", "recompute": "none", "sequence_parallel": "yes", "step_time_s": "1",
}  # fmt: skip


def made_up(truth: Constants) -> Columns:
    """Runs whose times are exactly what `truth` says."""
    runs = []
    for number, (tp, pp, length, micro) in enumerate(
        [(1, 1, 4096, 2), (2, 1, 8192, 1), (4, 2, 2048, 4), (8, 1, 4096, 1), (1, 4, 1024, 8)] * 2
    ):
        dp = 64 // tp // pp
        found = read_row(
            {
                **BASE,
                "id": f"{'mbridge' if number % 2 else 'nemo'}-{number}",
                "seq_len": str(length),
                "n_chips": "64",
                "dp": str(dp),
                "tp": str(tp),
                "pp": str(pp),
                "micro_batch": str(micro),
                "global_batch_sequences": str(dp * micro * 8),
                "notes": "",
            }
        )
        assert isinstance(found, Run), found
        runs.append(found)
    columns = Columns.of(runs)
    return replace(columns, measured_s=columns.predict(truth.values, truth.like)["step"])


def only(names: tuple[str, ...]) -> Constants:
    """The shipped priors, of which only `names` may move."""
    known = Constants.shipped()
    table = {
        name: replace(constant, value=constant.prior, spread=0.5 if name in names else 0.0)
        for name, constant in known.table.items()
    }
    return replace(known, table=table)


def changed(known: Constants, name: str, factor: float) -> Constants:
    one = known.table[name]
    moved = replace(one, value=one.prior * factor)
    return replace(known, table={**known.table, name: moved})


@pytest.mark.parametrize("factor", [0.7, 1.15])
def test_the_fit_finds_the_constant_that_made_the_data(factor: float) -> None:
    start = only(("product.h100", "moves.te"))
    columns = made_up(changed(start, "product.h100", factor))
    found = fit(columns, start, np.full(len(columns.runs), 100.0))
    expected = start.table["product.h100"].prior * factor
    assert found.constants.values["product.h100"] == pytest.approx(expected, rel=0.03)
    assert np.abs(found.residuals).max() < 0.02
    assert found.constants.table["product.h100"].kind == "measured"


def test_what_no_run_speaks_for_stays_and_is_assumed() -> None:
    start = only(("product.h100", "product.v100"))
    columns = made_up(changed(start, "product.h100", 0.8))
    found = fit(columns, start, np.full(len(columns.runs), 100.0)).constants.table["product.v100"]
    assert found.value == pytest.approx(found.prior)
    assert found.kind == "assumed"


def test_one_wild_row_does_not_move_the_fit() -> None:
    start = only(("product.h100",))
    columns = made_up(changed(start, "product.h100", 0.8))
    wild = columns.measured_s.copy()
    wild[3] *= 5.0
    found = fit(replace(columns, measured_s=wild), start, np.full(len(wild), 100.0))
    expected = 0.8 * start.table["product.h100"].prior
    assert found.constants.values["product.h100"] == pytest.approx(expected, rel=0.05)


def test_shares_stay_below_their_ceilings() -> None:
    start = only(("product.h100",))
    columns = made_up(start)
    fast = replace(columns, measured_s=columns.measured_s / 3.0)
    found = fit(fast, start, np.full(len(fast.runs), 100.0))
    assert found.constants.values["product.h100"] <= CEILINGS["product"]


def test_folds_hold_whole_sources() -> None:
    columns = made_up(Constants.shipped())
    fold = folds(columns, 2)
    keys = [run.source.key for run in columns.runs]
    assert len({(key, part) for key, part in zip(keys, fold, strict=True)}) == 2
    assert set(fold) == {0, 1}


def test_rows_of_large_sources_weigh_less() -> None:
    columns = made_up(Constants.shipped())
    assert source_weights(columns)[0] == pytest.approx(5.0 / np.sqrt(5))


def test_written_constants_are_read_back(tmp_path: Path) -> None:
    known = Constants.shipped()
    path = tmp_path / "constants.toml"
    path.write_text(as_toml(known))
    again = Constants.read(path)
    assert again.values == known.values
    assert (again.like, again.styles) == (known.like, known.styles)


def test_unseen_rows_give_the_intervals() -> None:
    """Held out, each of two sources is predicted by constants of the other."""
    start = only(("product.h100",))
    columns = made_up(changed(start, "product.h100", 0.8))
    noisy = columns.measured_s * np.exp(np.linspace(-0.1, 0.1, len(columns.runs)))
    found = refit(replace(columns, measured_s=noisy), start, parts=2)
    median = found.errors("dense").median_abs_error
    assert median is not None
    assert 0.0 < median < 0.12
    assert found.errors("moe").used == 0
