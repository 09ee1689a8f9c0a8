"""The figures of chips as they are answered: the newest, and their history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.control import samples
from meshwright.control.figures import CHIP_FIGURES, FIGURE_NAMES
from meshwright.control.samples import Chunk, Recorder
from meshwright.control.views import SeriesView

MOST_VALUES = 200_000  # of one answer


def as_figures(row: npt.NDArray[np.float32] | None) -> dict[str, float | None]:
    """The figures of one chip by name; null for what is not known."""
    if row is None:
        return dict.fromkeys(FIGURE_NAMES)
    return dict(zip(FIGURE_NAMES, _plain(row), strict=True))


def series(
    connection: Connection,
    recorder: Recorder | None,
    cluster: str,
    figure: str,
    chips: Sequence[int],
    grain_s: int,
    first_s: float,
    last_s: float,
) -> SeriesView:
    """The history of one figure between two times. Raises ConfigError for what cannot be had."""
    if figure not in FIGURE_NAMES:
        hint = did_you_mean(figure, FIGURE_NAMES) or f"; known: {', '.join(FIGURE_NAMES)}"
        raise ConfigError("figure", figure, f"there is no such figure{hint}")
    if grain_s not in samples.GRAINS_S:
        raise ConfigError("grain_s", grain_s, "give 1, 60 or 3600")
    if (last_s - first_s) / grain_s * max(1, len(chips)) > MOST_VALUES:
        raise ConfigError(
            "start", first_s, f"more than {MOST_VALUES} values; ask for less, or a coarser grain_s"
        )
    place = FIGURE_NAMES.index(figure)
    found = samples.history(connection, cluster, grain_s, first_s, last_s, len(FIGURE_NAMES))
    if recorder is not None and (recent := recorder.recent(grain_s)) is not None:
        found.append(recent)
    rows = _rows(found, place, chips, first_s, last_s)
    times = sorted(rows)
    mean, low, high = _lines([rows[time] for time in times])
    return SeriesView(
        figure=figure,
        unit=CHIP_FIGURES[place].unit,
        grain_s=grain_s,
        times=times,
        chips=list(chips),
        mean=mean or [[] for _ in chips],
        low=low or [[] for _ in chips],
        high=high or [[] for _ in chips],
    )


def _rows(
    chunks: Sequence[Chunk], place: int, chips: Sequence[int], first_s: float, last_s: float
) -> dict[float, npt.NDArray[np.float32]]:
    """By the start of each interval: an array of (mean, low, high) x chips."""
    rows: dict[float, npt.NDArray[np.float32]] = {}
    for chunk in chunks:
        _, parts, count, _ = chunk.rows.shape
        there = [chip for chip in chips if chip < count]
        picked = np.full((len(chunk.rows), 3, len(chips)), np.nan, np.float32)
        columns = [i for i, chip in enumerate(chips) if chip < count]
        values = chunk.rows[:, :, there, place]
        picked[:, :, columns] = values if parts == 3 else np.repeat(values, 3, axis=1)
        for number, row in enumerate(picked):
            start_s = float(chunk.start_s + number * chunk.grain_s)
            if first_s <= start_s <= last_s and not np.isnan(row).all():
                rows[start_s] = row
    return rows


def _lines(rows: Sequence[npt.NDArray[np.float32]]) -> list[list[list[float | None]]]:
    """For mean, low and high: for each chip, a value for each row; null where it is not known."""
    if not rows:
        return [[], [], []]
    values = np.stack(rows, axis=-1).astype(object)  # (3, chips, times)
    values[values != values] = None
    found: list[list[list[float | None]]] = values.tolist()
    return found


def _plain(values: npt.NDArray[np.float32]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
